"""Rows of tokens that go to the devices of their experts, and of results that come back: a ragged all-to-all.

n: devices that share the experts, t: tokens of one device, k: experts a token, e: experts of one device, D: embed dim,
r: rows that a device has room for.

A device sends one row for each choice, t k in all, sorted by the device that has the expert. What it gets stands in
the order of the choices of all devices. Each device knows all choices, so it computes where every other one reads and
writes. XLA has the operation for GPUs and TPUs; elsewhere all rows are gathered, and those for the device are read.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from meshtrain.models.implementation import GPU
from meshtrain.models.rows import collected, places_of, spread


def has_operation(platform: str) -> bool:
    """Returns whether XLA has a ragged all-to-all for a platform, which is named as JAX names it."""
    return platform in GPU or platform == "tpu"


class Way(NamedTuple):
    """What one device sends to each of n devices and gets from each, in rows: int32 [n] each.

    Attributes:
      reads: the first row that it sends to each device.
      sends: how many.
      writes: the first row in which each device gets them.
      gets: how many it gets from each device.
    """

    reads: jax.Array
    sends: jax.Array
    writes: jax.Array
    gets: jax.Array


def ways(chosen: jax.Array, num_devices: int, num_here: int, room: int, device: jax.Array | int) -> tuple[Way, Way]:
    """Returns what one device sends and gets: rows on their way to experts, and results on their way back.

    Args:
      chosen: int32 [n t, k], the choices of all devices.
      num_devices: n.
      num_here: e.
      room: r; the first choices get it.
      device: which of the n.
    """
    owners = (chosen // num_here).reshape(num_devices, -1)
    counts = jnp.sum(owners[:, :, None] == jnp.arange(num_devices), axis=1, dtype=jnp.int32)  # [from, to]
    at_source = jnp.cumsum(counts, axis=1) - counts
    ends = jnp.cumsum(counts, axis=0)
    writes = jnp.minimum(ends - counts, room)
    sizes = jnp.minimum(ends, room) - writes
    there = Way(at_source[device], sizes[device], writes[device], sizes[:, device])
    return there, Way(writes[:, device], sizes[:, device], at_source[:, device], sizes[device])


class How(NamedTuple):
    """How rows are sent.

    Attributes:
      axes: the mesh axes between whose devices.
      given: how many rows the array that is sent from has.
      result: how many rows that of what arrives has.
      has_operation: whether the platform has a ragged all-to-all.
    """

    axes: tuple[str, ...]
    given: int
    result: int
    has_operation: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def sent(how: How, rows: jax.Array, way: Way, back: Way) -> jax.Array:
    """Returns the rows that arrive, [`how.result`, D], zeros where none does.

    Args:
      how: to send.
      rows: [`how.given`, D].
      way: what is sent.
      back: the same in the other direction, which cotangents go.
    """
    if not how.has_operation:
        return _emulated(how, rows, way)
    empty = jnp.zeros((how.result, rows.shape[1]), rows.dtype)
    arrived: jax.Array = jax.lax.ragged_all_to_all(
        rows,
        empty,
        input_offsets=way.reads,
        send_sizes=way.sends,
        output_offsets=way.writes,
        recv_sizes=way.gets,
        axis_name=how.axes,
    )
    return arrived


def _emulated(how: How, rows: jax.Array, way: Way) -> jax.Array:
    """Returns what the operation does, by gathering all rows."""
    of_all = jax.lax.all_gather(rows, how.axes, axis=0, tiled=True)
    reads, writes = (jax.lax.all_to_all(x, how.axes, 0, 0, tiled=True) for x in (way.reads, way.writes))
    offset = jnp.arange(how.result) - writes[:, None]
    arrives = (offset >= 0) & (offset < way.gets[:, None])
    row = how.given * jnp.arange(reads.size)[:, None] + reads[:, None] + offset
    index = jnp.where(jnp.any(arrives, axis=0), jnp.sum(jnp.where(arrives, row, 0), axis=0), of_all.shape[0])
    return jnp.take(of_all, index, axis=0, mode="fill", fill_value=0)


def _forward(how: How, rows: jax.Array, way: Way, back: Way) -> tuple[jax.Array, tuple[Way, Way]]:
    return sent(how, rows, way, back), (way, back)


def _backward(how: How, ways: tuple[Way, Way], cotangent: jax.Array) -> tuple[jax.Array, None, None]:
    way, back = ways
    return sent(how._replace(given=how.result, result=how.given), cotangent, back, way), None, None


sent.defvjp(_forward, _backward)


class Exchange(NamedTuple):
    """Between the tokens of one device and the rows of its experts.

    Attributes:
      order: int32 [t k], the token of each row that is sent.
      places: int32 [t, k], the row of each choice.
      there: what is sent to experts.
      back: what is sent back.
      how: rows are sent to experts.
    """

    order: jax.Array
    places: jax.Array
    there: Way
    back: Way
    how: How

    def to_experts(self, x: jax.Array) -> jax.Array:
        """Returns the rows that arrive for the experts of this device, [r, D], of the tokens [t, D] of each device."""
        return sent(self.how, spread(x, self.order, self.places), self.there, self.back)

    def to_tokens(self, results: jax.Array) -> jax.Array:
        """Returns the sums of the results of each own token [t, D], of the rows [r, D] of each device."""
        how = self.how._replace(given=self.how.result, result=self.how.given)
        return collected(sent(how, results, self.back, self.there), self.order, self.places)


def exchange_of(
    own: jax.Array, chosen: jax.Array, num_here: int, room: int, axes: tuple[str, ...], has_operation: bool
) -> Exchange:
    """Returns the exchange between the devices along some axes.

    Args:
      own: int32 [t, k], the choices of this device's tokens.
      chosen: int32 [n t, k], those of all.
      num_here: e.
      room: r.
      axes: the mesh axes that split the experts.
      has_operation: see `How`.
    """
    there, back = ways(chosen, chosen.shape[0] // own.shape[0], num_here, room, jax.lax.axis_index(axes))
    choices = jnp.argsort(own.reshape(-1) // num_here, stable=True).astype(jnp.int32)
    places = places_of(choices, own.size).reshape(own.shape)
    return Exchange(choices // own.shape[1], places, there, back, How(axes, own.size, room, has_operation))


def arrivals(local: jax.Array, num_here: int, room: int, choices: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns which arrived row stands in each row of blocks, and where each stands: int32 [R], int32 [r, 1].

    Args:
      local: int32 [n t k], the choices of all devices; e: of an expert elsewhere.
      num_here: e.
      room: r.
      choices: int32 [R], the choice in each row of blocks, n t k for padding.
    """
    arrived = jnp.cumsum(local < num_here, dtype=jnp.int32) - 1
    found: jax.Array = jnp.take(arrived, choices, mode="fill", fill_value=room)
    return found, places_of(found, room)[:, None]
