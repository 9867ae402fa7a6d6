"""A run with compressed gradients that was stopped goes on: bitwise on its mesh, with the same sum on another."""

import jax
import numpy as np
import pytest

from meshtrain.assembly.assemble import assemble
from meshtrain.checkpoint.other_runs import find
from meshtrain.config.resume import from_json
from meshtrain.run import initial_state
from meshtrain.sharding.rules import AXES
from meshtrain.sharding.trees import leaves_with_paths
from scripts.benchmarks import compression

INT8 = ("mesh.data=2", "reduction.name=int8", "model.num_layers=2")


def on_mesh(directory, **sizes):
    """The state, in layer order, with which a run goes on on another mesh."""
    shape = dict.fromkeys(AXES, 1) | sizes
    config = from_json((directory / "config.json").read_text())
    assembly = assemble(config, shape, jax.devices()[: int(np.prod(list(shape.values())))])
    with find(directory) as checkpoints:
        state, step, _ = initial_state.restore_or_initialize(assembly, checkpoints)
    assert step == 5
    return assembly.steps.to_kept(state)


@pytest.fixture(scope="module")
def stop(stopped):
    return stopped(*INT8)


@pytest.mark.slow
def test_on_the_same_mesh_every_bit_is_the_same(run, stopped, tmp_path):
    whole, resumed = run(tmp_path / "run", *INT8), run(stopped(*INT8), *INT8)
    assert resumed.losses == whole.losses
    jax.tree.map(np.testing.assert_array_equal, resumed.result.state, whole.result.state)


@pytest.mark.parametrize("mesh", [{"data": 2}, {}, {"data": 4, "pipeline": 2}], ids=str)
def test_the_residuals_of_a_checkpoint_add_up_to_the_same_on_any_mesh(stop, mesh):
    saved, found = on_mesh(stop, data=2), on_mesh(stop, **mesh)
    same_mesh = mesh == {"data": 2}
    for (path, before), (_, after) in zip(*(leaves_with_paths(one.extra) for one in (saved, found)), strict=True):
        assert np.abs(before).max() > 0, path
        assert after.shape == (mesh.get("data", 1), *before.shape[1:])
        np.testing.assert_allclose(np.sum(after, axis=0), np.sum(before, axis=0), rtol=1e-6, atol=1e-9)
        assert not same_mesh or (np.asarray(after) == np.asarray(before)).all()
    jax.tree.map(np.testing.assert_array_equal, found.params, saved.params)


@pytest.mark.slow
def test_three_steps_of_the_table_of_kinds(capsys):
    small = {"num_layers": 1, "embed_dim": 16, "mlp_dim": 16, "num_heads": 2, "num_kv_heads": 2}
    words = ["--steps=3", "--seeds=1", "--kinds=none,int8"]
    assert compression.main([*words, *(f"--config.model.{name}={size}" for name, size in small.items())]) == 0
    plain, int8 = capsys.readouterr().out.splitlines()[2:]
    assert plain.startswith("| 0 | none | 7.00 | ")
    assert int8.startswith("| 0 | int8 | 1.78 | ")
    assert plain.split("|")[4:6] != int8.split("|")[4:6], "one of them is packed"
