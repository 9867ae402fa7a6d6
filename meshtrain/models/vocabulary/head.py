"""The head's product, and the cross-entropy of its logits over chunks of tokens, so that no array holds all logits.

b: sequences in a microbatch, T: tokens a sequence, D: embed dim, v: columns of the vocabulary on this shard of a manual
axis (all without one); N: tokens on one device, n: chunks, c: tokens in a chunk, V: columns on one device.

Logits of N tokens take N V numbers, and their gradient as many: for large vocabularies more than the rest of the step.
`in_chunks` computes c V of them at a time. The loss is a sum, whose cotangent is one number. So the loop of the forward
pass computes each chunk's gradients as well, and the backward pass multiplies them by that number: three products, as
many as without chunks. (Chunks of tokens with gradients in the forward pass: Hsu et al. 2024, Liger Kernel.)

The loop runs on each device's own tokens and columns (`jax.shard_map`). The gradient of the weight is added up locally,
in float32, and is reduced once, when the loop is over. Inside the loop two numbers a token are summed over the shards
of the vocabulary, and nothing else is sent.

Rounding: logits are rounded to the output dtype, softmax and sums are float32, the gradient of the logits is rounded to
the output dtype, products accumulate in float32. The gradient of x is rounded to the dtype of x, that of the weight to
the dtype of the weight when all chunks are added up, before it is reduced. The whole product rounds the same.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from meshtrain.models.layers import X, capped, reduced, sums_spec
from meshtrain.models.vocabulary import losses
from meshtrain.sharding.placement import Placement
from meshtrain.sharding.stored import Names, axes_in, axes_of_dims
from meshtrain.sharding.trees import Arrays

KERNEL, TABLE = ("embed", "vocab"), ("vocab", "embed")
TOKENS = ("batch", "sequence")

# (product, x [b, T, D], weight as it is stored, in its compute dtype) -> the logits, or a loss.
Loss = Callable[["Product", jax.Array, jax.Array], jax.Array]

# The loss, and the gradients of x [b, T, D] and of the weight, None where one is not wanted.
Computed = tuple[jax.Array, jax.Array | None, jax.Array | None]
# The gradients of x and of the weight, None where one is not wanted, and empty arrays of the dtypes of both.
Residuals = tuple[Arrays, ...]
Totals = tuple[jax.Array, Arrays]  # the loss so far, and the gradient of the weight, None where it is not wanted

# Bytes of the logits of a chunk. With bfloat16 and 128 k columns it is 2,048 tokens: enough that the products take
# several times as long as adding to the gradient of the weight.
CHUNK_BYTES = 512 * 2**20
# Of the gradient of logits in float16, whose smallest number is 6e-8. The cotangent of the loss, which holds the loss
# scale, is not known in the forward pass.
FLOAT16_SCALE = 2.0**12


@dataclasses.dataclass(frozen=True)
class Product:
    """How logits are computed from activations and the head's weight.

    Attributes:
      placement: the shardings of activations and of the gathered weight.
      names: the logical axes of the weight: `KERNEL` [D, v], or `TABLE` [v, D] where embeddings are tied.
      output_dtype: of the logits.
      cap: logits become cap tanh(logit / cap); 0: they stay.
    """

    placement: Placement
    names: Names
    output_dtype: DTypeLike
    cap: float = 0.0


def logits(product: Product, x: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns logits [b, T, v] in the output dtype, padding included.

    Args:
      product: how they are computed.
      x: [b, T, D].
      weight: as it is stored, in its compute dtype.
    """
    place = product.placement
    x = place.activation(x, ("batch", "sequence", "embed"))
    gathered = place.weight(place.as_stored(weight, product.names), product.names)
    kernel = gathered if product.names == KERNEL else gathered.T
    result = capped(jnp.matmul(x, kernel, preferred_element_type=product.output_dtype), product.cap)
    return place.activation(result, ("batch", "sequence", "vocab"))


@dataclasses.dataclass(frozen=True)
class CrossEntropy:
    """The loss of the head.

    Attributes:
      vocab_size: columns from here on are padding and get no probability.
      chunk: tokens in a chunk on one device; 0: as many as have logits of `CHUNK_BYTES`.
      axis: the manual mesh axis over which the columns are sharded, or None.
    """

    vocab_size: int
    chunk: int = 0
    axis: losses.Axis = None

    def __call__(
        self, product: Product, x: jax.Array, weight: jax.Array, targets: jax.Array, weights: jax.Array
    ) -> jax.Array:
        """Returns the weighted sum of -log softmax(logits)[target], a float32 scalar.

        Args:
          product: makes the logits.
          x: [b, T, D].
          weight: of the head, as it is stored, in its compute dtype.
          targets: int32 [b, T], indices into the whole vocabulary.
          weights: float32 [b, T].
        """
        shards = _Shards.of(product, x, weight)
        if num_chunks(shards.num_tokens, shards.num_columns, product.output_dtype, self.chunk) == 1:
            return losses.cross_entropy(logits(product, x, weight), targets, weights, self.vocab_size, self.axis)
        total: jax.Array = in_chunks(self, product, x, weight, targets, weights)
        return total


