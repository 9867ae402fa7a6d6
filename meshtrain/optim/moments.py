"""Stores moments of any optimizer in fewer bytes, as bfloat16 or 8-bit codes.

Moments are decoded before an update and encoded after it. Moments and weights in bfloat16, and second moments in 8
bits, are rounded stochastically. A moment with beta2 = 0.999 changes by a thousandth in a step without gradient, which
is at most about a quarter of the distance between two bfloat16 numbers. With rounding to nearest, this moment would
never decrease after the largest gradient of the run. The random bits depend on the number of updates, the array and the
element, not on the mesh.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import KeyPath

from meshtrain.errors import Problem
from meshtrain.optim.eight_bits import LARGEST_BLOCK, SMALLEST_BLOCK, decode, encode, extents, num_blocks
from meshtrain.optim.states import owners
from meshtrain.sharding.param_sharding import Names, is_names, num_parts
from meshtrain.sharding.trees import Arrays, NamesTree, leaves_with_paths

FLOAT32, BFLOAT16, EIGHT_BITS = KINDS = ("float32", "bfloat16", "8bit")
# The field of an optax state whose arrays are never negative.
SECOND_MOMENT = "nu"
SEED, WEIGHTS_SEED, ANCHOR_SEED = 0, 1, 2  # random bits for moments, weights, anchor weights of local SGD


class StoredMoments(NamedTuple):
    """The state of an optimizer whose moments are stored in fewer bytes.

    Attributes:
      num_updates: int32 scalar, the number of updates done; random bits depend on it.
      inner: the state of the wrapped optimizer, in which moments are bfloat16, or int8 and uint8 codes; other arrays
        are unchanged.
      scales: a pytree with the structure of `inner`: the float32 scales of the blocks in place of each array of codes,
        and a `MaskedNode` in place of each other array.
    """

    num_updates: jax.Array
    inner: Arrays
    scales: Arrays


def check_block(block: int) -> list[Problem]:
    """Returns an error line if the number of elements of a block is out of bounds or not a power of two, else []."""
    if SMALLEST_BLOCK <= block <= LARGEST_BLOCK and block & (block - 1) == 0:
        return []
    fix = min(max(1 << max(block.bit_length() - 1, 0), SMALLEST_BLOCK), LARGEST_BLOCK)
    allowed = f"a power of two from {SMALLEST_BLOCK} to {LARGEST_BLOCK}"
    return [Problem("optimizer.moment_block", got=block, allowed=allowed, nearest=fix)]


def problems(
    block: int,
    params: Arrays,
    logical_axes: NamesTree,
    column: Mapping[str, tuple[str, ...]],
    mesh_shape: Mapping[str, int],
) -> list[Problem]:
    """Returns an error line for each logical axis along which the mesh would split a weight within a block.

    Args:
      block: the number of elements of a block.
      params: the abstract trained parameters.
      logical_axes: a pytree with the structure of the parameters: a tuple of logical axes for each parameter.
      column: logical axis -> mesh axes that split it in stored weights.
      mesh_shape: the size of each mesh axis.
    """
    axes, problems = dict(leaves_with_paths(logical_axes, is_leaf=is_names)), dict[str, Problem]()
    for path, leaf in leaves_with_paths(params):
        names, shape = axes[path], tuple(leaf.shape)
        parts = [num_parts(column[name], mesh_shape) if name in column else 1 for name in names]
        for dim in _between(shape, names, block, parts):
            below = (2**power for power in range(12, 4, -1) if 2**power < block)  # the legal blocks, the largest first
            smaller = next((size for size in below if not _between(shape, names, size, parts)), 0)
            allowed = f"at most {smaller}" if smaller else "none, because the matrix is too small"
            fix = f"optimizer.moment_block={smaller}" if smaller else "optimizer.moments=bfloat16"
            axes_of_dim = column[names[dim]] if names[dim] in column else ()
            split = f"the mesh splits '{names[dim]}' of {path}, shape {shape}, into {parts[dim]} parts"
            problem = Problem(
                "optimizer.moment_block",
                got=f"{block}, but {split}, which do not divide its blocks evenly",
                allowed=allowed,
                nearest=fix,
                depends_on=[f"mesh.{axis}" for axis in axes_of_dim],
            )
            problems.setdefault(str(names[dim]), problem)
    return list(problems.values())


def _between(shape: Sequence[int], names: Names, block: int, parts: Sequence[int]) -> list[int]:
    """Returns the dims of a weight that the mesh splits evenly, but not at the boundaries between blocks.

    Dims that the mesh does not split evenly are reported by other checks.

    Args:
      shape: the weight's shape.
      names: the weight's logical axes.
      block: the number of elements of a block.
      parts: the number of shards along each dim.
    """
    extent = extents(shape, names, block)
    counts = num_blocks(shape, extent) if extent else ()
    dims = enumerate(zip(shape, counts, parts, strict=False))
    return [dim for dim, (size, count, part) in dims if size % part == 0 and count % part]


def store_moments(
    inner: optax.GradientTransformation, kind: str, block: int, logical_axes: NamesTree
) -> optax.GradientTransformation:
    """Wraps an optimizer so that it stores its moments in fewer bytes.

    A moment is an array of a weight's shape in the optimizer's state. With "8bit", moments of vectors, and of matrices
    whose dims have too few factors of two for a block (`eight_bits.extents`), are stored in float32.

    Args:
      inner: an optimizer whose moments are float32 and initially zero.
      kind: "bfloat16" or "8bit"; with "float32" `inner` itself is returned.
      block: the number of elements of a block of 8-bit codes.
      logical_axes: a pytree with the structure of the parameters: a tuple of logical axes for each parameter.
    """
    if kind == FLOAT32:
        return inner
    axes = dict(jax.tree_util.tree_leaves_with_path(logical_axes, is_leaf=is_names))

    def packed(state: Arrays, params: Arrays, num_updates: jax.Array) -> StoredMoments:
        shapes = {path: leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
        key = _key(SEED, num_updates)
        leaves, structure = jax.tree_util.tree_flatten_with_path(state)
        arrays, scales = list[jax.Array](), list[jax.Array | optax.MaskedNode]()
        for index, ((path, leaf), owner) in enumerate(zip(leaves, owners(state, params), strict=True)):
            array, scale = leaf, optax.MaskedNode()
            if owner is not None and shapes[owner] == leaf.shape:
                extent = extents(leaf.shape, axes[owner], block) if kind == EIGHT_BITS else None
                of_leaf = jax.random.fold_in(key, index)
                if extent is not None:
                    random = _random(of_leaf, leaf) if _is_second(path) else None
                    array, scale = encode(leaf, random, extent, is_signed=random is None)
                elif kind == BFLOAT16:
                    array = to_bfloat16(leaf, _random(of_leaf, leaf))
            arrays.append(array)
            scales.append(scale)
        return StoredMoments(num_updates, *(jax.tree.unflatten(structure, part) for part in (arrays, scales)))

    def init(params: Arrays) -> StoredMoments:
        state, count = inner.init(params), jnp.zeros((), jnp.int32)
        like = jax.eval_shape(packed, state, params, count)
        # Moments are initially zero, and so are their codes and scales.
        kept = jax.tree.map(
            lambda x, of: x if x.dtype == of.dtype else jnp.zeros(of.shape, of.dtype), state, like.inner
        )
        return StoredMoments(count, kept, jax.tree.map(lambda of: jnp.zeros(of.shape, of.dtype), like.scales))

    def update(gradients: Arrays, state: StoredMoments, params: Arrays = None) -> tuple[Arrays, StoredMoments]:
        assert params is not None, "the parameters determine which arrays are moments: pass them to update"
        updates, after = inner.update(gradients, _unpack(state), params)
        return updates, packed(after, params, optax.safe_increment(state.num_updates))

    return optax.GradientTransformation(init, update)


def _unpack(state: StoredMoments) -> Arrays:
    """Returns the state of the wrapped optimizer, with all moments decoded to float32."""
    scales = dict(jax.tree_util.tree_leaves_with_path(state.scales))

    def one(path: KeyPath, leaf: jax.Array) -> jax.Array:
        if path in scales:
            return decode(leaf, scales[path])
        return leaf.astype(jnp.float32) if leaf.dtype == jnp.bfloat16 else leaf

    return jax.tree_util.tree_map_with_path(one, state.inner)


def round_weights(weights: Arrays, stored: Arrays, num_updates: jax.Array, seed: int = WEIGHTS_SEED) -> Arrays:
    """Returns updated weights in the dtypes of the stored weights; rounding to bfloat16 is stochastic.

    With rounding to nearest, a weight of 1 would ignore each update below 2^-9, half the distance to the next smaller
    number.

    Args:
      weights: a pytree of float32 arrays, the weights after the update.
      stored: the weights before the update, in the dtypes in which they are stored.
      num_updates: int32 scalar, the number of updates done; random bits depend on it.
      seed: an int constant; calls with different constants use independent random bits.
    """
    key = _key(seed, num_updates)
    leaves, structure = jax.tree.flatten(weights)
    rounded = []
    for index, (new, old) in enumerate(zip(leaves, jax.tree.leaves(stored), strict=True)):
        in_bfloat16 = old.dtype == jnp.bfloat16
        random = _random(jax.random.fold_in(key, index), new) if in_bfloat16 else None
        rounded.append(new.astype(old.dtype) if random is None else to_bfloat16(new, random))
    return jax.tree.unflatten(structure, rounded)


def _key(seed: int, num_updates: jax.Array) -> jax.Array:
    return jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), num_updates)


def _random(key: jax.Array, like: jax.Array) -> jax.Array:
    """Returns 16 random bits for each element of `like`, a function of the key and the element's row-major index."""
    return jax.random.bits(key, like.shape, jnp.uint16)


def to_bfloat16(x: jax.Array, random: jax.Array) -> jax.Array:
    """Rounds float32 numbers to bfloat16, up or down at random so that the mean is exact.

    Args:
      x: a float32 array.
      random: random bits, uint16 in the shape of `x`.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    # bfloat16 is the upper half of a float32. If random bits are added to the lower half, the sum carries into the
    # upper half with the probability that makes the mean exact.
    rounded = (bits + random.astype(jnp.uint32)) & jnp.uint32(0xFFFF0000)
    exact = jax.lax.bitcast_convert_type(rounded, jnp.float32)
    return jnp.where(jnp.isfinite(x), exact, x).astype(jnp.bfloat16)


def _is_second(path: KeyPath) -> bool:
    return any(isinstance(key, jax.tree_util.GetAttrKey) and key.name == SECOND_MOMENT for key in path)
