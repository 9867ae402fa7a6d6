"""Frozen weights in a pipeline: no gradient of theirs is computed or added up, and they stay what they are.

The reference is the same decoder on one device with all of its weights trained. Plain SGD's momentum is, after the
first step, the gradient that the optimizer was given.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from meshtrain.assembly.assemble import assemble
from meshtrain.config.schema import Config
from meshtrain.models.transformer.decoder import DecoderOptions
from meshtrain.optim.learning_rate import LearningRateOptions
from meshtrain.optim.optimizers import OptimizerOptions
from meshtrain.pipeline.schedules import PipelineOptions
from meshtrain.sharding.param_sharding import ZeroOptions
from meshtrain.sharding.rules import AXES
from meshtrain.sharding.trees import leaves_with_paths, select

B, T, VOCABULARY, NUM_STAGES = 8, 8, 260, 2
SGD = OptimizerOptions(name="sgd", weight_decay=0.1, clip_norm=0.0)
CONFIG = Config(
    batch_size=B,
    sequence_length=T,
    # No two kinds of matrices have a size in common, nor has any the size of an activation.
    model=DecoderOptions(
        num_layers=4, embed_dim=12, mlp_dim=20, num_heads=4, num_kv_heads=2, head_dim=4, vocab_size=VOCABULARY
    ),
    pipeline=PipelineOptions(schedule="1f1b", num_microbatches=2),
    optimizer=SGD,
    learning_rate=LearningRateOptions(name="constant", peak=0.1, warmup_steps=0),
)
CHUNKS = dataclasses.replace(CONFIG, pipeline=PipelineOptions("interleaved_1f1b", num_microbatches=2, num_chunks=2))


def freezing(config, trainable, level=0):
    optimizer = dataclasses.replace(SGD, trainable=trainable)
    return dataclasses.replace(config, optimizer=optimizer, zero=ZeroOptions(level))


@functools.cache
def assembled(config, **axes):
    shape = dict.fromkeys(AXES, 1) | axes
    return assemble(config, shape, jax.devices()[: int(np.prod(list(shape.values())))])


def batch():
    generator = np.random.default_rng(0)
    ids = generator.integers(0, VOCABULARY, (2, B, T)).astype(np.int32)
    positions = np.broadcast_to(np.arange(T, dtype=np.int32), (B, T))
    ones = np.ones((B, T), np.int32)
    weights = np.ones((B, T), np.float32)
    return {"tokens": ids[0], "targets": ids[1], "segment_ids": ones, "positions": positions, "weights": weights}


def stepped(config, **axes):
    """Returns path -> weight before and after two steps, path -> gradient, in layer order, and the first metrics."""
    assembly = assembled(config, **axes)
    placed = {name: jax.device_put(batch()[name], like.sharding) for name, like in assembly.batch.items()}
    state = assembly.steps.init(jax.random.key_data(jax.random.key(0)))
    before = flat(assembly.steps.to_kept(state).params)
    state, metrics = assembly.steps.train(state, placed)
    gradients = flat(assembly.steps.to_kept(state).opt_state[0].trace)
    state, _ = assembly.steps.train(state, placed)
    return (
        before,
        flat(assembly.steps.to_kept(state).params),
        gradients,
        {name: float(x) for name, x in metrics.items()},
    )


def flat(tree):
    return {path: np.asarray(leaf) for path, leaf in leaves_with_paths(jax.device_get(tree))}


def test_frozen_weights_stay_and_trained_ones_get_the_gradients_of_a_full_run():
    start, _, full, _ = stepped(CONFIG)
    in_chunks = freezing(CHUNKS, "attention/|embedding|head/norm", level=2)
    before, after, gradients, metrics = stepped(in_chunks, data=2, pipeline=NUM_STAGES)
    assert 0 < len(gradients) < len(full)
    for path, weight in after.items():
        np.testing.assert_array_equal(before[path], start[path], err_msg=path)
        assert np.array_equal(weight, before[path]) == (path not in gradients), path
    for path, gradient in gradients.items():
        assert np.linalg.norm(gradient - full[path]) <= 5e-6 * np.linalg.norm(full[path]), path
    norm = np.sqrt(sum(np.sum(np.square(full[path], dtype=np.float64)) for path in gradients))
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-6)


@pytest.mark.parametrize("trainable", ["", "mlp|embedding", "attention/|head/kernel"])
def test_rows_carry_sums_of_gradients_of_trained_weights_alone(trainable, carried_shapes):
    assembly = assembled(freezing(CONFIG, trainable), pipeline=NUM_STAGES)
    shapes = carried_shapes(assembly)

    def of_stage(path, leaf):
        shape = leaf.sharding.shard_shape(leaf.shape)
        return (shape[0], 1, *shape[1:]) if path.startswith("layers/") else shape  # one layer a unit

    trained, frozen = (
        {of_stage(path, leaf) for path, leaf in leaves_with_paths(part) if leaf.ndim > 1 and leaf.size > 100}
        for part in select(assembly.state.params, assembly.placed.replicas.trained)
    )
    assert trained
    assert trained <= shapes
    assert not (frozen - trained) & shapes