def num_chunks(num_tokens: int, num_columns: int, dtype: DTypeLike, chunk: int = 0) -> int:
    """Returns n, into how many chunks the tokens of one device are cut.

    >>> num_chunks(16 * 8192, 128256, jnp.bfloat16), num_chunks(8 * 4096, 151936, jnp.bfloat16)
    (64, 16)

    Args:
      num_tokens: N.
      num_columns: V.
      dtype: of the logits.
      chunk: tokens in a chunk; 0: as many as have logits of `CHUNK_BYTES`, a fifth more if they then divide the tokens.
    """
    wanted = chunk or max(1, CHUNK_BYTES // (num_columns * jnp.dtype(dtype).itemsize))
    least = math.ceil(num_tokens / min(wanted, num_tokens))
    # Chunks of equal size need no padding: up to twice as many, if that is what it takes.
    fewest = least if chunk else math.ceil(least / 1.2)
    return next((n for n in range(fewest, 2 * least + 1) if num_tokens % n == 0), least)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def in_chunks(
    loss: CrossEntropy, product: Product, x: jax.Array, weight: jax.Array, targets: jax.Array, weights: jax.Array
) -> jax.Array:
    """Returns the loss of `CrossEntropy.__call__`, computed over chunks of tokens; for the arguments see there."""
    return _computed(loss, product, (x, weight, targets, weights), of_x=False, of_weight=False)[0]


def _forward(loss: CrossEntropy, product: Product, *primals: CustomVJPPrimal) -> tuple[jax.Array, Residuals]:
    x, weight, targets, weights = (primal.value for primal in primals)
    given, wanted = (x, weight, targets, weights), [primal.perturbed for primal in primals[:2]]
    total, *gradients = _computed(loss, product, given, of_x=wanted[0], of_weight=wanted[1])
    return total, (*gradients, jnp.zeros(0, x.dtype), jnp.zeros(0, weight.dtype))


def _backward(
    loss: CrossEntropy, product: Product, residuals: Residuals, cotangent: jax.Array | SymbolicZero
) -> tuple[jax.Array | None, jax.Array | None, None, None]:
    *gradients, like_x, like_weight = residuals
    if not isinstance(cotangent, jax.Array):  # a symbolic zero
        return None, None, None, None
    # Seeds are powers of two, so this rounds nothing.
    scaled = [
        None if gradient is None else (gradient.astype(jnp.float32) * cotangent).astype(like.dtype)
        for gradient, like in zip(gradients, (like_x, like_weight), strict=True)
    ]
    # Weights of targets are data: their gradient is never read.
    return scaled[0], scaled[1], None, None


in_chunks.defvjp(_forward, _backward, symbolic_zeros=True)


def _computed(
    loss: CrossEntropy, product: Product, given: tuple[jax.Array, ...], *, of_x: bool, of_weight: bool
) -> Computed:
    """Returns the loss and its gradients, for `in_chunks` of the same arguments.

    Gradients have the dtype in which they are held, see `_held`; that of the weight is sharded as the weight is stored.
    """
    x, weight, targets, weights = given
    place, shards = product.placement, _Shards.of(product, x, weight)

    def on_device(*local: jax.Array) -> Computed:
        total, gradient_x, gradient = _looped(loss, product, shards, local, of_x=of_x, of_weight=of_weight)
        if gradient_x is not None:
            gradient_x = reduced(gradient_x, shards.vocab, shards.gradient_x != shards.x)
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
    """Where the arrays of a head live.

    Attributes:
      x: the spec of x, whole along D.
      gradient_x: of its gradient, which may be split over the vocabulary's axes along the sequence.
      weight: of the gathered weight, and `stored` of the stored one.
      batch: the axes that split tokens, and `vocab` those that split columns.
      num_tokens: N, and `num_columns` V.
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
        """Returns the shardings of a product's arrays, without the axes that are manual here."""
        place, names = product.placement, product.names
        of_x = place.activation_spec(x.shape, X)
        gathered, stored = place.weight_spec(weight.shape, names), place.stored_spec(weight.shape, names)
        vocab, batch = axes_in(gathered), axes_in(of_x)
        num_tokens = math.prod(x.shape[:2]) // place.size(batch)
        num_columns = weight.shape[names.index("vocab")] // place.size(vocab)
        return cls(of_x, sums_spec(place, x.shape, vocab), gathered, stored, batch, vocab, num_tokens, num_columns)

    def reduced_weight(self, gradient: jax.Array) -> jax.Array:
        """Returns the gradient of the weight summed over the shards of the batch; each keeps what it stores."""
        left = self.batch
        pairs = zip(axes_of_dims(self.stored, 2), axes_of_dims(self.weight, 2), strict=True)
        for dim, (stored, whole) in enumerate(pairs):
            if over := tuple(axis for axis in stored if axis not in whole):
                assert set(over) <= set(left), "weights are stored in shards over axes that split the batch"
                gradient = jax.lax.psum_scatter(gradient, over, scatter_dimension=dim, tiled=True)
                left = tuple(axis for axis in left if axis not in over)
        return jax.lax.psum(gradient, left) if left else gradient


def _looped(
    loss: CrossEntropy, product: Product, shards: _Shards, local: tuple[jax.Array, ...], *, of_x: bool, of_weight: bool
) -> Computed:
    """Returns the loss of one device's tokens, and where they are wanted its gradients of x and of the weight.

    Args:
      loss: which loss.
      product: makes the logits.
      shards: the axes that split the columns.
      local: x, weight, targets and weights, this device's shards.
      of_x: whether the gradient of x is wanted.
      of_weight: whether that of the weight is.
    """
    x, weight, targets, weights = local
    num_tokens, dim = shards.num_tokens, product.names.index("embed")
    n = num_chunks(num_tokens, shards.num_columns, product.output_dtype, loss.chunk)
    axes = (*((loss.axis,) if loss.axis else ()), *shards.vocab)
    scale = FLOAT16_SCALE if product.output_dtype == jnp.float16 else 1.0
    held_x, held_weight = _held(x.dtype), _held(weight.dtype)

    def cut(array: jax.Array) -> jax.Array:
        # Tokens that fill the last chunk have the weight 0.
        flat = array.reshape(num_tokens, *array.shape[2:])
        padded = jnp.pad(flat, ((0, -num_tokens % n), *((0, 0) for _ in flat.shape[1:])))
        return padded.reshape(n, 1, -1, *flat.shape[1:])

    def one(carry: Totals, chunk: tuple[jax.Array, ...]) -> tuple[Totals, jax.Array | None]:
        total, sum_of_gradients = carry
        x, targets, weights = chunk
        raw = _dot(x, weight, (2, dim), product.output_dtype)
        of_product, pull = jax.vjp(functools.partial(capped, cap=product.cap), raw)
        of_tokens, residuals = losses.forward(of_product, targets, loss.vocab_size, axes or None)
        gradient_x = None
        if of_x or of_weight:
            (gradient,) = pull(losses.gradient(residuals, weights * scale, loss.vocab_size, axes or None))
            gradient_x = _dot(gradient, weight, (2, 1 - dim), held_x) / scale if of_x else None
            if of_weight:
                sides = (x, gradient) if dim == 0 else (gradient, x)
                sum_of_gradients += _dot(sides[0][0], sides[1][0], (0, 0), jnp.float32) / scale
        return (total + jnp.sum(of_tokens * weights), sum_of_gradients), gradient_x

    # Zeros that depend on x: a compiler may make constants long before the loop, where they take memory.
    zero, x = jax.lax.optimization_barrier((jnp.float32(0), x))
    start = (zero, jnp.broadcast_to(zero, weight.shape) if of_weight else None)
    (total, gradient), of_chunks = jax.lax.scan(one, start, (cut(x), cut(targets), cut(weights)))
    if of_chunks is not None:
        of_chunks = of_chunks.reshape(-1, x.shape[-1])[:num_tokens].reshape(x.shape)
    return total, of_chunks, None if gradient is None else gradient.astype(held_weight)


def _dot(left: jax.Array, right: jax.Array, dims: tuple[int, int], dtype: DTypeLike) -> jax.Array:
    return jax.lax.dot_general(left, right, (((dims[0],), (dims[1],)), ((), ())), preferred_element_type=dtype)


def _held(dtype: DTypeLike) -> DTypeLike:
    """Returns the dtype of a gradient between forward and backward pass, in which it is summed over shards.

    In float16 small numbers would be lost before they are multiplied by the loss scale.
    """
    return jnp.float32 if dtype == jnp.float16 else dtype
