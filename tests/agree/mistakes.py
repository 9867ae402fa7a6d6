"""docs/guide/own_model.py with dropout, and one mistake each: the seven mistakes of users that change a number.

The comment `# here` marks the mistake. `right` has none.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from meshtrain import Named
from meshtrain.models.task import Task, sequence_keys, token_batch
from meshtrain.models.vocabulary import cross_entropy, without_padding
from meshtrain.options import option

KEEP = 0.9


@dataclasses.dataclass(frozen=True)
class Options:
    """The options in `config.model`."""

    width: int = option(16, "width of a byte's vector", minimum=1)
    hidden: int = option(32, "inner width", minimum=1)


def _dropped(mistake, x, rng, batch, placement):
    """Dropout of [B, T, F]."""
    if mistake == "dropout_one_key":
        keep = jax.random.bernoulli(rng, KEEP, x.shape)  # here
        return jnp.where(keep, x / KEEP, 0.0)
    if mistake == "dropout_by_axis" and placement.mesh is not None and placement.mesh.size > 1:

        def on_shard(x):
            key = jax.random.fold_in(rng, jax.lax.axis_index(("fsdp", "tensor")))  # here
            return jnp.where(jax.random.bernoulli(key, KEEP, x.shape), x / KEEP, 0.0)

        spec = placement.activation_spec(x.shape, ("batch", "sequence", "mlp"))
        return placement.on_shards(on_shard, (spec,), spec)(x)
    if mistake == "dropout_by_place":
        keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(rng, jnp.arange(x.shape[0]))  # here
    else:
        keys = sequence_keys(rng, batch)
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, KEEP, x.shape[1:]))(keys)
    return jnp.where(keep, x / KEEP, 0.0)


def _product(mistake, x, w, placement):
    """x @ w, by hand for two of the mistakes."""
    if not mistake.startswith("psum") or placement.mesh is None or placement.mesh.size == 1:
        return x @ w
    if mistake == "psum_twice":  # the weight is whole on each device, and so is each product
        ins = (placement.activation_spec(x.shape, ("batch", "sequence", None)), P())
        body = lambda x, w: jax.lax.psum(x @ w, "tensor")  # here  # noqa: E731
    else:
        ins = (placement.activation_spec(x.shape, ("batch", "sequence", "mlp")), P("tensor"))
        body = lambda x, w: x @ w  # here  # noqa: E731
    out = placement.activation_spec((*x.shape[:2], w.shape[1]), ("batch", "sequence", None))
    return placement.on_shards(body, ins, out, axes=frozenset({"tensor"}))(x, w)


def make(mistake):
    """The task function with a mistake."""

    def task(config, placement):
        d, f = config.model.width, config.model.hidden
        weights = {
            "table": ((384, d), ("vocab", "embed")),
            "up": ((8 * d, f), ("embed", "mlp")),
            "down": ((f, d), ("mlp", "embed")),
        }

        def init(rng):
            if mistake == "init_by_process":
                rng = jax.random.fold_in(rng, jax.process_index())  # here
            if mistake == "own_randomness":
                rng = jax.random.key(np.random.default_rng().integers(1 << 31))  # here
            keys = zip(weights.items(), jax.random.split(rng, len(weights)), strict=True)
            return {k: Named(0.1 * jax.random.normal(key, shape), axes) for (k, (shape, axes)), key in keys}

        def logits(params, batch, rng=None):
            table, up, down = (placement.weight(params[name], axes) for name, (_, axes) in weights.items())
            x = table[batch["tokens"]]
            before = jnp.concatenate([jnp.pad(x, ((0, 0), (i, 0), (0, 0)))[:, : x.shape[1]] for i in range(8)], axis=-1)
            hidden = jnp.tanh(before @ up)
            if rng is not None:
                hidden = _dropped(mistake, hidden, rng, batch, placement)
            return without_padding(_product(mistake, hidden, down, placement) @ table.T, 257)

        def loss(params, batch, rng, train):
            total = cross_entropy(
                logits(params, batch, rng if train else None), batch["targets"], batch["weights"], 257
            )
            weight = batch["weights"].sum()
            if mistake == "mean_of_means":
                return total / weight, jnp.float32(1), {}  # here
            return total, weight, {}

        return Task(init, loss, token_batch(config.batch_size, config.sequence_length), logits, width=d, vocab_size=257)

    task.options = Options
    task.__qualname__ = mistake
    return task


right, psum_twice, psum_missing = make("right"), make("psum_twice"), make("psum_missing")
dropout_one_key, dropout_by_axis = make("dropout_one_key"), make("dropout_by_axis")
dropout_by_place, mean_of_means = make("dropout_by_place"), make("mean_of_means")
init_by_process, own_randomness = make("init_by_process"), make("own_randomness")
