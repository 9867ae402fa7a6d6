"""Computes the rows of one device's experts in parts, with the memory and time of an even load, and drops no row.

A choice is an expert chosen by a token. A row contains the activations for one choice, or padding. A block is m rows of
one expert. A part is a fixed number of blocks that are computed together.

The worst load is many times the even load if devices share the experts. Products skip blocks without rows, but reading
rows, gating them and summing them take time for all rows. So a device computes a first part with `ROOM` times the rows
of an even load. Further rows are computed in further parts, one after the other, in a loop that an even load never
enters. Each device decides separately how often its loop runs, and no operation inside the loop communicates. For the
first part, `remat.policy` determines the activations that are saved for the backward pass. Further parts save nothing
and are recomputed, so that memory does not depend on the load.

Rows are permuted by gathers, also in the transposes, because scatters would add rows in any order.

t: tokens of the devices that share the experts, k: experts per token, E: experts, e: experts on one device, m: rows per
block, R: rows of a part, P: parts of the worst load, D: embed dim, F: expert dim.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from meshtrain.hardware.accelerators import Capability
from meshtrain.models.layers import GATES, A, B
from meshtrain.models.moe import grouped_matmul
from meshtrain.models.moe.grouped_matmul import Stack
from meshtrain.models.remat import EXPERT_UP
from meshtrain.sharding.saved import mark, value_and_pullback
from meshtrain.sharding.trees import Arrays

ROOM = 1.25  # rows of a part divided by the rows of an even load
LEAST_ROWS, MOST_ROWS = 16, 128  # bounds of the rows in a block
LEAST_ROWS_OF_TURN = 4096  # minimum mean rows per expert in a turn; planned steps with fewer were slower in two turns
# Name scopes, see `Cost.shares`: the choices of all tokens that have a row on this device; the loop over further parts.
CHOICES, FURTHER = "choices_with_rows", "further_parts"
Sums = TypeVar("Sums")
Matrices = Mapping[str, jax.Array]
Stacks = Mapping[str, Stack]


class Parts(NamedTuple):
    """The split of the rows of one device's experts into parts (blocks of rows that are computed together).

    Attributes:
      block_rows: number of rows in a block, m.
      num_blocks: number of blocks in a part.
      num_parts: number of parts that the worst load needs, P.
    """

    block_rows: int
    num_blocks: int
    num_parts: int

    @classmethod
    def of(cls, num_tokens: int, num_chosen: int, num_here: int, num_experts: int) -> "Parts":
        """Returns the split into parts, given the numbers of tokens and experts.

        >>> Parts.of(4096, 2, 1, 8), Parts.of(4096, 2, 8, 8)
        (Parts(block_rows=128, num_blocks=11, num_parts=3), Parts(block_rows=128, num_blocks=72, num_parts=1))

        Args:
          num_tokens: number of tokens of all devices that share the experts, t.
          num_chosen: number of experts per token, k.
          num_here: number of experts on one device, e.
          num_experts: number of all experts, E.
        """
        even = num_tokens * num_chosen * num_here / num_experts
        rows = block_rows(round(even), num_here)
        most = -(-num_tokens * min(num_chosen, num_here) // rows) + num_here
        num_blocks = min(most, math.ceil(ROOM * even / rows) + num_here)
        return cls(rows, num_blocks, -(-most // num_blocks))

    @property
    def num_rows(self) -> int:
        """The number of rows in a part, R."""
        return self.num_blocks * self.block_rows


def block_rows(num_choices: int, num_experts: int) -> int:
    """Returns the number of rows in a block: a power of two from 16 to 128, at most half of the mean rows of an expert.

    Thus padding is less than half of the rows on average, unless the minimum of 16 rows applies.

    >>> block_rows(64, 8), block_rows(1024, 8), block_rows(2**20, 64)
    (16, 64, 128)

    Args:
      num_choices: mean number of choices (tokens times experts per token) for all `num_experts` experts.
      num_experts: number of experts that share these choices.
    """
    mean = max(1, num_choices // num_experts)
    return min(MOST_ROWS, max(LEAST_ROWS, 2 ** (mean.bit_length() - 2) if mean > 1 else 1))


def num_turns(num_tokens: int, num_sharing: int, num_chosen: int, num_experts: int) -> int:
    """Returns the number of turns (equal groups of tokens, one after the other) in which a device processes its tokens.

    There are 2 turns if devices share experts and each turn has enough rows, otherwise 1. The communication of one turn
    does not depend on the products of the other turn, so communication and products overlap. Each turn pads its blocks,
    so 2 turns have more padding.

    >>> num_turns(16384, 8, 8, 128), num_turns(16384, 1, 8, 128), num_turns(8192, 8, 8, 128), num_turns(4095, 8, 2, 8)
    (2, 1, 1, 1)

    Args:
      num_tokens: number of tokens on a device.
      num_sharing: number of devices that share the experts, each with different tokens.
      num_chosen: number of experts per token, k.
      num_experts: number of experts, E.
    """
    rows = num_tokens * num_sharing * num_chosen / num_experts
    return 2 if num_sharing > 1 and num_tokens % 2 == 0 and rows >= 2 * LEAST_ROWS_OF_TURN else 1


class Index(NamedTuple):
    """The assignment of tokens and their choices (chosen experts) to rows; a row is computed by one expert.

    t: tokens, k: experts per token, e: experts on this device, P: parts, R: rows of a part, m: rows of a block.

    Attributes:
      choices: int32 [P R], the choice in each row: k times its token plus its rank among the token's experts; t k for
        padding.
      tokens: int32 [P R], the token in each row; t for padding.
      places: int32 [t, k], the row of each choice; P R if the choice has no row on this device.
      owners: int32 [P R / m], the expert of each block, ascending; e for a block without rows.
    """

    choices: jax.Array
    tokens: jax.Array
    places: jax.Array
    owners: jax.Array


def arrange_rows(cut: Parts, chosen: jax.Array, num_here: int) -> Index:
    """Returns the assignment of the tokens that chose one device's experts to rows, sorted by expert.

    Args:
      cut: the split of rows into parts.
      chosen: int32 [t, k], the k experts of each of t tokens, from 0 to e. A token's experts on this device are
        distinct; e means an expert of another device.
      num_here: number of experts on this device, e.
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
    """Returns the number of parts that have rows, an int32 scalar; the last parts may be empty.

    Args:
      cut: the split of rows into parts.
      index: the assignment of tokens to rows; blocks without rows are the last blocks.
      num_here: number of experts on this device, e.
    """
    return jnp.sum(index.owners[:: cut.num_blocks] < num_here, dtype=jnp.int32)


