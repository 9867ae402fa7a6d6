"""ZeRO levels 1 and 2 in a pipeline of 16 bits: replicas store shards of the float32 weights, and gather them cast."""

import jax
import numpy as np
import pytest

from meshtrain.assembly import states
from meshtrain.assembly.assemble import assemble
from meshtrain.config.resolve import parse
from meshtrain.plan.cost import lower_bound
from meshtrain.sharding.mesh import mesh_shape
from tests.golden.test_golden_placements import AbsentDevice

SIZES = {
    "mesh.data": 2, "mesh.pipeline": 2, "zero.level": 1, "precision.policy": "bfloat16", "model.num_layers": 4,
    "model.embed_dim": 32, "model.mlp_dim": 64, "model.num_heads": 2, "model.num_kv_heads": 2, "model.vocab_size": 260,
    "pipeline.schedule": "interleaved_1f1b", "pipeline.num_chunks": 2, "pipeline.num_microbatches": 2,
    "batch_size": 4, "sequence_length": 16,
}  # fmt: skip


def assembled(devices=None, **changes):
    given = SIZES | {name.replace("__", "."): value for name, value in changes.items()}
    config, _ = parse([f"--config.{name}={value}" for name, value in given.items()], reads_data=False)
    shape = mesh_shape(config.mesh, 4, simulated=True)
    return assemble(config, shape, devices or [AbsentDevice(i) for i in range(4)])


def are_split(assembly):
    """Whether data splits the matrices of layers as the state has them."""
    matrices = [leaf for leaf in jax.tree.leaves(assembly.state.params["layers"]) if leaf.size >= 2 * 32 * 32]
    found = {"data" in str(leaf.sharding.spec) for leaf in matrices}
    assert len(found) == 1
    return found.pop()


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({}, True),
        ({"zero__level": 2}, True),
        ({"zero__level": 0}, False),
        ({"precision__policy": "float32"}, False),
        ({"precision__param_dtype": "bfloat16"}, False),
        ({"mesh__pipeline": 1, "mesh__tensor": 2, "pipeline__schedule": "1f1b", "pipeline__num_chunks": 1}, False),
        ({"optimizer__trainable": "attention"}, False),
    ],
)
def test_which_runs_store_shards_of_weights(changes, expected):
    assert are_split(assembled(**changes)) == expected


def trained(steps=2):
    """Whether weights are split, losses, and all weights after some steps."""
    one_chunk = {"pipeline__schedule": "1f1b", "pipeline__num_chunks": 1, "model__num_layers": 2}
    assembly = assembled(jax.devices()[:4], **one_chunk)
    state, losses = assembly.steps.init(jax.random.key_data(jax.random.key(0))), []
    tokens = np.random.default_rng(0).integers(0, 260, (steps, 4, 17))
    filled = {"weights": 1, "segment_ids": 0, "positions": np.arange(16)}
    for each in tokens:
        arrays = filled | {"tokens": each[:, :-1], "targets": each[:, 1:]}
        batch = {
            name: jax.device_put(np.broadcast_to(np.asarray(arrays[name], entry.dtype), entry.shape), entry.sharding)
            for name, entry in assembly.batch.items()
        }
        state, metrics = assembly.steps.train(state, batch)
        losses.append(float(metrics["loss"]))
    return are_split(assembly), losses, jax.device_get(state.params)


def test_shards_change_no_bit(monkeypatch, exact_bits):
    split, losses, params = trained()
    monkeypatch.setattr(states, "splits_masters", lambda *_: False)
    whole, expected_losses, expected = trained()
    assert (split, whole) == (True, False)
    assert losses == expected_losses
    jax.tree.map(np.testing.assert_array_equal, params, expected)


def test_weights_of_layers_are_gathered_in_16_bits():
    """What a device scatters and gathers: gradients in float32, matrices of layers in bfloat16, all else in float32."""
    assembly = assembled()
    params, stages = assembly.state.params, 2
    of_layers = sum(leaf.size for leaf in jax.tree.leaves(params["layers"]) if leaf.ndim > 3) / stages
    others = sum(leaf.size for leaf in jax.tree.leaves(params)) / stages - of_layers
    others += params["head"]["norm"]["scale"].size / stages  # which every stage has
    sent = 4 * (of_layers + others) + 2 * of_layers + 4 * others
    assert lower_bound.wire_bytes_minimum(assembly)["data"] == sent / 2
