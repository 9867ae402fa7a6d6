"""Cross-entropy over a vocabulary that may be sharded over a manual mesh axis, and the two collectives around it.

b: sequences in a microbatch, T: tokens a sequence, v: columns of the vocabulary on this shard (all if `axis` is None).

`axis` is a *manual* mesh axis (inside `jax.shard_map`), several of them, or None. The partitioner inserts collectives
over other axes.
Inside the region, differentiating through a psum gives gradients that are too large by the size of the axis. So each
backward pass here is written by hand. `copy_to_shards` and `from_one_shard` are the operators f and g of Megatron-LM
(Shoeybi et al. 2019, section 3).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

Axis = str | tuple[str, ...] | None


def psum_float32(x: jax.Array, axis: str | tuple[str, ...]) -> jax.Array:
    """Sums over a manual axis in float32 (the CPU compiler aborts on bfloat16); returns the dtype of `x`."""
    return jax.lax.psum(x.astype(jnp.float32), axis).astype(x.dtype)


def psum_of_one(x: jax.Array, axis: str | tuple[str, ...]) -> jax.Array:
    """Sums over a manual axis an array that is zero on all shards but one; returns the dtype and the bits of that one.

    Two numbers of 16 bits cross as one integer of 32, in half the bytes of `psum_float32`: the sum has one addend.
    Those of an odd last dim cross in float32.
    """
    if x.dtype.itemsize == 2 and x.ndim and x.shape[-1] % 2 == 0:
        pairs = jax.lax.bitcast_convert_type(x.reshape(*x.shape[:-1], -1, 2), jnp.uint32)
        return jax.lax.bitcast_convert_type(jax.lax.psum(pairs, axis), x.dtype).reshape(x.shape)
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return psum_float32(x, axis)
    return jax.lax.psum(x, axis).astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def copy_to_shards(x: jax.Array, axis: Axis) -> jax.Array:
    """Returns `x`, which is replicated over the axis; the backward pass sums the cotangents over the axis."""
    return x


def _copy_forward(x: jax.Array, axis: Axis) -> tuple[jax.Array, None]:
    return x, None


def _copy_backward(axis: Axis, _: None, cotangent: jax.Array) -> tuple[jax.Array]:
    return (cotangent if axis is None else psum_float32(cotangent, axis),)


copy_to_shards.defvjp(_copy_forward, _copy_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def from_one_shard(x: jax.Array, axis: Axis) -> jax.Array:
    """Returns what one shard has where all others have zeros; the backward pass is the identity."""
    return x if axis is None else psum_of_one(x, axis)


def _one_forward(x: jax.Array, axis: Axis) -> tuple[jax.Array, None]:
    return from_one_shard(x, axis), None


def _one_backward(axis: Axis, _: None, cotangent: jax.Array) -> tuple[jax.Array]:
    return (cotangent,)


from_one_shard.defvjp(_one_forward, _one_backward)


def first_column(num_columns: int, axis: Axis) -> jax.Array | int:
    """Returns the index in the whole vocabulary of the first of this shard's `num_columns` columns."""
    return 0 if axis is None else jax.lax.axis_index(axis) * num_columns


def cross_entropy(
    logits: jax.Array, targets: jax.Array, weights: jax.Array, vocab_size: int, axis: Axis = None
) -> jax.Array:
    """Returns the weighted sum of -log softmax(logits)[target], a float32 scalar.

    Args:
      logits: [b, T, v], any float dtype; the softmax is taken in float32.
      targets: int32 [b, T], indices into the whole vocabulary.
      weights: float32 [b, T].
      vocab_size: columns from here on are padding and get no probability.
      axis: the manual mesh axis over which the columns are sharded, or None.
    """
    return jnp.sum(token_losses(logits, targets, vocab_size, axis) * weights)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def token_losses(logits: jax.Array, targets: jax.Array, vocab_size: int, axis: Axis = None) -> jax.Array:
    """Returns -log softmax(logits)[target] of each token, float32 [b, T]; for the arguments see `cross_entropy`."""
    return forward(logits, targets, vocab_size, axis)[0]


def forward(
    logits: jax.Array, targets: jax.Array, vocab_size: int, axis: Axis
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Returns `token_losses`, and what `gradient` needs; for the arguments see there."""
    masked, is_target = _masked(logits, targets, vocab_size, axis)
    maximum = jnp.max(masked, axis=-1)
    if axis is not None:
        maximum = jax.lax.pmax(maximum, axis)
    normalizer = jnp.sum(jnp.exp(masked - maximum[..., None]), axis=-1)
    target_logit = jnp.sum(jnp.where(is_target, masked, 0.0), axis=-1)
    if axis is not None:
        normalizer, target_logit = jax.lax.psum((normalizer, target_logit), axis)
    log_normalizer = maximum + jnp.log(normalizer)
    return log_normalizer - target_logit, (logits, targets, log_normalizer)


def _token_losses_backward(
    vocab_size: int, axis: Axis, residuals: tuple[jax.Array, ...], cotangents: jax.Array
) -> tuple[jax.Array, np.ndarray]:
    # Targets are integers, whose tangent type is float0.
    no_gradient = np.zeros(residuals[1].shape, jax.dtypes.float0)
    return gradient(residuals, cotangents, vocab_size, axis), no_gradient


token_losses.defvjp(forward, _token_losses_backward)


def gradient(residuals: tuple[jax.Array, ...], cotangents: jax.Array, vocab_size: int, axis: Axis) -> jax.Array:
    """Returns the gradient of the logits, [b, T, v] in their dtype.

    Args:
      residuals: from `forward`.
      cotangents: of the tokens' losses, float32 [b, T].
      vocab_size: see `cross_entropy`.
      axis: see `cross_entropy`.
    """
    logits, targets, log_normalizer = residuals
    masked, is_target = _masked(logits, targets, vocab_size, axis)
    probabilities = jnp.exp(masked - log_normalizer[..., None])
    return ((probabilities - is_target) * cotangents[..., None]).astype(logits.dtype)


def without_padding(logits: jax.Array, vocab_size: int, axis: Axis = None) -> jax.Array:
    """Returns float32 logits [b, T, v] in which the columns from `vocab_size` on are at minus infinity.

    >>> without_padding(jnp.zeros((1, 1, 4)), vocab_size=3).tolist()
    [[[0.0, 0.0, 0.0, -inf]]]
    """
    return jnp.where(_columns(logits, axis) < vocab_size, logits.astype(jnp.float32), -jnp.inf)


def _columns(logits: jax.Array, axis: Axis) -> jax.Array:
    return first_column(logits.shape[-1], axis) + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2)


def _masked(logits: jax.Array, targets: jax.Array, vocab_size: int, axis: Axis) -> tuple[jax.Array, jax.Array]:
    """Returns float32 logits with padding at -inf, and a mask that is true at the target's column; both [b, T, v]."""
    return without_padding(logits, vocab_size, axis), _columns(logits, axis) == targets[..., None]