class How(NamedTuple):
    """The static settings of the experts' computation.

    Attributes:
      cut: the split of rows into parts.
      activation: name of a gated activation function in `layers.GATES`.
      platform: platform of the devices as JAX names it, which determines the kernel for products.
      capability: compute capability of the GPUs, see `Placement.compute_capability`; None: unknown, or no GPUs.
    """

    cut: Parts
    activation: str
    platform: str
    capability: Capability | None = None


def results(how: How, x: jax.Array, gates: jax.Array, matrices: Matrices, index: Index, stacks: Stacks) -> jax.Array:
    """Returns the gated sum of the results of this device's experts for each token, [t, D].

    t: tokens, k: experts per token, e: experts on this device, D: embed dim, F: inner dim of an expert.

    Args:
      how: static settings: parts, activation function and platform.
      x: activations of the tokens, [t, D].
      gates: factor of each choice's result, float32 [t k].
      matrices: `up` and `gate` [e, D, F], `down` [e, F, D], factors of their adapters, and biases [e, F] and [e, D].
      index: assignment of tokens to rows, from `arrange_rows`.
      stacks: name of a matrix (`up`, `gate` or `down`) -> the matrix of all layers in one array (`Stack`), from which a
        GPU kernel reads this layer. A matrix without an entry is read from `matrices`.
    """
    given = x, gates, dict(matrices)
    first, pullback = value_and_pullback(functools.partial(_of_part, how, index, dict(stacks), 0), *given)
    result: jax.Array = _results(how, *given, index, dict(stacks), first, pullback)
    return result


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _results(
    how: How,
    x: jax.Array,
    gates: jax.Array,
    matrices: Matrices,
    index: Index,
    stacks: Stacks,
    first: jax.Array,
    pullback: Arrays,
) -> jax.Array:
    """Returns the gated sum of the experts' results for each token, given the result of the first part.

    The other arguments are described in `results`.

    Args:
      first: the result of the first part, [t, D], computed outside of this function so that a remat policy can save
        values of this computation.
      pullback: the pullback of the first part, from `value_and_pullback`.
    """
    return _forward(how, x, gates, matrices, index, stacks, first, pullback)[0]


