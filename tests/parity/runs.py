"""Four steps of one small model: through `assemble` on any mesh, and by plain JAX on one device as the reference."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from meshtrain.assembly.assemble import assemble
from meshtrain.config.schema import Config
from meshtrain.models.decoder_options import NormOptions, RopeOptions
from meshtrain.models.metrics import EXPERT_PARTS, all_logged
from meshtrain.models.task import SEQUENCE_INDEX
from meshtrain.models.transformer.decoder import DecoderOptions
from meshtrain.models.transformer.task import decoder
from meshtrain.optim.learning_rate import LearningRateOptions, learning_rate
from meshtrain.optim.optimizers import OptimizerOptions, optimizer
from meshtrain.pipeline.schedules import PipelineOptions
from meshtrain.sharding.named import is_boxed, unbox
from meshtrain.sharding.rules import AXES
from meshtrain.sharding.trees import leaves_with_paths
from tests.parity.comparison import Leaves, Trained
from tests.quick import exact

NUM_STEPS = 4
CROSS_ENTROPY = "cross_entropy"  # the metric that has the loss without those of routers
LOAD = "expert_load"  # begins the names of the metrics that have the counts of tokens for each expert
BATCH_SIZE, SEQUENCE_LENGTH = 16, 32
# Of an optimizer's state: what holds the first gradients after one step, times a constant (Adafactor: their squares).
FIRST_MOMENTS = ("mu", "trace", "row", "column", "full")

LLAMA = DecoderOptions(
    num_layers=8,
    embed_dim=32,
    mlp_dim=64,
    num_heads=8,
    num_kv_heads=8,
    vocab_size=100,
    vocab_multiple=128,
    dropout_rate=0.1,
)
# With chunks of the loss that divide no device's tokens; the reference has no chunks.
GPT = dataclasses.replace(
    LLAMA,
    loss_chunk=23,
    tied_embeddings=True,
    positions="learned",
    norm=NormOptions(name="layernorm"),
    biases=True,
    activation="gelu",
)
QWEN = dataclasses.replace(
    LLAMA, loss_chunk=23, qkv_biases=True, norm=NormOptions(qk=True), window=10, attention="blockwise"
)
GEMMA = dataclasses.replace(
    LLAMA,
    num_layers=4,
    num_kv_heads=4,
    norm=NormOptions(centered_scales=True, post=True, qk=True),
    activation="geglu",
    tied_embeddings=True,
    scaled_embeddings=True,
    window=10,
    global_every=3,
    rope=RopeOptions(local_base=50.0),
    attention_scalar=9,
    attention_cap=5.0,
    logit_cap=3.0,
)

CONFIG = Config(
    num_steps=NUM_STEPS,
    batch_size=BATCH_SIZE,
    sequence_length=SEQUENCE_LENGTH,
    model=LLAMA,
    pipeline=PipelineOptions(schedule="1f1b", num_microbatches=4),
    optimizer=OptimizerOptions(name="adam", clip_norm=0.0),
    learning_rate=LearningRateOptions(name="linear", peak=3e-3, warmup_steps=2),
)
# At which weights move enough to be compared, and no further than rounding lets two runs stay together.
PEAK_LEARNING_RATES = {"adam": 3e-3, "adamw": 3e-3, "lion": 1e-3, "muon": 3e-3, "adafactor": 1e-2, "sgd": 1.0}


def with_optimizer(config: Config, name: str, clip_norm: float = 0.0) -> Config:
    """The configuration with another optimizer, at a rate that suits it."""
    rate = dataclasses.replace(config.learning_rate, peak=PEAK_LEARNING_RATES[name])
    options = dataclasses.replace(config.optimizer, name=name, clip_norm=clip_norm)
    return dataclasses.replace(config, optimizer=options, learning_rate=rate)


def has_zero_gradients(config: Config) -> bool:
    """Whether a key's bias has a gradient of zero: rotary positions would turn it by the position."""
    return config.model.biases and config.model.positions == "learned"


def sizes(**axes: int) -> dict[str, int]:
    """The size of each axis of a mesh, 1 where nothing is said."""
    return {axis: axes.get(axis, 1) for axis in AXES}


@functools.cache
def example_batches(num_steps: int = NUM_STEPS) -> list[dict[str, np.ndarray]]:
    """Batches with two packed documents a sequence and weights of zero."""
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
        for _ in range(num_steps)
    ]


def by_path(tree: Any) -> Leaves:
    """{path: host array} of a tree."""
    return {path: np.asarray(leaf) for path, leaf in leaves_with_paths(jax.device_get(tree))}


