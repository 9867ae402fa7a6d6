"""Computes the rows of one device's experts in parts, with the memory and time of an even load, and drops no row.

The worst load is many times the even load if devices share the experts. Products skip blocks without rows; reading
rows, gating them and summing them do not. So a device computes a first part of `ROOM` times its even load. Further rows
are computed in further parts, one after the other, in a loop that an even load never enters. Each device decides
separately how often its loop runs, and nothing inside the loop communicates. For the first part, `remat.policy`
determines what is saved for the backward pass. For further parts nothing is saved and everything is recomputed, so that
memory does not depend on the load.

Rows are permuted by reading, also in the transposes, because kernels that write would add rows in any order.

t: tokens of the devices that share the experts, k: experts per token, E: experts, e: experts on one device, m: rows per
block, R: rows of a part, P: parts of the worst load, D: embed dim, F: expert dim.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from meshtrain.models.layers import GATES, A, B
from meshtrain.models.moe import grouped_matmul
from meshtrain.models.moe.grouped_matmul import Stack
from meshtrain.models.remat import EXPERT_UP
from meshtrain.sharding.trees import Arrays

ROOM = 1.25  # rows of a part over rows of an even load
LEAST_ROWS, MOST_ROWS = 16, 128  # of a block
LEAST_ROWS_OF_TURN = 4096  # mean rows per expert; with fewer, planned steps were slower in two turns
# Name scopes, see `Cost.shares`: the choices of all tokens that have a row on this device; the loop over further parts.
CHOICES, FURTHER = "choices_with_rows", "further_parts"
Sums = TypeVar("Sums")
Matrices = Mapping[str, jax.Array]
Stacks = Mapping[str, Stack]


class Parts(NamedTuple):
    """How the rows of one device's experts are split into parts.

    Attributes:
      block_rows: m.
      num_blocks: of a part.
      num_parts: P.
    """

    block_rows: int
    num_blocks: int
    num_parts: int

    @classmethod
    def of(cls, num_tokens: int, num_chosen: int, num_here: int, num_experts: int) -> "Parts":
        """Returns the parts of t tokens with k choices each, on a device with e of E experts.

        >>> Parts.of(4096, 2, 1, 8), Parts.of(4096, 2, 8, 8)
        (Parts(block_rows=128, num_blocks=11, num_parts=3), Parts(block_rows=128, num_blocks=72, num_parts=1))
        """
        even = num_tokens * num_chosen * num_here / num_experts
        rows = block_rows(round(even), num_here)
        most = -(-num_tokens * min(num_chosen, num_here) // rows) + num_here
        num_blocks = min(most, math.ceil(ROOM * even / rows) + num_here)
        return cls(rows, num_blocks, -(-most // num_blocks))

    @property
    def num_rows(self) -> int:
        """R, the rows of a part."""
        return self.num_blocks * self.block_rows


def block_rows(num_choices: int, num_experts: int) -> int:
    """Returns m: about half of an expert's mean rows, so that padding stays below a half, within the kernels' bounds.

    >>> block_rows(64, 8), block_rows(1024, 8), block_rows(2**20, 64)
    (16, 64, 128)
    """
    mean = max(1, num_choices // num_experts)
    return min(MOST_ROWS, max(LEAST_ROWS, 2 ** (mean.bit_length() - 2) if mean > 1 else 1))


def num_turns(num_tokens: int, num_sharing: int, num_chosen: int, num_experts: int) -> int:
    """Returns in how many turns a device's tokens are processed: 2 if devices share experts and there are enough rows.

    The communication of one turn does not depend on the products of the other, so they overlap. Each turn pads separate
    blocks.

    >>> num_turns(16384, 8, 8, 128), num_turns(16384, 1, 8, 128), num_turns(8192, 8, 8, 128), num_turns(4095, 8, 2, 8)
    (2, 1, 1, 1)

    Args:
      num_tokens: of a device.
      num_sharing: devices that share experts.
      num_chosen: k.
      num_experts: E.
    """
    rows = num_tokens * num_sharing * num_chosen / num_experts
    return 2 if num_sharing > 1 and num_tokens % 2 == 0 and rows >= 2 * LEAST_ROWS_OF_TURN else 1


class Index(NamedTuple):
    """The assignment of tokens and choices to the rows of all P parts.

    Attributes:
      choices: int32 [P R], the choice in each row, t k for padding.
      tokens: int32 [P R], its token, t for padding.
      places: int32 [t, k], the row of each choice; P R: it has no row on this device.
      owners: int32 [P R / m], the expert of each block, ascending; e: the block has no rows.
    """

    choices: jax.Array
    tokens: jax.Array
    places: jax.Array
    owners: jax.Array


def arrange_rows(cut: Parts, chosen: jax.Array, num_here: int) -> Index:
    """Assigns rows to the choices of one device's experts.

    Args:
      cut: the split into parts.
      chosen: int32 [t, k], distinct within each row, from 0 to e; e is an expert of another device.
      num_here: e.
    """
    flat, num_choices = chosen.reshape(-1), chosen.size
    kept = jnp.arange(num_choices, dtype=jnp.int32)
    if (most := chosen.shape[0] * min(chosen.shape[1], num_here)) < num_choices:
        kept = jnp.argsort(flat == num_here, stable=True)[:most].astype(jnp.int32)
    found = grouped_matmul.arrange_blocks(flat[kept], num_here, cut.block_rows)
    more = cut.num_parts * cut.num_blocks - found.owners.size
    owners = jnp.pad(found.owners, (0, more), constant_values=num_here)
    choices = jnp.take(kept, found.rows, mode="fill", fill_value=num_choices)
    choices = jnp.pad(choices, (0, more * cut.block_rows), constant_values=num_choices)
    num_rows = choices.size
    # Padding rows write to the last element, which is dropped.
    places = jnp.full(num_choices + 1, num_rows, jnp.int32).at[choices].set(jnp.arange(num_rows, dtype=jnp.int32))
    return Index(choices, choices // chosen.shape[1], places[:-1].reshape(chosen.shape), owners)


def num_used(cut: Parts, index: Index, num_here: int) -> jax.Array:
    """Returns the number of parts that have rows, an int32 scalar; blocks with rows come first."""
    return jnp.sum(index.owners[:: cut.num_blocks] < num_here, dtype=jnp.int32)


class How(NamedTuple):
    """How rows are computed.

    Attributes:
      cut: the split into parts.
      activation: one of `layers.GATES`.
      platform: of the devices, which determines the kernel of products.
    """

    cut: Parts
    activation: str
    platform: str


def results(how: How, x: jax.Array, gates: jax.Array, matrices: Matrices, index: Index, stacks: Stacks) -> jax.Array:
    """Returns the sum of the results of this device's experts for each token, [t, D].

    Args:
      how: rows are computed.
      x: [t, D].
      gates: float32 [t k], of each choice.
      matrices: `up` and `gate` [e, D, F], `down` [e, F, D], factors of their adapters, and biases [e, F] and [e, D].
      index: of the rows.
      stacks: name -> stack of the matrices of all layers, for some of `up`, `gate` and `down`.
    """
    return _results(how, x, gates, dict(matrices), index, dict(stacks))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _results(how: How, x: jax.Array, gates: jax.Array, matrices: Matrices, index: Index, stacks: Stacks) -> jax.Array:
    return _forward(how, x, gates, matrices, index, stacks)[0]


def _forward(
    how: How, x: jax.Array, gates: jax.Array, matrices: Matrices, index: Index, stacks: Stacks
) -> tuple[jax.Array, Arrays]:
    first, pullback = jax.vjp(functools.partial(_of_part, how, index, stacks, 0), x, gates, matrices)
    of_part = lambda number: _of_part(how, index, stacks, number, x, gates, matrices)  # noqa: E731
    return _with_further(how, index, matrices, of_part, first), (pullback, x, gates, matrices, index, stacks)


def _backward(how: How, kept: Arrays, cotangent: jax.Array) -> tuple[jax.Array, jax.Array, Matrices, None, None]:
    pullback, x, gates, matrices, index, stacks = kept

    def of_part(number: jax.Array) -> tuple[jax.Array, jax.Array, Matrices]:
        part = functools.partial(_of_part, how, index, stacks, number)
        result: Arrays = jax.vjp(part, x, gates, matrices)[1](cotangent)
        return result

    of_x, of_gates, of_matrices = pullback(cotangent)
    # Two loops, so that the cotangent of x can be sent before the weights' cotangents are computed.
    of_x = _with_further(how, index, matrices, lambda number: of_part(number)[0], of_x)
    others = _with_further(how, index, matrices, lambda number: of_part(number)[1:], (of_gates, of_matrices))
    return (of_x, *others, None, None)


_results.defvjp(_forward, _backward)


def _with_further(
    how: How, index: Index, matrices: Matrices, of_part: Callable[[jax.Array], Sums], first: Sums
) -> Sums:
    """Returns the sum over all parts that have rows, given the result of the first part."""
    if how.cut.num_parts == 1:
        return first
    # A loop updates its sums in place; a conditional would copy them.
    with jax.named_scope(FURTHER):
        return jax.lax.fori_loop(
            jnp.int32(1),
            num_used(how.cut, index, matrices["up"].shape[0]),
            lambda number, sums: jax.tree.map(jnp.add, sums, of_part(number)),
            first,
        )


def _of_part(
    how: How, index: Index, stacks: Stacks, number: int | jax.Array, x: jax.Array, gates: jax.Array, matrices: Matrices
) -> jax.Array:
    """Returns the sum of the results of one part's rows for each token, [t, D]."""
    cut = how.cut
    start = number * cut.num_rows
    here = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=cut.num_rows)
    choices, tokens = here(index.choices), here(index.tokens)
    owners = jax.lax.dynamic_slice_in_dim(index.owners, number * cut.num_blocks, cut.num_blocks)
    places = index.places - start
    places = jnp.where((places >= 0) & (places < cut.num_rows), places, cut.num_rows)
    rows = spread(x, tokens, places)
    gate = jnp.take(gates, choices, mode="fill", fill_value=0)

    def times(rows: jax.Array, name: str) -> jax.Array:
        return grouped_matmul.product(rows, matrices[name], owners, stacks.get(name), platform=how.platform)

    hot = jax.nn.one_hot(owners, matrices["up"].shape[0], dtype=rows.dtype)

    def of_owner(bias: jax.Array) -> jax.Array:
        # A product, because its transpose sums in a fixed order.
        return jnp.repeat(jnp.dot(hot, bias, precision=jax.lax.Precision.HIGHEST), cut.block_rows, axis=0)

    return sum_rows(of_rows(how.activation, rows, gate, matrices, times, of_owner), tokens, places)


