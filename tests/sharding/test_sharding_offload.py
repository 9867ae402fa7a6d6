"""Moments that wait in the host's memory: where they are, and that no number changes. On CPU; no GPU has been asked."""

import dataclasses
import types

import jax
import numpy as np
import pytest

from meshtrain.assembly.assemble import assemble
from meshtrain.assembly.facts import array_rows
from meshtrain.checkpoint.checkpoint import Checkpoints
from meshtrain.checkpoint.retention import CheckpointOptions
from meshtrain.config.schema import Config
from meshtrain.errors import UserError
from meshtrain.models.remat import RematOptions
from meshtrain.models.transformer.decoder import DecoderOptions
from meshtrain.pipeline.schedules import PipelineOptions
from meshtrain.sharding import offload
from meshtrain.sharding.offload import OffloadOptions
from meshtrain.sharding.param_sharding import ZeroOptions
from meshtrain.sharding.placement_text import table
from meshtrain.sharding.rules import AXES

CONFIG = Config(
    batch_size=8,
    sequence_length=8,
    model=DecoderOptions(num_layers=4, embed_dim=32, mlp_dim=64, num_heads=4, num_kv_heads=4, vocab_size=100),
    pipeline=PipelineOptions("interleaved_1f1b", num_microbatches=2, num_chunks=2),
)
MESHES = [{}, {"data": 2, "fsdp": 2}, {"data": 2, "pipeline": 2}]


def assembled(on_host, mesh, level=0):
    config = dataclasses.replace(CONFIG, offload=OffloadOptions(moments=on_host), zero=ZeroOptions(level=level))
    shape = dict.fromkeys(AXES, 1) | mesh
    return assemble(config, shape, jax.devices()[: int(np.prod(list(shape.values())))])


def steps(assembly, num_steps):
    state = assembly.steps.init(jax.random.key_data(jax.random.key(0)))
    generator = np.random.default_rng(0)
    for _ in range(num_steps):
        draw = {name: generator.integers(1, 3, leaf.shape).astype(leaf.dtype) for name, leaf in assembly.batch.items()}
        batch = {name: jax.device_put(draw[name], leaf.sharding) for name, leaf in assembly.batch.items()}
        state, _ = assembly.steps.train(state, batch)
    return state


def kinds(tree):
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree) if leaf.ndim}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: "-".join(mesh) or "one")
def test_moments_are_on_the_host_and_no_number_changes(mesh):
    ours, other = steps(assembled(True, mesh), 3), steps(assembled(False, mesh), 3)
    assert kinds(ours.opt_state) == {"pinned_host"}
    assert kinds(ours.params) | kinds(other) <= {"device", None}
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(ours), jax.device_get(other))


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: "-".join(mesh) or "one")
def test_moments_live_on_the_host_in_the_run_and_in_its_checkpoints(mesh):
    assembly = assembled(True, mesh)
    for state in (assembly.state, assembly.states.kept):
        assert kinds(state.opt_state) == {"pinned_host"}
        assert kinds(state.params) <= {"device", None}
    assert kinds(assembled(False, mesh).state) <= {"device", None}


def test_shards_of_moments_are_on_the_host():
    state = assembled(True, {"data": 4}, level=1).state
    table_home = state.opt_state[0].mu["embedding"]["table"].sharding
    assert "data" in str(table_home.spec)
    assert table_home.memory_kind == "pinned_host"


def test_a_checkpoint_goes_from_the_host_to_the_device_and_back(tmp_path):
    mesh = {"data": 2, "fsdp": 2}
    state = assembled(True, mesh).steps.init(jax.random.key_data(jax.random.key(0)))
    assert kinds(state.opt_state) == {"pinned_host"}
    with Checkpoints(tmp_path, CheckpointOptions()) as checkpoints:
        checkpoints.save(1, state, {})
        for on_host, kind in ((True, {"pinned_host"}), (False, {"device", None})):
            again = checkpoints.restore(1, assembled(on_host, mesh).states.kept)
            assert kinds(again.opt_state) <= kind
            jax.tree.map(np.testing.assert_array_equal, jax.device_get(again), jax.device_get(state))


def test_it_is_told_who_holds_what():
    lines = table(array_rows(assembled(True, {"data": 2}))).splitlines()
    assert all(("opt_state/" in line and "/count" not in line) == line.endswith("on its host") for line in lines[2:-2])
    assert "for each device in host memory" in lines[-1]
    assert "host" not in table(array_rows(assembled(False, {"data": 2})))


def test_devices_without_a_host_memory_are_refused():
    memories = lambda: [types.SimpleNamespace(kind="device")]  # noqa: E731
    device = types.SimpleNamespace(platform="odd", addressable_memories=memories)
    [line] = offload.problems("offload.moments=True", [device])
    assert line.startswith(
        "offload.moments: got True, but odd devices have no memory of kind pinned_host (only device);"
    )
    assert offload.problems("offload.moments=True", jax.devices()) == []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload, "HOST", "elsewhere")
        config = dataclasses.replace(CONFIG, offload=OffloadOptions(True), remat=RematOptions("offload"))
        with pytest.raises(UserError) as caught:
            assemble(config, dict.fromkeys(AXES, 1), jax.devices()[:1])
    assert [line.partition(":")[0] for line in caught.value.problems] == ["offload.moments", "remat.policy"]
