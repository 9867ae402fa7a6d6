"""Moments in fewer bytes: every mesh saves the same arrays, bytes are as counted, and runs resume elsewhere."""

import jax
import numpy as np
import pytest

from meshtrain.assembly.assemble import assemble
from meshtrain.checkpoint.other_runs import find
from meshtrain.config.resolve import resolve
from meshtrain.config.resume import from_json
from meshtrain.optim import moments
from meshtrain.plan.search.estimate import state_bytes, weights_of
from meshtrain.run import initial_state
from meshtrain.sharding.rules import AXES
from meshtrain.sharding.trees import leaves_with_paths
from meshtrain.step.device_memory import training_state_bytes
from scripts.benchmarks import rounding

SMALL = {
    "batch_size": 16,
    "sequence_length": 8,
    "model": {"num_layers": 4, "embed_dim": 64, "mlp_dim": 128, "num_heads": 4, "num_kv_heads": 4, "vocab_size": 60},
    "data": {"source": "synthetic"},
}
IN_CHUNKS = {"schedule": "interleaved_1f1b", "num_microbatches": 2, "num_chunks": 2}
MESHES = [
    ({}, {}),
    ({"zero": {"level": 1}}, {"data": 4, "tensor": 2}),
    ({"zero": {"level": 3}}, {"data": 2, "fsdp": 2}),
    ({"zero": {"level": 2}, "pipeline": IN_CHUNKS}, {"data": 2, "pipeline": 2}),
]
EIGHT_BITS = ("optimizer.moments=8bit", "mesh.data=2")


def assembled(axes, *changes):
    sizes, given = dict.fromkeys(AXES, 1) | axes, SMALL
    for change in changes:
        given = given | change
    return assemble(resolve(given), sizes, jax.devices()[: int(np.prod(list(sizes.values())))])


@pytest.mark.parametrize("others", [{}, {"lora": {"rank": 4}}, {"optimizer": {"name": "muon"}}], ids=str)
def test_checkpoints_of_all_meshes_hold_the_same_arrays(others):
    options = {"optimizer": {"moments": "8bit", "moment_block": 64} | others.get("optimizer", {})}
    found = []
    for changes, axes in MESHES:
        assembly = assembled(axes, changes, others, options)
        config, sizes = assembly.config, dict(assembly.mesh.shape)
        assert training_state_bytes(assembly.state, assembly.states.sums).total == state_bytes(
            config, sizes, weights_of(config)
        )
        found.append([(path, x.shape, x.dtype) for path, x in leaves_with_paths(assembly.states.kept)])
    assert all(arrays == found[0] for arrays in found)
    dtypes = {path: dtype for path, _, dtype in found[0]}
    codes = [path for path in dtypes if dtypes[path] in (np.int8, np.uint8)]
    assert codes
    assert {path.replace("/inner/", "/scales/") for path in codes} <= set(dtypes)


@pytest.mark.parametrize(("changes", "axes"), MESHES[1:], ids=str)
def test_moments_take_a_half_and_a_quarter_on_each_device(changes, axes):
    whole, half, quarter = (
        training_state_bytes(assembly.state, assembly.states.sums).moments
        for assembly in (assembled(axes, changes, {"optimizer": {"moments": kind}}) for kind in moments.KINDS)
    )
    assert half == pytest.approx(whole / 2, rel=0.01)
    # Norms are a large part of this small model, and a scale is four bytes for each 256 of a block.
    assert quarter == pytest.approx(whole * (1 + 4 / 256) / 4, rel=0.05)


@pytest.mark.slow
def test_a_run_goes_on_from_the_same_bits_on_another_mesh(stopped):
    directory = stopped(*EIGHT_BITS)

    def on_mesh(**sizes):
        shape = dict.fromkeys(AXES, 1) | sizes
        config = from_json((directory / "config.json").read_text())
        assembly = assemble(config, shape, jax.devices()[: int(np.prod(list(shape.values())))])
        with find(directory) as checkpoints:
            state, step, _ = initial_state.restore_or_initialize(assembly, checkpoints)
        assert step == 5
        return assembly.steps.to_kept(state).opt_state

    saved, other = on_mesh(data=2), on_mesh(fsdp=2, tensor=2)
    assert any(leaf.dtype == np.int8 and np.any(leaf) for leaf in jax.tree.leaves(saved))
    jax.tree.map(np.testing.assert_array_equal, saved, other)


@pytest.mark.slow
def test_three_steps_of_the_table_of_roundings(capsys):
    small = {"num_layers": 1, "embed_dim": 32, "mlp_dim": 32, "num_heads": 2, "num_kv_heads": 2}
    words = ["--steps=3", "--kinds=float32,moments-8bit,fp8"]
    assert rounding.main([*words, *(f"--config.model.{name}={size}" for name, size in small.items())]) == 0
    plain, eight, products = capsys.readouterr().out.splitlines()[2:]
    assert plain.startswith("| float32 | 0.95 | ")
    assert eight.startswith("| moments-8bit | 0.95 | ")
    assert eight.split("|")[5].endswith("% of float32 ")
    assert products.startswith("| fp8 | 0.95 | ")
    losses = {tuple(row.split("|")[3:5]) for row in (plain, eight, products)}
    assert len(losses) == 3, "one of them is not rounded"
