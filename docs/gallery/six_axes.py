"""A custom model on all six axes: each layer combines a token with the mean of all tokens up to this token.

python -m meshtrain train --config=docs/gallery/six_axes.py   (64 devices, simulated if not available)
"""

import dataclasses

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from meshtrain import Named
from meshtrain.config import Config, default
from meshtrain.models import vocabulary
from meshtrain.models.task import Batch, LayerSums, Loss, Params, Stages, Task, loss_of_stages, token_batch
from meshtrain.options import option
from meshtrain.sharding.placement import Placement

NUM_TOKENS, NUM_ROWS = 257, 384  # 256 bytes and an end token; rows of the table, padded so that axes can split it


@dataclasses.dataclass(frozen=True)
class Options:
    """The options in `config.model`."""

    width: int = option(64, "width of a token's vector", minimum=1, dim="embed")
    num_layers: int = option(4, "layers", minimum=1, dim="layers")


def means(config: Config, placement: Placement) -> Task:
    """Returns the task. D: width; b, T: sequences and tokens in a microbatch; n: layers in a call of `repeated`."""
    d, n = config.model.width, config.model.num_layers
    shapes = {"token": (d, 2 * d), "before": (d, 2 * d), "down": (2 * d, d)}
    axes = {"token": ("embed", "mlp"), "before": ("embed", "mlp"), "down": ("mlp", "embed")}
    table, head = ("vocab", "embed"), ("embed", "vocab")

    def init(rng: jax.Array) -> Params:
        def drawn(number: int, shape: tuple[int, ...], names: tuple[str, ...]) -> Named:
            weight = jax.random.normal(jax.random.fold_in(rng, number), shape) / shape[-2] ** 0.5
            return Named(weight, names)

        layers = {k: drawn(i, (n, *shapes[k]), ("layers", *axes[k])) for i, k in enumerate(shapes)}
        return {"table": drawn(3, (NUM_ROWS, d), table), "head": drawn(4, (d, NUM_ROWS), head), "layers": layers}

    def first(outer: Params, batch: Batch, rng: jax.Array, train: bool, axis: vocabulary.Axis) -> jax.Array:
        rows = batch["tokens"] - vocabulary.first_column(outer["table"].shape[0], axis)
        return vocabulary.from_one_shard(
            vocabulary.look_up(placement.weight(outer["table"], table), rows, placement), axis
        )

    def repeated(
        layers: Params, x: jax.Array, batch: Batch, rng: jax.Array, start: jax.Array, train: bool
    ) -> tuple[jax.Array, LayerSums]:
        def one(x: jax.Array, layer: Params) -> tuple[jax.Array, None]:
            w = {name: placement.weight(weight, axes[name]) for name, weight in layer.items()}
            before = jnp.cumsum(x, axis=1) / (1 + jnp.arange(x.shape[1]))[:, None]
            return x + jnp.tanh(x @ w["token"] + before @ w["before"]) @ w["down"], None

        return jax.lax.scan(one, x, layers)[0], None

    def last(outer: Params, x: jax.Array, batch: Batch, axis: vocabulary.Axis) -> Loss:
        logits = vocabulary.copy_to_shards(x, axis) @ placement.weight(outer["head"], head)
        total = vocabulary.cross_entropy(logits, batch["targets"], batch["weights"], NUM_TOKENS, axis)
        return total, batch["weights"].sum(), {}

    stages = Stages(n, first, repeated, last)
    batch = token_batch(config.batch_size, config.sequence_length)
    return Task(
        init, loss_of_stages(stages), batch, stages=stages, takes_manual_axes=True, width=d, vocab_size=NUM_TOKENS
    )


means.options = Options


def get_config() -> ConfigDict:
    """Returns the configuration: this task on 2 devices along each mesh axis."""
    config = default(task="docs.gallery.six_axes:means")
    for axis in config.mesh:
        config.mesh[axis] = 2
    config.num_steps = 100
    config.learning_rate.peak = 1e-2
    config.learning_rate.warmup_steps = 10
    return config