def _forward(
    how: How,
    x: jax.Array,
    gates: jax.Array,
    matrices: Matrices,
    index: Index,
    stacks: Stacks,
    first: jax.Array,
    pullback: Arrays,
) -> tuple[jax.Array, Arrays]:
    of_part = lambda number: _of_part(how, index, stacks, number, x, gates, matrices)  # noqa: E731
    return _with_further(how, index, matrices, of_part, first), (pullback, x, gates, matrices, index, stacks)


def _backward(how: How, kept: Arrays, cotangent: jax.Array) -> tuple[jax.Array | Matrices | None, ...]:
    pullback, x, gates, matrices, index, stacks = kept

    def of_part(number: jax.Array) -> tuple[jax.Array, jax.Array, Matrices]:
        part = functools.partial(_of_part, how, index, stacks, number)
        result: Arrays = jax.vjp(part, x, gates, matrices)[1](cotangent)
        return result

    of_x, of_gates, of_matrices = pullback(cotangent)
    # Two loops, so that the cotangent of x can be sent before the weights' cotangents are computed.
    of_x = _with_further(how, index, matrices, lambda number: of_part(number)[0], of_x)
    others = _with_further(how, index, matrices, lambda number: of_part(number)[1:], (of_gates, of_matrices))
    return (of_x, *others, None, None, None, None)


_results.defvjp(_forward, _backward)


def _with_further(
    how: How, index: Index, matrices: Matrices, of_part: Callable[[jax.Array], Sums], first: Sums
) -> Sums:
    """Returns the sum of the results of all parts that have rows.

    Args:
      how: static settings, with the split into parts.
      index: assignment of tokens to rows.
      matrices: the experts' matrices; only the number of experts is read.
      of_part: index of a part, int32 scalar -> result of the part, a pytree like `first`.
      first: result of part 0, which is always computed before the loop over further parts.
    """
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
    """Returns the gated sum of the experts' results for each of t tokens, [t, D], over the rows of one part only.

    A row contains the activations of a token for one of its experts, or padding. A part is a fixed number of rows.
    `number` is the index of the part; the other arguments are described in `results`.
    """
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
        return grouped_matmul.product(
            rows, matrices[name], owners, stacks.get(name), platform=how.platform, capability=how.capability
        )

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
    """Returns the result of each row's expert multiplied by the row's gate, [R, D].

    The gate multiplies the input of the last product. So the gate's cotangent does not need the result of this product,
    which the backward pass would otherwise recompute.

    R: rows, D: embed dim, F: inner dim of an expert, e: experts on this device.

    Args:
      activation: name of a gated activation function in `layers.GATES`.
      rows: activations, [R, D].
      gate: factor of each row's result, float32 [R].
      matrices: matrices and biases of the experts by name, see `results`.
      product: (rows, name of a matrix) -> products of the rows with this matrix of their experts.
      of_owner: biases of experts, [e, F] or [e, D] -> bias of each row's expert, [R, F] or [R, D].
    """

    def times(rows: jax.Array, name: str) -> jax.Array:
        result = product(rows, name)
        if name + A in matrices:
            result = result + product(product(rows, name + A), name + B)
        if (bias := f"{name}_bias") not in matrices:
            return result
        added = of_owner(matrices[bias])
        return result + (added if name != "down" else (added * gate[:, None]).astype(added.dtype))

    up, gated = (mark(times(rows, name), EXPERT_UP) for name in ("up", "gate"))
    inner = GATES[activation](gated, up).astype(jnp.float32) * gate[:, None]
    return times(inner.astype(rows.dtype), "down")


# The next two functions are transposes of each other.
@jax.custom_vjp
def spread(x: jax.Array, tokens: jax.Array, places: jax.Array) -> jax.Array:
    """Copies the activations of each token to its rows, one row for each chosen expert: [R, D]; zeros for padding.

    t: tokens, k: experts per token, R: rows, D: embed dim.

    Args:
      x: activations of the tokens, [t, D].
      tokens: int32 [R], the token of each row; t for padding.
      places: int32 [t, k], the row of each choice, R without a row; used by the backward pass.
    """
    return jnp.take(x, tokens, axis=0, mode="fill", fill_value=0)


@jax.custom_vjp
def sum_rows(rows: jax.Array, tokens: jax.Array, places: jax.Array) -> jax.Array:
    """Returns the sum of each token's rows, [t, D], computed in float32 and rounded to the dtype of `rows`.

    t: tokens, k: experts per token, R: rows, D: embed dim.

    Args:
      rows: results of experts, one row for each choice of an expert by a token, [R, D].
      tokens: int32 [R], the token of each row, t for padding; used by the backward pass.
      places: int32 [t, k], the row of each choice; R for a choice without a row.
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
