"""A few steps of one small model on any mesh, with something wrong in them."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from meshtrain.assembly.assemble import Assembly, assemble
from meshtrain.config.schema import Config
from meshtrain.models.transformer.decoder import DecoderOptions
from meshtrain.optim.learning_rate import LearningRateOptions
from meshtrain.pipeline.schedules import PipelineOptions
from meshtrain.sharding.rules import AXES
from tests.quick import exact

CONFIG = Config(
    num_steps=20,
    batch_size=16,
    sequence_length=16,
    model=DecoderOptions(
        num_layers=2, embed_dim=32, mlp_dim=64, num_heads=4, num_kv_heads=4, vocab_size=100, dropout_rate=0.1
    ),
    pipeline=PipelineOptions(schedule="1f1b", num_microbatches=2),
    learning_rate=LearningRateOptions(name="linear", peak=3e-3, warmup_steps=2),
)


@dataclasses.dataclass(frozen=True)
class Taken:
    """What a step leaves, on the host: its metrics, and the whole state after it."""

    metrics: dict[str, float]
    state: Any


def batch_of(step: int, broken: bool, large: bool) -> dict[str, np.ndarray]:
    """The batch of a step.

    A broken one gives one target a weight that no float32 sum can hold; a large one is a million times itself, which
    only the gradients of a float16 cannot hold.
    """
    generator, shape = np.random.default_rng(step), (CONFIG.batch_size, CONFIG.sequence_length)
    weights = np.full(shape, 1e6 if large else 1, np.float32)
    if broken:
        weights[3, 5] = np.inf
    ids = generator.integers(0, 100, (2, *shape)).astype(np.int32)
    return {
        "tokens": ids[0],
        "targets": ids[1] // 3,
        "segment_ids": np.ones(shape, np.int32),
        "positions": np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape),
        "weights": weights,
    }


def same(a: Any, b: Any) -> None:
    """Asserts that two trees of arrays are equal bit for bit."""
    jax.tree.map(np.testing.assert_array_equal, a, b)


@functools.cache
def assembled(config: Config, axes: tuple[tuple[str, int], ...], exact_bits: bool) -> Assembly:
    """The functions of a run; of an exact one its own, because JAX keeps what it has compiled for a function."""
    shape = dict.fromkeys(AXES, 1) | dict(axes)
    return assemble(config, shape, jax.devices()[: int(np.prod(list(shape.values())))])


@functools.cache
def taken(
    config: Config,
    axes: tuple[tuple[str, int], ...],
    num_steps: int,
    broken: tuple[int, ...],
    large: tuple[int, ...],
    exact_bits: bool,
) -> list[Taken]:
    assembly = assembled(config, axes, exact_bits)
    with exact() if exact_bits else contextlib.nullcontext():
        state = assembly.steps.init(jax.random.key_data(jax.random.key(config.seed)))
        train_step = assembly.steps.train.lower(assembly.state, assembly.batch).compile()
    steps = [Taken({}, jax.device_get(state))]
    for step in range(1, num_steps + 1):
        batch = batch_of(step, step in broken, step in large)
        placed = {name: jax.device_put(batch[name], leaf.sharding) for name, leaf in assembly.batch.items()}
        state, metrics = train_step(state, placed)
        steps.append(Taken({k: float(v) for k, v in metrics.items()}, jax.device_get(state)))
    return steps


@pytest.fixture(scope="session")
def steps() -> Callable[..., list[Taken]]:
    """A function (configuration, steps, broken ones, large ones, exact bits, mesh axes) -> what each step leaves."""

    def run(
        config: Config = CONFIG,
        num_steps: int = 4,
        broken: tuple[int, ...] = (),
        large: tuple[int, ...] = (),
        exact_bits: bool = False,
        **axes: int,
    ) -> list[Taken]:
        return taken(config, tuple(axes.items()), num_steps, broken, large, exact_bits)

    return run


@pytest.fixture(scope="session")
def base() -> Config:
    """The configuration that is run where nothing else is said."""
    return CONFIG
