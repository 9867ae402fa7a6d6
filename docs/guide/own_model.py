"""A custom model: predicts a byte from the preceding eight (Bengio et al. 2003), on data 2 x fsdp 2 x tensor 2.

python -m meshtrain train --config=docs/guide/own_model.py   (or explain, plan --cluster=cpu:8, generate, config)
"""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

import meshtrain
from meshtrain import Named
from meshtrain.config import Config, default
from meshtrain.models.cost import Cost
from meshtrain.models.task import Batch, Loss, Params, Task, token_batch
from meshtrain.models.vocabulary import cross_entropy, without_padding
from meshtrain.options import option
from meshtrain.sharding.placement import Placement


@dataclasses.dataclass(frozen=True)
class Options:
    """The options in `config.model`, set for example by `--config.model.width=128`."""

    width: int = option(64, "width of a byte's vector", minimum=1)
    hidden: int = option(256, "inner width", minimum=1)


def eight_bytes(config: Config, placement: Placement) -> Task:
    """Returns the task: initial weights, the loss, the batch, and the logits of the next byte."""
    d, f = config.model.width, config.model.hidden
    weights = {  # name: shape, logical axes; 257 tokens, padded so that they can be split
        "table": ((384, d), ("vocab", "embed")),
        "up": ((8 * d, f), ("embed", "mlp")),
        "down": ((f, d), ("mlp", "embed")),
    }

    def init(rng: jax.Array) -> Params:
        keys = zip(weights.items(), jax.random.split(rng, len(weights)), strict=True)
        return {k: Named(0.1 * jax.random.normal(key, shape), axes) for (k, (shape, axes)), key in keys}

    def logits(params: Params, batch: Batch) -> jax.Array:
        table, up, down = (placement.weight(params[name], axes) for name, (_, axes) in weights.items())
        x = table[batch["tokens"]]
        before = jnp.concatenate([jnp.pad(x, ((0, 0), (i, 0), (0, 0)))[:, : x.shape[1]] for i in range(8)], axis=-1)
        return without_padding(jnp.tanh(before @ up) @ down @ table.T, 257)

    def loss(params: Params, batch: Batch, rng: jax.Array, train: bool) -> Loss:
        return cross_entropy(logits(params, batch), batch["targets"], batch["weights"], 257), batch["weights"].sum(), {}

    def cost(mesh: Mapping[str, int], units: float) -> Cost:
        n = mesh["tensor"]
        # For each token, d numbers of the look-up and of `down` are summed over tensor, and 8 d + d of their gradients.
        summed = 2 * (n - 1) / n * 11 * d
        return Cost(other_bytes={"tensor": 4 * units * summed}, kept_bytes=4 * units * (9 * d + (f + 2 * 384) / n))

    batch = token_batch(config.batch_size, config.sequence_length)
    return Task(init, loss, batch, logits, cost=cost, width=d, vocab_size=257)


eight_bytes.options = Options


def get_config() -> ConfigDict:
    """The configuration: this task with its options, on a mesh of three axes."""
    config = default(task="docs.guide.own_model:eight_bytes")
    config.mesh.data = config.mesh.fsdp = config.mesh.tensor = 2
    return config


if __name__ == "__main__":
    meshtrain.train(get_config(), "runs/own_model")
