"""A model of one's own: the next byte from the eight before it (Bengio et al. 2003), on data 2 x fsdp 2 x tensor 2."""

import jax
import jax.numpy as jnp
from flax.linen import LogicallyPartitioned

from meshtrain.config import Config, resolve
from meshtrain.layout.placement import Placement
from meshtrain.models.losses import cross_entropy, without_padding
from meshtrain.models.task import Batch, Loss, Params, Task, token_batch
from meshtrain.training import train

WEIGHTS = {  # name: shape, logical axes; 257 tokens, padded so that they can be split
    "table": ((384, 64), ("vocab", "embed")),
    "up": ((8 * 64, 256), ("embed", "mlp")),
    "down": ((256, 64), ("mlp", "embed")),
}


def eight_bytes(config: Config, placement: Placement) -> Task:
    """Returns the task: how weights begin, what is learned, what a batch looks like, what is probable next."""

    def init(rng: jax.Array) -> Params:
        keys = zip(WEIGHTS.items(), jax.random.split(rng, len(WEIGHTS)), strict=True)
        return {k: LogicallyPartitioned(0.1 * jax.random.normal(key, shape), axes) for (k, (shape, axes)), key in keys}

    def logits(params: Params, batch: Batch) -> jax.Array:
        table, up, down = (placement.weight(params[name], axes) for name, (_, axes) in WEIGHTS.items())
        x = table[batch["tokens"]]
        before = jnp.concatenate([jnp.pad(x, ((0, 0), (i, 0), (0, 0)))[:, : x.shape[1]] for i in range(8)], axis=-1)
        return without_padding(jnp.tanh(before @ up) @ down @ table.T, 257)

    def loss(params: Params, batch: Batch, rng: jax.Array, train: bool) -> Loss:
        return cross_entropy(logits(params, batch), batch["targets"], batch["weights"], 257), batch["weights"].sum(), {}

    return Task(init, loss, token_batch(config.batch_size, config.sequence_length), logits)


if __name__ == "__main__":
    train(resolve({"mesh": {"data": 2, "fsdp": 2, "tensor": 2}}, own_task=True), "runs/own_model", eight_bytes)
