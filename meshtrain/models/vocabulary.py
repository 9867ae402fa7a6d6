"""Operations over the vocabulary: the look-up of embeddings, cross-entropy, and the head that computes logits.

The vocabulary may be split in two ways at once: over mesh axes from the sharding rules, like any weight, and over a
*manual* mesh axis inside `jax.shard_map`, such as the pipeline axis. The argument `axis` names the manual axis or axes;
None: there is no manual axis. The partitioner inserts the collectives over axes that are not manual. Inside a manual
region, differentiating through a psum gives gradients that are too large by the size of the axis, so each backward pass
in this module is derived manually.

b: sequences in a microbatch, T: tokens per sequence, D: embed dim, v: rows of a table or columns of logits on this
shard of a manual axis (the complete vocabulary without a manual axis); N: tokens on one device, n: chunks, c: tokens in
a chunk, V: columns on one device.

Logits of N tokens take N V numbers, and so does their gradient. With large vocabularies these two arrays take more
memory than all other arrays of the step. `in_chunks` therefore computes the logits of c tokens at a time, c V numbers.
The loss is a sum, whose cotangent is a scalar. So the loop of the forward pass also computes each chunk's gradients,
and the backward pass multiplies them by the cotangent: three products, the same number as without chunks. (Chunks of
tokens with gradients in the forward pass: Hsu et al. 2024, Liger Kernel.)

The loop runs on each device's own tokens and columns (`jax.shard_map`). The gradient of the weight is summed locally,
in float32, and is reduced once, after the loop. In the loop, only two numbers per token are summed over the shards of
the vocabulary.

Rounding: logits are rounded to the output dtype, softmax and sums are float32, the gradient of the logits is rounded to
the output dtype, products accumulate in float32. The gradient of x is rounded to the dtype of x. The gradient of the
weight is rounded to the weight's dtype after all chunks are summed, before it is reduced. Without chunks the rounding
is the same.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from meshtrain.models.layers import X, cap_values, reduce_rows, sums_spec
from meshtrain.sharding.param_sharding import Names, axes_in, axes_of_dims, spec_of_dims
from meshtrain.sharding.placement import Placement
from meshtrain.sharding.trees import Arrays

KERNEL, TABLE = ("embed", "vocab"), ("vocab", "embed")
TOKENS, RESIDUAL = ("batch", "sequence"), ("batch", "residual_sequence", "embed")

Axis = str | tuple[str, ...] | None

# (product, x [b, T, D], the head's weight in its compute dtype and stored sharding) -> the logits, or a loss.
Loss = Callable[["Product", jax.Array, jax.Array], jax.Array]

# The loss, and the gradients of x [b, T, D] and of the weight; None for a gradient that is not needed.
Computed = tuple[jax.Array, jax.Array | None, jax.Array | None]
# The gradients of x and of the weight (None if not needed), and empty arrays with the dtypes of both.
Residuals = tuple[Arrays, ...]
Totals = tuple[jax.Array, Arrays]  # the loss so far, and the gradient of the weight (None if not needed)

# Bytes of the logits of a chunk. With bfloat16 and 128 k columns a chunk has 2,048 tokens: enough that the products
# take several times longer than adding to the gradient of the weight.
CHUNK_BYTES = 512 * 2**20
# Scale of the gradient of logits in float16, whose smallest number is 6e-8. The cotangent of the loss, which contains
# the loss scale, is unknown in the forward pass.
FLOAT16_SCALE = 2.0**12
LEAST_LOGIT = -1e30  # lower bound of logits; unlike -inf, its differences are finite


def psum_float32(x: jax.Array, axis: str | tuple[str, ...]) -> jax.Array:
    """Returns the sum of `x` over a manual mesh axis, computed in float32 and rounded to the dtype of `x`.

    XLA's CPU compiler aborts on a bfloat16 psum.
    """
    return jax.lax.psum(x.astype(jnp.float32), axis).astype(x.dtype)


def psum_of_one(x: jax.Array, axis: str | tuple[str, ...]) -> jax.Array:
    """Returns the sum over a manual mesh axis of an array that is zero on all shards except one, without rounding.

    Two 16-bit numbers are sent as one 32-bit integer, in half the bytes of `psum_float32`. The integer sum is exact
    because only one addend is nonzero. 16-bit arrays with an odd last dim are sent in float32. The result has the dtype
    of `x`.
    """
    if x.dtype.itemsize == 2 and x.ndim and x.shape[-1] % 2 == 0:
        pairs = jax.lax.bitcast_convert_type(x.reshape(*x.shape[:-1], -1, 2), jnp.uint32)
        return jax.lax.bitcast_convert_type(jax.lax.psum(pairs, axis), x.dtype).reshape(x.shape)
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return psum_float32(x, axis)
    return jax.lax.psum(x, axis).astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def copy_to_shards(x: jax.Array, axis: Axis) -> jax.Array:
    """Returns `x`, which is replicated over the axis; the backward pass sums the cotangents over the axis.

    This is the operator f of Megatron-LM, and `from_one_shard` is the operator g (Shoeybi et al. 2019, section 3).

    Args:
      x: the same array on all shards of the axis.
      axis: manual mesh axis or axes; None: the cotangent is not summed.
    """
    return x


def _copy_forward(x: jax.Array, axis: Axis) -> tuple[jax.Array, None]:
    return x, None


def _copy_backward(axis: Axis, _: None, cotangent: jax.Array) -> tuple[jax.Array]:
    return (cotangent if axis is None else psum_float32(cotangent, axis),)


copy_to_shards.defvjp(_copy_forward, _copy_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def from_one_shard(x: jax.Array, axis: Axis) -> jax.Array:
    """Copies the array of the only nonzero shard to all shards of the axis; the backward pass is the identity.

    Args:
      x: an array that is zero on all shards except one.
      axis: manual mesh axis or axes; None: `x` is returned unchanged.
    """
    return x if axis is None else psum_of_one(x, axis)


def _one_forward(x: jax.Array, axis: Axis) -> tuple[jax.Array, None]:
    return from_one_shard(x, axis), None


def _one_backward(axis: Axis, _: None, cotangent: jax.Array) -> tuple[jax.Array]:
    return (cotangent,)


from_one_shard.defvjp(_one_forward, _one_backward)


def first_column(num_columns: int, axis: Axis) -> jax.Array | int:
    """Returns the vocabulary index of this shard's first column or row, int32; 0 if `axis` is None.

    Args:
      num_columns: columns of logits, or rows of a table, on each shard.
      axis: the manual mesh axis or axes over which the vocabulary is sharded, or None.
    """
    return 0 if axis is None else jax.lax.axis_index(axis) * num_columns


def cross_entropy(
    logits: jax.Array, targets: jax.Array, weights: jax.Array, vocab_size: int, axis: Axis = None
) -> jax.Array:
    """Returns the weighted sum of -log softmax(logits)[target], a float32 scalar.

    Args:
      logits: [b, T, v] for v columns on one shard of `axis`, any float dtype; the softmax is taken in float32.
      targets: int32 [b, T], indices into the complete vocabulary.
      weights: float32 [b, T], the weight of each target in the sum.
      vocab_size: size of the vocabulary without padding; columns from this index on get no probability.
      axis: the manual mesh axis over which the columns are sharded, or None.
    """
    return jnp.sum(token_losses(logits, targets, vocab_size, axis) * weights)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def token_losses(logits: jax.Array, targets: jax.Array, vocab_size: int, axis: Axis = None) -> jax.Array:
    """Returns -log softmax(logits)[target] of each token, float32 [b, T]; for the arguments see `cross_entropy`."""
    return losses_and_residuals(logits, targets, vocab_size, axis)[0]


def losses_and_residuals(
    logits: jax.Array, targets: jax.Array, vocab_size: int, axis: Axis
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Returns the loss of each token, and the residuals for the backward pass; for the arguments see `cross_entropy`.

    Returns:
      (-log softmax(logits)[target] float32 [b, T], (logits, targets, logarithms of the softmax's sums float32 [b, T])).
    """
    masked, is_target = _mask_logits(logits, targets, vocab_size, axis)
    # GPUs read the logits from memory in each pass. On CPUs one pass takes longer, because it is not vectorized.
    maximum, normalizer = jax.lax.platform_dependent(masked, cuda=max_and_sum, rocm=max_and_sum, default=_in_two_passes)
    target_logit = jnp.sum(jnp.where(is_target, masked, 0.0), axis=-1)
    if axis is not None:
        of_shard, maximum = maximum, jax.lax.pmax(maximum, axis)
        normalizer, target_logit = jax.lax.psum((normalizer * jnp.exp(of_shard - maximum), target_logit), axis)
    log_normalizer = maximum + jnp.log(normalizer)
    return log_normalizer - target_logit, (logits, targets, log_normalizer)