def of_rows(
    activation: str,
    rows: jax.Array,
    gate: jax.Array,
    matrices: Matrices,
    product: Callable[..., jax.Array],
    of_owner: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """Returns the result of each row's expert, times the row's gate, [R, D].

    The gate multiplies the input of the last product. So the gate's cotangent does not need the result of this product,
    which the backward pass would otherwise recompute.

    Args:
      activation: one of `layers.GATES`.
      rows: [R, D].
      gate: float32 [R].
      matrices: see `results`.
      product: (rows, the name of a matrix of each expert) -> their products, see `grouped_matmul.product`.
      of_owner: a bias of each expert [e, F] -> the bias of each row [R, F].
    """

    def times(rows: jax.Array, name: str) -> jax.Array:
        result = product(rows, name)
        if name + A in matrices:
            result = result + product(product(rows, name + A), name + B)
        if (bias := f"{name}_bias") not in matrices:
            return result
        added = of_owner(matrices[bias])
        return result + (added if name != "down" else (added * gate[:, None]).astype(added.dtype))

    up, gated = (checkpoint_name(times(rows, name), EXPERT_UP) for name in ("up", "gate"))
    inner = GATES[activation](gated, up).astype(jnp.float32) * gate[:, None]
    return times(inner.astype(rows.dtype), "down")


# The next two functions are transposes of each other.
@jax.custom_vjp
def spread(x: jax.Array, tokens: jax.Array, places: jax.Array) -> jax.Array:
    """Returns the activations of each row's token, [R, D], zeros for padding.

    Args:
      x: [t, D].
      tokens: int32 [R], the token of each row, t for padding.
      places: int32 [t, k], the row of each choice; R: it has none.
    """
    return jnp.take(x, tokens, axis=0, mode="fill", fill_value=0)


@jax.custom_vjp
def sum_rows(rows: jax.Array, tokens: jax.Array, places: jax.Array) -> jax.Array:
    """Returns the sum of each token's rows, [t, D], computed in float32.

    Args:
      rows: [R, D].
      tokens: as in `spread`.
      places: as in `spread`.
    """
    with jax.named_scope(CHOICES):
        of_choices = jnp.take(rows, places, axis=0, mode="fill", fill_value=0)
        return jnp.sum(of_choices, axis=1, dtype=jnp.float32).astype(rows.dtype)


def _of_spread(indices: tuple[jax.Array, jax.Array], cotangent: jax.Array) -> tuple[jax.Array, None, None]:
    return sum_rows(cotangent, *indices), None, None


def _of_collected(indices: tuple[jax.Array, jax.Array], cotangent: jax.Array) -> tuple[jax.Array, None, None]:
    return spread(cotangent, *indices), None, None


spread.defvjp(lambda x, *indices: (spread(x, *indices), indices), _of_spread)
sum_rows.defvjp(lambda rows, *indices: (sum_rows(rows, *indices), indices), _of_collected)
