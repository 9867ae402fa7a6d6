"""The benchmarked collectives as functions of a device's array, and their expected results computed with numpy.

E: elements of a device's array, n: devices along the axis; n divides E. Every function returns an array of its input's
shape, so that it can be repeated.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshtrain.hardware.links import RING

Function = Callable[[jax.Array], jax.Array]


def operation(name: str, axis: str, size: int, platform: str) -> Function:
    """Returns a collective along a manual axis as a function float32 [E] -> [E] of a device's E elements.

    In an all-gather, each device sends only part i of its n-part array, where i is its index on the axis. In a
    reduce-scatter, device i replaces part i of its array by the sum, and its other parts stay. XLA supports broadcast
    only on GPUs; elsewhere it is an all-reduce of the first device's array and zeros.

    Args:
      name: an element of `links.OPERATIONS`.
      axis: an axis of the mesh.
      size: the number of devices along the axis, n.
      platform: the value of `jax.Device.platform`, such as `gpu`.
    """
    right = [(i, (i + 1) % size) for i in range(size)]

    def own(x: jax.Array) -> jax.Array:
        return lax.dynamic_slice_in_dim(x, lax.axis_index(axis) * (x.size // size), x.size // size)

    def reduce_scatter(x: jax.Array) -> jax.Array:
        part = lax.psum_scatter(x, axis, tiled=True)
        return lax.dynamic_update_slice_in_dim(x, part, lax.axis_index(axis) * part.size, 0)

    def broadcast(x: jax.Array) -> jax.Array:
        if platform == "gpu":
            return lax.pbroadcast(x, (axis,), 0)  # a tuple, since pbroadcast would split a string into letters
        return lax.psum(jnp.where(lax.axis_index(axis) == 0, x, 0), axis)

    functions: dict[str, Function] = {
        "all-reduce": lambda x: lax.psum(x, axis),
        "all-gather": lambda x: lax.all_gather(own(x), axis, tiled=True),
        "reduce-scatter": reduce_scatter,
        "all-to-all": lambda x: lax.all_to_all(x.reshape(size, -1), axis, 0, 0, tiled=True).reshape(-1),
        "collective-permute": lambda x: lax.ppermute(x, axis, right),
        "collective-broadcast": broadcast,
        RING: lambda x: ring_all_reduce(x, axis, size),
    }
    return functions[name]


def ring_all_reduce(x: jax.Array, axis: str, size: int) -> jax.Array:
    """Returns the sum over a manual axis, by permutes to the next device (Patarasuk and Yuan 2009).

    The array of each device has n parts. In the first n - 1 hops each device adds its own part to the received part and
    sends the sum to the next device; then device i has the complete sum of part i + 1. In n - 1 more hops the complete
    sums are passed around the ring.

    Args:
      x: the array of this device, float32 [E]; `size` divides E. The sum has the same shape.
      axis: an axis of the mesh.
      size: the number of devices along the axis, n.
    """
    me, right = lax.axis_index(axis), [(i, (i + 1) % size) for i in range(size)]

    def add(hop: jax.Array, parts: jax.Array) -> jax.Array:
        received = lax.ppermute(parts[(me - hop) % size], axis, right)
        return parts.at[(me - hop - 1) % size].add(received)

    def pass_on(hop: jax.Array, parts: jax.Array) -> jax.Array:
        received = lax.ppermute(parts[(me + 1 - hop) % size], axis, right)
        return parts.at[(me - hop) % size].set(received)

    parts = lax.fori_loop(0, size - 1, add, x.reshape(size, -1))
    return lax.fori_loop(0, size - 1, pass_on, parts).reshape(-1)


def base(num_elements: int) -> np.ndarray:
    """Returns the array to which each device adds its `shift`, float32 [num_elements] of whole numbers (exact sums)."""
    return np.resize((np.arange(251) * 7 % 251).astype(np.float32), num_elements)


def shift(row: int) -> float:
    """Returns the number that a device adds to each element of `base`; sums over up to 5,000 devices are exact.

    Args:
      row: the index of the device in the mesh, in row-major order.
    """
    return float(3 * (row % 1021))


def expected(name: str, common: np.ndarray, rows: Sequence[int], mine: int) -> np.ndarray:
    """Returns the expected array of a device after one collective, computed with numpy.

    Args:
      name: an element of `links.OPERATIONS`.
      common: the common part of all arrays, `base(E)`, with the shape of the result, float32 [E]. Before the
        collective, the device with mesh index r has the array common + shift(r).
      rows: the mesh indices of the n devices of the group, in the order along the axis.
      mine: the device's index in the group.
    """
    size = len(rows)
    parts = common.reshape(size, -1)
    shifts = np.array([shift(row) for row in rows], np.float32)
    total = np.float32(size) * common + shifts.sum()
    if name in ("all-reduce", RING):
        return total
    if name == "all-gather":  # part j comes from device j
        return (parts + shifts[:, None]).reshape(-1)
    if name == "reduce-scatter":
        kept = parts + shifts[mine]
        kept[mine] = total.reshape(size, -1)[mine]
        return kept.reshape(-1)
    if name == "all-to-all":  # device j has sent the part with this device's index
        return (parts[mine] + shifts[:, None]).reshape(-1)
    source = {"collective-permute": (mine - 1) % size, "collective-broadcast": 0}[name]
    return common + shifts[source]