def max_and_sum(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the maximum m of the last dim and the sum of exp(x - m), computed in one pass over `x`, of its dtype.

    Elements of `x` below `LEAST_LOGIT`, such as -inf, do not contribute if there are larger elements.
    """

    def merge(left: tuple[jax.Array, jax.Array], right: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        # The sum of the smaller maximum is rescaled to the larger maximum (Milakov and Gimelshein 2018, algorithm 3).
        (m, total), (n, other) = left, right
        scale = jnp.exp(-jnp.abs(m - n))
        return jnp.maximum(m, n), jnp.where(m >= n, total + other * scale, other + total * scale)

    start = jnp.array(LEAST_LOGIT, x.dtype), jnp.zeros((), x.dtype)
    return jax.lax.reduce((jnp.maximum(x, LEAST_LOGIT), jnp.ones_like(x)), start, merge, (x.ndim - 1,))


def _in_two_passes(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the results of `max_and_sum`, computed in two passes over `x`."""
    maximum = jnp.max(x, axis=-1, initial=LEAST_LOGIT)
    return maximum, jnp.sum(jnp.exp(x - maximum[..., None]), axis=-1)


def _token_losses_backward(
    vocab_size: int, axis: Axis, residuals: tuple[jax.Array, ...], cotangents: jax.Array
) -> tuple[jax.Array, np.ndarray]:
    # Targets are integers, whose tangent type is float0.
    no_gradient = np.zeros(residuals[1].shape, jax.dtypes.float0)
    return gradient_of_logits(residuals, cotangents, vocab_size, axis), no_gradient


token_losses.defvjp(losses_and_residuals, _token_losses_backward)


def gradient_of_logits(
    residuals: tuple[jax.Array, ...], cotangents: jax.Array, vocab_size: int, axis: Axis
) -> jax.Array:
    """Returns the gradient of the logits, with their shape [b, T, columns] and dtype.

    Args:
      residuals: (logits, targets, logarithms of the softmax's sums), returned by `losses_and_residuals`.
      cotangents: cotangents of the tokens' losses, float32 [b, T].
      vocab_size: size of the vocabulary without padding.
      axis: the manual mesh axis over which the columns of logits are sharded, or None.
    """
    logits, targets, log_normalizer = residuals
    masked, is_target = _mask_logits(logits, targets, vocab_size, axis)
    probabilities = jnp.exp(masked - log_normalizer[..., None])
    return ((probabilities - is_target) * cotangents[..., None]).astype(logits.dtype)


def without_padding(logits: jax.Array, vocab_size: int, axis: Axis = None) -> jax.Array:
    """Returns float32 logits [b, T, columns] with minus infinity in the columns of padding, from `vocab_size` on.

    >>> without_padding(jnp.zeros((1, 1, 4)), vocab_size=3).tolist()
    [[[0.0, 0.0, 0.0, -inf]]]
    """
    return jnp.where(_columns(logits, axis) < vocab_size, logits.astype(jnp.float32), -jnp.inf)


def _columns(logits: jax.Array, axis: Axis) -> jax.Array:
    return first_column(logits.shape[-1], axis) + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2)


