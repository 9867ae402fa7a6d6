"""The built-in decoder in plain JAX, as short as possible: the reference of benchmarks and tests.

It uses only functions and dicts; no mesh, no Flax, no configuration. Sizes follow from the weights, which have the same
names and shapes as in the built-in decoder, so that both can start from the same arrays.

b: sequences, T: tokens a sequence, D: embed dim, N: query heads, K: key and value heads, G = N / K, H: head dim,
F: mlp dim, V: padded vocabulary.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

Params = Any
Batch = dict[str, jax.Array]
Loss = Callable[[Params, Batch], jax.Array]

EPSILON = 1e-5
ROPE_BASE = 10000.0


def llama_loss(params: Params, batch: Batch, vocab_size: int, dtype: DTypeLike, window: int = 0) -> jax.Array:
    """Returns the mean cross-entropy over the targets: RMSNorm, SwiGLU, rotary positions, an untied head.

    With `window`, a token attends to that many tokens, including itself (Mistral). Biases (Qwen 2) and norms of heads
    (Qwen 3) are used if the weights contain them.
    """
    x = params["embedding"]["table"].astype(dtype)[batch["tokens"]]
    head_dim = params["layers"]["attention"]["query"].shape[-1]
    frequencies = ROPE_BASE ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angles = batch["positions"][:, :, None, None] * frequencies
    cosine, sine = jnp.cos(angles), jnp.sin(angles)
    mask = visible(batch["segment_ids"], window)

    def layer(x: jax.Array, w: Params) -> tuple[jax.Array, None]:
        w = cast(w, dtype)
        y, a = rms_norm(x, w["attention_norm"]), w["attention"]
        q, k, v = (jnp.einsum("btd,dnh->btnh", y, a[name]) for name in ("query", "key", "value"))
        if "query_bias" in a:
            q, k, v = q + a["query_bias"], k + a["key_bias"], v + a["value_bias"]
        if "query_norm" in a:
            q, k = rms_norm(q, a["query_norm"]), rms_norm(k, a["key_norm"])
        y = attention(rotate(q, cosine, sine), rotate(k, cosine, sine), v, mask)
        x = x + jnp.einsum("btnh,nhd->btd", y, w["attention"]["output"])
        y = rms_norm(x, w["mlp_norm"])
        return x + (jax.nn.silu(y @ w["mlp"]["gate"]) * (y @ w["mlp"]["up"])) @ w["mlp"]["down"], None

    x, _ = jax.lax.scan(layer, x, params["layers"])
    x = rms_norm(x, params["head"]["norm"])
    return cross_entropy(x @ params["head"]["kernel"].astype(dtype), batch, vocab_size)


def gpt2_loss(params: Params, batch: Batch, vocab_size: int, dtype: DTypeLike) -> jax.Array:
    """Returns the mean cross-entropy over the targets: LayerNorm, GELU, biases, learned positions, a tied head."""
    table = params["embedding"]["table"].astype(dtype)
    x = table[batch["tokens"]] + params["embedding"]["positions"].astype(dtype)[batch["positions"]]
    mask = visible(batch["segment_ids"])

    def layer(x: jax.Array, w: Params) -> tuple[jax.Array, None]:
        w = cast(w, dtype)
        y, a, m = layer_norm(x, w["attention_norm"]), w["attention"], w["mlp"]
        q, k, v = (jnp.einsum("btd,dnh->btnh", y, a[name]) + a[f"{name}_bias"] for name in ("query", "key", "value"))
        x = x + jnp.einsum("btnh,nhd->btd", attention(q, k, v, mask), a["output"]) + a["output_bias"]
        y = layer_norm(x, w["mlp_norm"])
        return x + (jax.nn.gelu(y @ m["up"] + m["up_bias"]) @ m["down"] + m["down_bias"]), None

    x, _ = jax.lax.scan(layer, x, params["layers"])
    return cross_entropy(layer_norm(x, params["head"]["norm"]) @ table.T, batch, vocab_size)


def cast(weights: Params, dtype: DTypeLike) -> Params:
    """Returns one layer's weights in the compute dtype; norms stay float32."""
    is_norm = lambda path: any(part.key.endswith("norm") for part in path)  # noqa: E731
    return jax.tree.map_with_path(lambda path, leaf: leaf if is_norm(path) else leaf.astype(dtype), weights)


def rms_norm(x: jax.Array, w: Params) -> jax.Array:
    """Returns x / rms(x) * scale, computed in float32. [b, T, D] -> [b, T, D]."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + EPSILON)
    return (wide * w["scale"]).astype(x.dtype)


def layer_norm(x: jax.Array, w: Params) -> jax.Array:
    """Returns (x - mean) / std * scale + bias, computed in float32. [b, T, D] -> [b, T, D]."""
    wide = x.astype(jnp.float32)
    wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + EPSILON)
    return (wide * w["scale"] + w["bias"]).astype(x.dtype)


def rotate(x: jax.Array, cosine: jax.Array, sine: jax.Array) -> jax.Array:
    """Applies rotary positions to the two halves of each head, in float32. [b, T, N, H] -> [b, T, N, H]."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1).astype(x.dtype)


def visible(segment_ids: jax.Array, window: int = 0) -> jax.Array:
    """Returns bool [b, 1, 1, T, T]: whether a query (row) attends to a key (column): not later, same document.

    With `window`, it attends to at most that many keys, including its own.
    """
    same = jnp.tril(segment_ids[:, :, None] == segment_ids[:, None, :])
    return (jnp.triu(same, 1 - window) if window else same)[:, None, None]


def attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns attention with softmax in float32: q [b, T, N, H], k and v [b, T, K, H] -> [b, T, N, H]."""
    b, t, n, h = q.shape
    grouped = q.reshape(b, t, k.shape[2], -1, h)
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, k, preferred_element_type=jnp.float32) / math.sqrt(h)
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e30), axis=-1).astype(q.dtype)
    return jnp.einsum("bkgts,bskh->btkgh", weights, v).reshape(b, t, n, h)


def cross_entropy(logits: jax.Array, batch: Batch, vocab_size: int) -> jax.Array:
    """Returns the mean loss of the targets, float32. Logits [b, T, V] have padding columns from `vocab_size` on."""
    logits = logits[..., :vocab_size].astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    return jnp.sum(losses * batch["weights"]) / jnp.sum(batch["weights"])


def adamw(learning_rate: optax.Schedule) -> optax.GradientTransformation:
    """Returns clipping followed by AdamW, with decay on all weights except norms and biases."""

    def decays(params: Params) -> Params:
        last = lambda path, leaf: "bias" not in path[-1].key and path[-1].key != "scale"  # noqa: E731
        return jax.tree_util.tree_map_with_path(last, params)

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(learning_rate, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1, mask=decays),
    )


def train_step(loss: Loss, transformation: optax.GradientTransformation) -> Callable[..., Any]:
    """Returns the step ((params, opt_state), batch) -> ((params, opt_state), loss), to be jitted with donation."""

    def step(state: tuple[Params, Any], batch: Batch) -> tuple[tuple[Params, Any], jax.Array]:
        params, opt_state = state
        value, gradients = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = transformation.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    return step
