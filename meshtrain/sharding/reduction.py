"""How gradients cross the data axis, where a reduction of one's own takes the place of the built-in sum.

`reduction.name` names a function (options, dtype) -> `Reduction`. Its attribute `options`, if it has one, is a frozen
dataclass; the fields stand under `config.reduction`. It may have an attribute `check`, a function (config, mesh_shape)
-> one line for each problem.

n: replicas.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from meshtrain.options import FORM, WITH_OPTIONS, option, side_names
from meshtrain.sharding.trees import Arrays

KEY = "reduction.name"
SUM = "sum"  # built in: in the backward loop where there is one, see `gradients.py`
NAMES = (SUM, *side_names(KEY))
HIDDEN_SHARE = 0.58  # of uncompressed gradients, where the backward pass takes long enough; of a GPT with tied tables
MAX_LEVEL = 1  # of ZeRO with another reduction: higher levels reduce-scatter the gradients of each microbatch

Dims: TypeAlias = Any  # a tree of int like the gradients: the dim that data splits, from the end; 0: none
Extension: TypeAlias = Any  # `step.extension.Extension`, which this package does not know


@dataclasses.dataclass(frozen=True)
class ReductionOptions:
    """How gradients are reduced over data; a reduction's own options stand beside the name."""

    name: str = option(
        SUM,
        f"how gradients are summed over the data axis: {', '.join(NAMES)}, or {FORM}",
        choices=NAMES,
        names=WITH_OPTIONS,
    )


def summed(x: jax.Array, over: str, dim: int) -> jax.Array:
    """Returns the sum of an array over a manual axis: all of it for dim 0, else this device's shard along that dim.

    Args:
      x: this device's array, in the dtype that is sent.
      over: the axis.
      dim: counted from the end (-1 is the last); 0: none.
    """
    if dim == 0:
        return jax.lax.psum(x, over)
    return jax.lax.psum_scatter(x, over, scatter_dimension=x.ndim + dim, tiled=True)


def nothing(shapes: Arrays) -> Arrays:
    """Returns the residual of a reduction that sends everything."""
    return ()


def in_equal_parts(residual: Arrays, replicas: int) -> Arrays:
    """Returns residuals for another number of replicas: each gets the same part of their sum.

    Equal parts are packed with smaller scales than the whole in one place.

    Args:
      residual: a tree of float32 [saved replicas, ...].
      replicas: n, of today.
    """
    share = lambda leaf: jnp.broadcast_to(jnp.sum(leaf, axis=0) / replicas, (replicas, *leaf.shape[1:]))  # noqa: E731
    return jax.tree.map(share, residual)


def no_advice(replicas: int, is_scattered: bool) -> list[tuple[str, str]]:
    """Returns the advice of a reduction that has none."""
    return []


@dataclasses.dataclass(frozen=True)
class Transfers:
    """What the built-in sum would send in a step from a device, and how fast; for the advice on a reduction.

    Attributes:
      num_replicas: n.
      reduced: elements of gradients that are all-reduced.
      scattered: elements of gradients that are reduce-scattered.
      itemsize: bytes of an element.
      wire_bytes_per_second: of a device over data.
      memory_bytes_per_second: of a device.
      backward_seconds: of one microbatch, whose computation hides a part of the transfers.
    """

    num_replicas: int
    reduced: int
    scattered: int
    itemsize: int
    wire_bytes_per_second: float
    memory_bytes_per_second: float
    backward_seconds: float


@dataclasses.dataclass(frozen=True)
class Reduction:
    """A reduction of gradients over the replicas of the data axis, once a step, at ZeRO levels 0 and 1.

    Attributes:
      update: (gradients, state, over, scattered) -> (their sums over replicas, the state of the next step). It is
        traced where all axes are manual, for any number of replicas, 1 among them. `gradients` is a tree of this
        device's float32 shards, of the mean loss; `state` is like them, or `()`; `over` is the axis. `scattered` is
        a tree of int: 0 where each replica gets the whole sum, which has to be bitwise the same on all; otherwise the
        dim, counted from the end (-1 is the last), along which each replica gets its shard of the sum.
      sent_bytes: (elements, replicas, is_scattered) -> the bytes that a device sends in a step for that many elements
        of its gradients, without padding.
      init: (shapes of the gradients) -> those shapes if each replica keeps a float32 array for each gradient from
        step to step, `()` if not. It is zeros at first, and a part of checkpoints.
      reshard: (state [saved replicas, ...], replicas) -> the same for another number of replicas.
      extension: (reduction, the task on its mesh) -> `Extension`, where it changes more than the sum; else None.
      moved_bytes: of a device's memory that packing an element reads and writes, for the advice of `plan`.
      advice: (replicas, is_scattered) -> (what, change) for each reason of its own to choose another reduction.
      unread: dotted keys of options that the built-in sum reads, and this reduction does not.
      name: by which the configuration names it.
    """

    update: Callable[[Arrays, Arrays, str, Dims], tuple[Arrays, Arrays]]
    sent_bytes: Callable[[float, int, bool], float]
    init: Callable[[Arrays], Arrays] = nothing
    reshard: Callable[[Arrays, int], Arrays] = in_equal_parts
    extension: Callable[..., Extension] | None = None
    moved_bytes: float = 0.0
    advice: Callable[[int, bool], list[tuple[str, str]]] = no_advice
    unread: tuple[str, ...] = ()
    name: str = SUM

    def slower_than_sum(self, transfers: Transfers) -> list[tuple[str, str]]:
        """Returns (what, change) if packing takes longer than the transfers that it saves.

        The built-in sum reduces gradients of layers in the backward pass of the last microbatch, which hides a part of
        them. Another reduction sends after the backward pass, so it saves nothing of what was hidden.
        """
        n, reduced, scattered = transfers.num_replicas, transfers.reduced, transfers.scattered
        speed = transfers.wire_bytes_per_second
        plain = transfers.itemsize * (n - 1) / n * (2 * reduced + scattered) / speed
        sent = self.sent_bytes(reduced, n, False) + self.sent_bytes(scattered, n, True)
        saved = plain - min(HIDDEN_SHARE * plain, transfers.backward_seconds) - sent / speed
        packing = self.moved_bytes * (reduced + scattered) / transfers.memory_bytes_per_second
        if saved >= packing:
            return []
        what = (
            f"reduction.name={self.name} does not pay: at {speed / 1e9:.0f} GB/s over data it saves "
            f"{max(saved, 0) * 1e3:.3g} ms of transfers that the backward pass would not hide, and packing takes about "
            f"{packing * 1e3:.3g} ms"
        )
        return [(what, f"{KEY}={SUM}")]