def _mask_logits(logits: jax.Array, targets: jax.Array, vocab_size: int, axis: Axis) -> tuple[jax.Array, jax.Array]:
    """Returns float32 logits with -inf in padded columns, and a bool mask that is true at the target's column.

    Both are [b, T, v], like `logits`. `vocab_size` is the size of the vocabulary without padding.
    """
    return without_padding(logits, vocab_size, axis), _columns(logits, axis) == targets[..., None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def look_up(table: jax.Array, rows: jax.Array, placement: Placement) -> jax.Array:
    """Returns table[rows], [b, T, D], the rows of an embedding table; zeros for an index outside of the table.

    Each shard looks up the rows that it stores, and the results are summed over shards. This is a manual region,
    because the gather of XLA's partitioner aborts the compiler on some meshes inside a pipeline. If the table's rows
    are split over the axes that split the residual stream's sequence, the sum is a reduce-scatter and the result is
    sharded like the residual stream.

    Args:
      table: [v, D] for v rows, gathered over the axes that split it for storage only.
      rows: row indices int32 [b, T], such as token ids.
      placement: determines the shardings of the table, the indices and the result.
    """
    vocabulary, batch = _specs(table, rows, placement)
    axes = axes_in(vocabulary)
    scattered = _scattered_axes(table, rows, placement)
    summed = tuple(axis for axis in axes if axis not in scattered)
    # The CPU compiler aborts on a bfloat16 psum. The sum is exact in any dtype: all terms but one are 0.
    wire_dtype = jnp.float32 if axes and placement.platform == "cpu" else table.dtype

    def look_up_local(table: jax.Array, rows: jax.Array) -> jax.Array:
        local = rows - first_column(table.shape[0], axes or None)
        here = (local >= 0) & (local < table.shape[0])
        x = jnp.take(table, jnp.where(here, local, 0), axis=0, mode="clip")
        x = jnp.where(here[..., None], x, 0)
        if scattered:
            x = jax.lax.psum_scatter(x.astype(wire_dtype), scattered, scatter_dimension=1, tiled=True)
        if summed:
            x = jax.lax.psum(x.astype(wire_dtype), summed)
        return x.astype(table.dtype)

    of_sequences, of_tokens = axes_of_dims(batch, len(TOKENS))
    result = spec_of_dims([of_sequences, (*of_tokens, *scattered)])
    return placement.on_shards(look_up_local, (vocabulary, batch), result)(table, rows)


def _look_up_forward(
    table: jax.Array, rows: jax.Array, placement: Placement
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    # The backward pass reads only the shape and dtype of the table, so XLA drops this residual.
    return look_up(table, rows, placement), (table, rows)


def _look_up_backward(
    placement: Placement, residuals: tuple[jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, np.ndarray]:
    table, rows = residuals
    vocabulary, batch = _specs(table, rows, placement)
    axes = axes_in(vocabulary)
    num_rows = table.shape[0] // placement.size(axes)

    def scatter_add(rows: jax.Array, cotangent: jax.Array) -> jax.Array:
        local = rows - first_column(num_rows, axes or None)
        beyond = jnp.where((local >= 0) & (local < num_rows), local, num_rows)
        zeros = jnp.zeros((num_rows, cotangent.shape[-1]), jnp.float32)
        total = zeros.at[beyond].add(cotangent.astype(jnp.float32), mode="drop").astype(table.dtype)
        return jax.lax.psum(total, axes_in(batch)) if axes_in(batch) else total

    total = placement.on_shards(scatter_add, (batch, batch), vocabulary)(rows, cotangent)
    return total, np.zeros(rows.shape, jax.dtypes.float0)


look_up.defvjp(_look_up_forward, _look_up_backward)


def _specs(table: jax.Array, rows: jax.Array, placement: Placement) -> tuple[PartitionSpec, PartitionSpec]:
    return placement.weight_spec(table.shape, TABLE), placement.activation_spec(rows.shape, TOKENS)


def _scattered_axes(table: jax.Array, rows: jax.Array, placement: Placement) -> tuple[str, ...]:
    """Returns the mesh axes over which the sum of `look_up` is scattered along the sequence; () for a plain sum.

    `look_up` describes the arguments.
    """
    vocabulary, batch = _specs(table, rows, placement)
    of_residual = placement.activation_spec((*rows.shape, table.shape[1]), RESIDUAL)
    _, of_tokens, _ = axes_of_dims(of_residual, len(RESIDUAL))
    _, already = axes_of_dims(batch, len(TOKENS))
    further = of_tokens[len(already) :]
    return further if of_tokens[: len(already)] == already and set(further) <= set(axes_in(vocabulary)) else ()


@dataclasses.dataclass(frozen=True)
class Product:
    """The settings of the head's matmul, which computes logits from activations and the head's weight.

    Attributes:
      placement: determines the shardings of activations and of the gathered weight.
      names: logical axes of the weight: `KERNEL` for [D, columns], or `TABLE` for [columns, D] if embeddings are tied.
      output_dtype: dtype of the logits.
      cap: logits become cap tanh(logit / cap); 0: no cap.
    """

    placement: Placement
    names: Names
    output_dtype: DTypeLike
    cap: float = 0.0


def logits(product: Product, x: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns logits [b, T, columns] in the output dtype, including the columns of padding.

    Args:
      product: settings of the matmul: shardings, logical axes of the weight, output dtype and cap.
      x: activations [b, T, D].
      weight: weight of the head, [D, columns] or [columns, D], cast to its compute dtype and not yet gathered.
    """
    place = product.placement
    x = place.activation(x, ("batch", "sequence", "embed"))
    gathered = place.weight(place.as_stored(weight, product.names), product.names)
    kernel = gathered if product.names == KERNEL else gathered.T
    result = cap_values(jnp.matmul(x, kernel, preferred_element_type=product.output_dtype), product.cap)
    return place.activation(result, ("batch", "sequence", "vocab"))


@dataclasses.dataclass(frozen=True)
class CrossEntropy:
    """The cross-entropy loss of the head; computes logits in chunks of tokens to save memory.

    Attributes:
      vocab_size: size of the vocabulary without padding; columns from this index on get no probability.
      chunk: number of tokens on one device whose logits are computed at a time; 0: logits of about `CHUNK_BYTES`.
      axis: the manual mesh axis over which the columns of logits are sharded, or None.
    """

    vocab_size: int
    chunk: int = 0
    axis: Axis = None

    def __call__(
        self, product: Product, x: jax.Array, weight: jax.Array, targets: jax.Array, weights: jax.Array
    ) -> jax.Array:
        """Returns the weighted sum of -log softmax(logits)[target], a float32 scalar.

        Args:
          product: settings of the matmul that computes the logits.
          x: activations after the last layer, [b, T, D].
          weight: weight of the head, [D, columns] or [columns, D], cast to its compute dtype and not yet gathered.
          targets: int32 [b, T], indices into the complete vocabulary.
          weights: float32 [b, T], the weight of each target in the sum.
        """
        shards = _Shards.of(product, x, weight)
        if num_chunks(shards.num_tokens, shards.num_columns, product.output_dtype, self.chunk) == 1:
            return cross_entropy(logits(product, x, weight), targets, weights, self.vocab_size, self.axis)
        total: jax.Array = in_chunks(self, product, x, weight, targets, weights)
        return total


def num_chunks(num_tokens: int, num_columns: int, dtype: DTypeLike, chunk: int = 0) -> int:
    """Returns the number of chunks into which the loss splits one device's tokens.

    >>> num_chunks(16 * 8192, 128256, jnp.bfloat16), num_chunks(8 * 4096, 151936, jnp.bfloat16)
    (64, 16)

    Args:
      num_tokens: number of tokens on one device.
      num_columns: number of columns of logits on one device.
      dtype: dtype of the logits.
      chunk: maximum number of tokens in a chunk; 0: the number whose logits take about `CHUNK_BYTES`, or up to a fifth
        more. If possible, the number of chunks is increased, up to twice the minimum, so that it divides the number of
        tokens.
    """
    wanted = chunk or max(1, CHUNK_BYTES // (num_columns * jnp.dtype(dtype).itemsize))
    least = math.ceil(num_tokens / min(wanted, num_tokens))
    # Chunks of equal size need no padding, so up to twice as many chunks are accepted.
    fewest = least if chunk else math.ceil(least / 1.2)
    return next((n for n in range(fewest, 2 * least + 1) if num_tokens % n == 0), least)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def in_chunks(
    loss: CrossEntropy, product: Product, x: jax.Array, weight: jax.Array, targets: jax.Array, weights: jax.Array
) -> jax.Array:
    """Returns the loss of `CrossEntropy.__call__`, a float32 scalar, computed one chunk of tokens at a time.

    The forward pass also computes the gradients of `x` and `weight` if they are needed. `loss` contains the settings;
    for the other arguments see `CrossEntropy.__call__`.
    """
    return _compute(loss, product, (x, weight, targets, weights), of_x=False, of_weight=False)[0]


def _chunks_forward(loss: CrossEntropy, product: Product, *primals: CustomVJPPrimal) -> tuple[jax.Array, Residuals]:
    x, weight, targets, weights = (primal.value for primal in primals)
    given, wanted = (x, weight, targets, weights), [primal.perturbed for primal in primals[:2]]
    total, *gradients = _compute(loss, product, given, of_x=wanted[0], of_weight=wanted[1])
    return total, (*gradients, jnp.zeros(0, x.dtype), jnp.zeros(0, weight.dtype))


def _chunks_backward(
    loss: CrossEntropy, product: Product, residuals: Residuals, cotangent: jax.Array | SymbolicZero
) -> tuple[jax.Array | None, jax.Array | None, None, None]:
    *gradients, like_x, like_weight = residuals
    if not isinstance(cotangent, jax.Array):  # a symbolic zero
        return None, None, None, None
    # A cotangent that is a power of two, such as a loss scale, adds no rounding.
    scaled = [
        None if gradient is None else (gradient.astype(jnp.float32) * cotangent).astype(like.dtype)
        for gradient, like in zip(gradients, (like_x, like_weight), strict=True)
    ]
    # The weights of targets are data, so their gradient is never needed.
    return scaled[0], scaled[1], None, None


in_chunks.defvjp(_chunks_forward, _chunks_backward, symbolic_zeros=True)


def _compute(
    loss: CrossEntropy, product: Product, given: tuple[jax.Array, ...], *, of_x: bool, of_weight: bool
) -> Computed:
    """Returns the loss of `in_chunks`, the gradient of x and the gradient of the weight.

    Gradients have the dtype of `_sum_dtype`. The gradient of the weight is sharded like the stored weight.

    Args:
      loss: settings of the loss.
      product: settings of the matmul that computes the logits.
      given: (x, weight, targets, weights), the other arguments of `in_chunks`.
      of_x: whether the gradient of x is computed; otherwise it is None.
      of_weight: whether the gradient of the weight is computed; otherwise it is None.
    """
    x, weight, targets, weights = given
    place, shards = product.placement, _Shards.of(product, x, weight)

    def on_device(*local: jax.Array) -> Computed:
        total, gradient_x, gradient = _loop(loss, product, shards, local, of_x=of_x, of_weight=of_weight)
        if gradient_x is not None:
            gradient_x = reduce_rows(gradient_x, shards.vocab, shards.gradient_x != shards.x)
        gradient = None if gradient is None else shards.reduced_weight(gradient)
        return jax.lax.psum(total, shards.batch) if shards.batch else total, gradient_x, gradient

    of_tokens = place.activation_spec(targets.shape, TOKENS)
    outputs = (PartitionSpec(), shards.gradient_x if of_x else None, shards.stored if of_weight else None)
    # Opaque, because XLA's CPU compiler aborts on a 16-bit sum over shards unless all axes are manual.
    run = place.on_shards(on_device, (shards.x, shards.weight, of_tokens, of_tokens), outputs, is_opaque=True)
    computed: Computed = run(x, place.weight(weight, product.names), targets, weights)
    return computed


@dataclasses.dataclass(frozen=True)
class _Shards:
    """The shardings of the arrays of a head and its loss.

    Attributes:
      x: partition spec of the activations x, which are not split along D.
      gradient_x: partition spec of the gradient of x, whose sequence may be split over the vocabulary's axes.
      weight: partition spec of the gathered weight.
      stored: partition spec of the stored weight.
      batch: mesh axes that split tokens.
      vocab: mesh axes that split columns of logits.
      num_tokens: number of tokens on one device.
      num_columns: number of columns of logits on one device.
    """

    x: PartitionSpec
    gradient_x: PartitionSpec
    weight: PartitionSpec
    stored: PartitionSpec
    batch: tuple[str, ...]
    vocab: tuple[str, ...]
    num_tokens: int
    num_columns: int

    @classmethod
    def of(cls, product: Product, x: jax.Array, weight: jax.Array) -> "_Shards":
        """Returns the shardings of activations `x` and the head's `weight`; specs omit axes that are already manual."""
        place, names = product.placement, product.names
        of_x = place.activation_spec(x.shape, X)
        gathered, stored = place.weight_spec(weight.shape, names), place.stored_spec(weight.shape, names)
        vocab, batch = axes_in(gathered), axes_in(of_x)
        num_tokens = math.prod(x.shape[:2]) // place.size(batch)
        num_columns = weight.shape[names.index("vocab")] // place.size(vocab)
        return cls(of_x, sums_spec(place, x.shape, vocab), gathered, stored, batch, vocab, num_tokens, num_columns)

    def reduced_weight(self, gradient: jax.Array) -> jax.Array:
        """Returns the gradient of the weight summed over the shards of the batch, sharded like the stored weight."""
        left = self.batch
        pairs = zip(axes_of_dims(self.stored, 2), axes_of_dims(self.weight, 2), strict=True)
        for dim, (stored, whole) in enumerate(pairs):
            if over := tuple(axis for axis in stored if axis not in whole):
                assert set(over) <= set(left), "weights are stored in shards over axes that split the batch"
                gradient = jax.lax.psum_scatter(gradient, over, scatter_dimension=dim, tiled=True)
                left = tuple(axis for axis in left if axis not in over)
        return jax.lax.psum(gradient, left) if left else gradient


def _loop(
    loss: CrossEntropy, product: Product, shards: _Shards, local: tuple[jax.Array, ...], *, of_x: bool, of_weight: bool
) -> Computed:
    """Returns (loss of one device's tokens, gradient of x, gradient of the weight); None for a gradient not requested.

    `local` contains this device's shards of x, weight, targets and weights. Loss and gradients are not yet summed over
    devices.
    """
    x, weight, targets, weights = local
    num_tokens, dim = shards.num_tokens, product.names.index("embed")
    n = num_chunks(num_tokens, shards.num_columns, product.output_dtype, loss.chunk)
    axes = (*((loss.axis,) if loss.axis else ()), *shards.vocab)
    scale = FLOAT16_SCALE if product.output_dtype == jnp.float16 else 1.0
    held_x, held_weight = _sum_dtype(x.dtype), _sum_dtype(weight.dtype)

    def cut(array: jax.Array) -> jax.Array:
        # Tokens that fill the last chunk have the weight 0.
        flat = array.reshape(num_tokens, *array.shape[2:])
        padded = jnp.pad(flat, ((0, -num_tokens % n), *((0, 0) for _ in flat.shape[1:])))
        return padded.reshape(n, 1, -1, *flat.shape[1:])

    def one(carry: Totals, chunk: tuple[jax.Array, ...]) -> tuple[Totals, jax.Array | None]:
        total, sum_of_gradients = carry
        x, targets, weights = chunk
        raw = _dot(x, weight, (2, dim), product.output_dtype)
        of_product, pull = jax.vjp(functools.partial(cap_values, cap=product.cap), raw)
        of_tokens, residuals = losses_and_residuals(of_product, targets, loss.vocab_size, axes or None)
        gradient_x = None
        if of_x or of_weight:
            (gradient,) = pull(gradient_of_logits(residuals, weights * scale, loss.vocab_size, axes or None))
            gradient_x = _dot(gradient, weight, (2, 1 - dim), held_x) / scale if of_x else None
            if of_weight:
                sides = (x, gradient) if dim == 0 else (gradient, x)
                sum_of_gradients += _dot(sides[0][0], sides[1][0], (0, 0), jnp.float32) / scale
        return (total + jnp.sum(of_tokens * weights), sum_of_gradients), gradient_x

    # Zeros that depend on x: a compiler may create constants long before the loop, which would take memory.
    zero, x = jax.lax.optimization_barrier((jnp.float32(0), x))
    start = (zero, jnp.broadcast_to(zero, weight.shape) if of_weight else None)
    (total, gradient), of_chunks = jax.lax.scan(one, start, (cut(x), cut(targets), cut(weights)))
    if of_chunks is not None:
        of_chunks = of_chunks.reshape(-1, x.shape[-1])[:num_tokens].reshape(x.shape)
    return total, of_chunks, None if gradient is None else gradient.astype(held_weight)


def _dot(left: jax.Array, right: jax.Array, dims: tuple[int, int], dtype: DTypeLike) -> jax.Array:
    return jax.lax.dot_general(left, right, (((dims[0],), (dims[1],)), ((), ())), preferred_element_type=dtype)


def _sum_dtype(dtype: DTypeLike) -> DTypeLike:
    """Returns the dtype in which a gradient of dtype `dtype` is summed over shards and saved for the backward pass.

    It is float32 for float16, in which small numbers would be lost before they are multiplied by the loss scale;
    otherwise it is `dtype`.
    """
    return jnp.float32 if dtype == jnp.float16 else dtype
