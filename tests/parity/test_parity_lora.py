"""Adapters on a mesh: the gradients of one device for each of them, and nothing kept for the frozen weights.

Plain SGD's momentum is, after the first step, the gradient that the optimizer was given.
"""

import dataclasses
import functools
import json
import math

import jax
import numpy as np
import pytest

from meshtrain.assembly.assemble import assemble
from meshtrain.assembly.facts import stored_params
from meshtrain.config.resolve import resolve
from meshtrain.plan.search.estimate import state_bytes, weights_of
from meshtrain.sharding.trainable import is_adapter
from meshtrain.sharding.trees import leaves_with_paths
from meshtrain.step.device_memory import training_state_bytes
from tests.parity.comparison import SCALAR_BOUND, assert_gradients
from tests.parity.runs import by_path, first_moments, sizes

B, T, VOCABULARY = 8, 8, 61
CONFIG = {
    "batch_size": B,
    "sequence_length": T,
    "model": {
        "num_layers": 4,
        "embed_dim": 16,
        "mlp_dim": 24,
        "num_heads": 4,
        "num_kv_heads": 2,
        "vocab_size": VOCABULARY,
        "vocab_multiple": 8,
    },
    "lora": {"rank": 3, "alpha": 5.0},
    "pipeline": {"num_microbatches": 2},
    "optimizer": {"name": "sgd", "clip_norm": 0.0},
    "learning_rate": {"name": "constant", "peak": 0.1, "warmup_steps": 0},
    "data": {"source": "synthetic"},
}
IN_CHUNKS = {"schedule": "interleaved_1f1b", "num_microbatches": 2, "num_chunks": 2}
EXPERTS = {"moe": {"num_experts": 4, "expert_dim": 24, "shared_experts": 1, "router": "sigmoid"}}
OF_EXPERTS = {"model": CONFIG["model"] | EXPERTS}
MESHES = {
    "data, context and tensor": (
        {"zero": {"level": 1}, "accumulation_steps": 2},
        {"data": 2, "context": 2, "tensor": 2},
    ),
    "a pipeline in chunks": ({"zero": {"level": 2}, "pipeline": IN_CHUNKS}, {"data": 2, "pipeline": 2}),
    "empty places": ({"model": CONFIG["model"] | {"num_layers": 3}}, {"fsdp": 2, "pipeline": 2}),
    "experts": (OF_EXPERTS | {"accumulation_steps": 2}, {"fsdp": 2, "expert": 2, "tensor": 2}),
}
SLOW = ("empty places", "experts")


def batch():
    generator = np.random.default_rng(0)
    ids = generator.integers(0, VOCABULARY, (2, B, T)).astype(np.int32)
    positions = np.broadcast_to(np.arange(T, dtype=np.int32), (B, T))
    ones = np.ones((B, T), np.int32)
    weights = np.ones((B, T), np.float32)
    return {"tokens": ids[0], "targets": ids[1], "segment_ids": ones, "positions": positions, "weights": weights}


def stepped(changes, axes):
    """Returns the assembly; path -> weight before and after a step and path -> gradient, in layer order; the loss.

    Each B starts at random numbers: beside zeros, A has no gradient. Larger ones make activations amplify rounding.
    """
    shape = sizes(**axes)
    assembly = assemble(resolve(CONFIG | changes), shape, jax.devices()[: math.prod(shape.values())])
    state = assembly.steps.init(jax.random.key_data(jax.random.key(0)))
    generator = np.random.default_rng(1)

    def moved(path, leaf, like):
        if path[-1].key.endswith("_lora_b"):
            leaf = (0.1 * generator.normal(size=leaf.shape)).astype(np.float32)
        return jax.device_put(leaf, like.sharding)

    kept = jax.device_get(assembly.steps.to_kept(state).params)
    kept = jax.tree_util.tree_map_with_path(moved, kept, assembly.states.kept.params)
    state = dataclasses.replace(state, params=stored_params(assembly, kept))
    before = by_path(assembly.steps.to_kept(state).params)
    placed = {name: jax.device_put(batch()[name], like.sharding) for name, like in assembly.batch.items()}
    state, metrics = assembly.steps.train(state, placed)
    after = assembly.steps.to_kept(state)
    return assembly, before, by_path(after.params), first_moments(after.opt_state), float(metrics["loss"])


@functools.cache
def on_one_device(model):
    """As `stepped`, for the options of a model as JSON."""
    return stepped({"model": json.loads(model)}, {})


@pytest.mark.parametrize(
    ("changes", "axes"),
    [pytest.param(*given, id=name, marks=[pytest.mark.slow] * (name in SLOW)) for name, given in MESHES.items()],
)
def test_adapters_get_the_gradients_of_one_device_and_nothing_else_moves(changes, axes):
    _, start, _, expected, expected_loss = on_one_device(json.dumps((CONFIG | changes)["model"]))
    assembly, before, after, gradients, loss = stepped(changes, axes)
    np.testing.assert_allclose(loss, expected_loss, rtol=SCALAR_BOUND)
    assert set(gradients) == set(expected) == {path for path in before if is_adapter(path)}
    assert_gradients(gradients, expected)
    assert all(np.linalg.norm(gradient) > 0 for gradient in expected.values())
    for path, weight in after.items():
        np.testing.assert_array_equal(before[path], start[path], err_msg=path)
        assert np.array_equal(weight, before[path]) == (not is_adapter(path)), path
    rows = [leaf for path, leaf in leaves_with_paths(assembly.state.params) if is_adapter(path)]
    of_device = 4 * sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in rows)
    found = training_state_bytes(assembly.state, assembly.states.sums)
    # Level 2 scatters the sums of those whose dims data divides; momentum and sums are float32 like the weights.
    assert found.gradients <= of_device
    assert found.moments <= of_device + 8
    assert found.parameters > 3 * of_device


def test_frozen_matrices_may_be_stored_in_bfloat16_and_the_planner_counts_them():
    """From shapes alone. Norms stay float32: a rounded scale would change what the model computes."""
    config, shape = resolve(CONFIG | {"precision": {"frozen_dtype": "bfloat16"}}), sizes(fsdp=2, pipeline=2)
    assembly = assemble(config, shape, jax.devices()[:4])
    for path, leaf in leaves_with_paths(assembly.state.params):
        is_rounded = not is_adapter(path) and "norm" not in path
        assert leaf.dtype == ("bfloat16" if is_rounded else "float32"), path
    moments = {path for path, leaf in leaves_with_paths(assembly.state.opt_state) if leaf.ndim}
    assert moments
    assert all(is_adapter(path) for path in moments)
    assert (
        state_bytes(config, shape, weights_of(config))
        == training_state_bytes(assembly.state, assembly.states.sums).total
    )
