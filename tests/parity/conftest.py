"""Ten steps of one small model on any mesh, from the same weights on the same batches."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import pytest

from meshtrain.assemble import assemble
from meshtrain.config.config import Config
from meshtrain.layout.axes import AXES
from meshtrain.layout.rules import LayoutOptions
from meshtrain.models.decoder import DecoderOptions
from meshtrain.optim.learning_rate import LearningRateOptions
from meshtrain.optim.optimizers import OptimizerOptions
from meshtrain.pipeline.schedules import PipelineOptions

NUM_STEPS = 10
PEAK_LEARNING_RATE = 3e-3  # ten steps of Adam differ by 5e-7 to 9e-7 between meshes up to 6e-3, and by 2.9e-4 at 1e-2
BETA1 = 0.9
BATCH_SIZE, SEQUENCE_LENGTH = 16, 32

CONFIG = Config(
    num_steps=NUM_STEPS,
    batch_size=BATCH_SIZE,
    sequence_length=SEQUENCE_LENGTH,
    model=DecoderOptions(
        num_layers=8,
        embed_dim=32,
        mlp_dim=64,
        num_heads=8,
        num_kv_heads=8,
        vocab_size=100,
        vocab_multiple=128,
        dropout_rate=0.1,
    ),
    pipeline=PipelineOptions(schedule="1f1b", num_microbatches=4),
    optimizer=OptimizerOptions(name="adam", beta1=BETA1, clip_norm=0.0),
    learning_rate=LearningRateOptions(name="linear", peak=PEAK_LEARNING_RATE, warmup_steps=2),
)


@dataclasses.dataclass(frozen=True)
class Trained:
    """What ten steps leave: host arrays in layer order."""

    initial: Any
    gradients: Any
    losses: np.ndarray
    grad_norms: np.ndarray


def sizes(**axes: int) -> dict[str, int]:
    """The size of each axis of a mesh, 1 where nothing is said."""
    return {axis: axes.get(axis, 1) for axis in AXES}


def example_batches() -> list[dict[str, np.ndarray]]:
    """Ten batches with packed documents, padding, and weights of zero."""
    generator = np.random.default_rng(7)
    shape = (BATCH_SIZE, SEQUENCE_LENGTH)
    place = np.broadcast_to(np.arange(SEQUENCE_LENGTH), shape)
    start = generator.integers(8, 24, (BATCH_SIZE, 1))
    segment_ids = 1 + (place >= start)
    return [
        {
            "tokens": generator.integers(0, 100, shape).astype(np.int32),
            "targets": generator.integers(0, 32, shape).astype(np.int32),
            "segment_ids": segment_ids.astype(np.int32),
            "positions": np.where(place < start, place, place - start).astype(np.int32),
            "weights": (generator.random(shape) < 0.9).astype(np.float32),
        }
        for _ in range(NUM_STEPS)
    ]


def train(config: Config, shape: Mapping[str, int]) -> Trained:
    """Runs ten steps on a mesh."""
    num_devices = int(np.prod(list(shape.values())))
    assembly = assemble(config, shape, jax.devices()[:num_devices])
    state = assembly.init(jax.random.key_data(jax.random.key(config.seed)))
    initial = jax.device_get(assembly.to_kept(state).params)
    losses, norms, gradients = [], [], None
    for batch in example_batches():
        placed = {name: jax.device_put(batch[name], leaf.sharding) for name, leaf in assembly.batch.items()}
        state, metrics = assembly.train_step(state, placed)
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
        if gradients is None:
            # Adam's first moment after one step is (1 - beta1) times the gradient: no second program to compile.
            moments = jax.tree.leaves(
                jax.device_get(assembly.to_kept(state).opt_state), is_leaf=lambda x: hasattr(x, "mu")
            )
            (moment,) = (part.mu for part in moments if hasattr(part, "mu"))
            gradients = jax.tree.map(lambda leaf: leaf / (1 - BETA1), moment)
    return Trained(initial, gradients, np.array(losses), np.array(norms))


@pytest.fixture(scope="session")
def trained() -> Callable[..., Trained]:
    """A function (mesh axes, changed options) -> Trained that remembers what it has run."""

    @functools.cache
    def remembered(shape: tuple[tuple[str, int], ...], config: Config) -> Trained:
        return train(config, dict(shape))

    def run(config: Config = CONFIG, **axes: int) -> Trained:
        return remembered(tuple(sizes(**axes).items()), config)

    return run


@pytest.fixture(scope="session")
def one_device(trained: Callable[..., Trained]) -> Trained:
    """The reference."""
    return trained()


def assert_same(got: Trained, expected: Trained) -> None:
    """Initial weights bitwise, losses of ten steps to 1e-5, gradients to rtol 1e-5 / atol 4e-5."""
    jax.tree.map(np.testing.assert_array_equal, got.initial, expected.initial)
    np.testing.assert_allclose(got.losses, expected.losses, rtol=1e-5)
    np.testing.assert_allclose(got.grad_norms[0], expected.grad_norms[0], rtol=1e-5)
    compare = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=4e-5)
    jax.tree.map(compare, got.gradients, expected.gradients)


@pytest.fixture(scope="session", name="assert_same")
def _assert_same() -> Callable[[Trained, Trained], None]:
    """`assert_same`, for the tests of this folder."""
    return assert_same


@pytest.fixture(scope="session")
def base() -> Config:
    """The configuration that one device is asked about."""
    return CONFIG


@pytest.fixture(scope="session")
def sequence_parallel() -> Config:
    """The same numbers, with the residual stream split over tensor."""
    return dataclasses.replace(CONFIG, layout=LayoutOptions(sequence_parallel=True))