def first_moments(opt_state: Any) -> Leaves:
    """{path below the moments: host array} of what an optimizer's state holds of the first gradients."""
    found = {}
    for path, leaf in leaves_with_paths(jax.device_get(opt_state)):
        parts = path.split("/")
        if places := [number for number, part in enumerate(parts) if part in FIRST_MOMENTS]:
            found["/".join(parts[places[-1] + 1 :])] = np.asarray(leaf)
    return found


def train(config: Config, shape: Mapping[str, int]) -> Trained:
    """Runs the steps of `assemble` on a mesh."""
    num_devices = int(np.prod(list(shape.values())))
    assembly = assemble(config, shape, jax.devices()[:num_devices])
    with exact():
        state = assembly.steps.init(jax.random.key_data(jax.random.key(config.seed)))
    initial = by_path(assembly.steps.to_kept(state).params)
    step = assembly.steps.train.lower(assembly.state, assembly.batch).compile()
    losses, norms, loads, gradients, parts, cross_entropies = [], [], [], {}, [1.0], []
    for batch in example_batches(config.num_steps):
        placed = {name: jax.device_put(batch[name], leaf.sharding) for name, leaf in assembly.batch.items()}
        state, metrics = step(state, placed)
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
        loads += [np.asarray(metrics[name]).tolist() for name in metrics if name.startswith(LOAD)]
        parts += [float(metrics[name]) for name in metrics if name == EXPERT_PARTS]
        cross_entropies += [float(metrics[name]) for name in metrics if name == CROSS_ENTROPY]
        gradients = gradients or first_moments(assembly.steps.to_kept(state).opt_state)
    final = by_path(assembly.steps.to_kept(state).params)
    scalars = np.array(losses), np.array(norms), tuple(loads), np.array(cross_entropies)
    return Trained(initial, final, gradients, *scalars, max(parts))


@functools.cache
def reference_functions(model: DecoderOptions) -> tuple[Any, Any, Any]:
    """(initial weights with their logical axes, gradients of the mean loss, what moves after an update) of a model.

    The first two are jitted once for all optimizers.
    """
    whole = dataclasses.replace(model, loss_chunk=BATCH_SIZE * SEQUENCE_LENGTH)
    rate = OptimizerOptions().balance_rate
    task = decoder(whole, batch_size=BATCH_SIZE, sequence_length=SEQUENCE_LENGTH, balance_rate=rate)

    def mean_loss(params: Any, batch: Any, rng: jax.Array) -> Any:
        loss, weight, metrics = task.loss(params, batch, rng, True)
        return loss / weight, (metrics, all_logged(metrics, weight))

    return jax.jit(task.init), jax.jit(jax.value_and_grad(mean_loss, has_aux=True)), task.after_update


def reference(config: Config) -> Trained:
    """The same steps in plain JAX on one device: the whole batch at once, nothing of `step/`, no mesh."""
    init, loss_and_gradients, after_update = reference_functions(config.model)
    root = jax.random.key(config.seed)
    with exact():  # initial weights are compared bit by bit
        boxed = init(jax.random.fold_in(root, 0))
    params = unbox(boxed)
    rates = learning_rate(
        config.learning_rate,
        num_steps=config.num_steps,
        embed_dim=config.model.embed_dim,
        batch_size=config.batch_size,
    )
    axes = jax.tree.map(lambda box: box.names, boxed, is_leaf=is_boxed)
    transformation = optimizer(config.optimizer, rates, axes)

    @jax.jit
    def update(gradients: Any, opt_state: Any, params: Any, metrics: Any) -> Any:
        norm, limit = optax.tree.norm(gradients), config.optimizer.clip_norm
        clipped = jax.tree.map(lambda leaf: leaf * jnp.minimum(1, limit / norm) if limit else leaf, gradients)
        updates, opt_state = transformation.update(clipped, opt_state, params)
        moved = optax.apply_updates(params, updates)
        return after_update(moved, metrics) if after_update else moved, opt_state, norm

    initial, opt_state = by_path(params), transformation.init(params)
    losses, norms, loads, gradients, cross_entropies = [], [], [], {}, []
    for number, batch in enumerate(example_batches(config.num_steps)):
        rng = jax.random.fold_in(jax.random.fold_in(root, 1), number)
        batch = {**batch, SEQUENCE_INDEX: np.arange(BATCH_SIZE)}
        (loss, (sums, metrics)), found = loss_and_gradients(params, batch, rng)
        params, opt_state, norm = update(found, opt_state, params, sums)
        losses.append(float(loss))
        norms.append(float(norm))
        loads += [np.asarray(metrics[name]).tolist() for name in metrics if name.startswith(LOAD)]
        cross_entropies += [float(metrics[name]) for name in metrics if name == CROSS_ENTROPY]
        gradients = gradients or first_moments(opt_state)
    scalars = np.array(losses), np.array(norms), tuple(loads), np.array(cross_entropies)
    return Trained(initial, by_path(params), gradients, *scalars)
