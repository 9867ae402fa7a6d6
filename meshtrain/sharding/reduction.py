"""Defines `Reduction`: a custom reduction of gradients over the data axis, in place of the built-in sum.

`reduction.name` names a function (options, dtype) -> `Reduction`. The function may have two attributes. `options` is a
frozen dataclass, whose fields become options under `config.reduction`. `check` is a function (config, mesh_shape) -> an
error line for each problem.

n: replicas of the data axis.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from meshtrain.options import WITH_OPTIONS, option
from meshtrain.sharding.trees import Arrays
from meshtrain.user_functions import FORM, plugin_names

KEY = "reduction.name"
SUM = "sum"  # the built-in sum, which reduces the layers of a loop inside its backward pass (`gradients.py`)
NAMES = (SUM, *plugin_names(KEY))
# The largest share of the built-in sum's transfers that the backward pass hides, measured on a GPT with tied tables.
HIDDEN_SHARE = 0.58
MAX_LEVEL = 1  # the highest ZeRO level with a custom reduction: level 2 reduces the gradients of each microbatch

Dims: TypeAlias = Any  # a pytree of int: for each gradient the dim that data splits, from the end; 0: none
Extension: TypeAlias = Any  # `step.extension.Extension`, which this package does not know


@dataclasses.dataclass(frozen=True)
class ReductionOptions:
    """How gradients are reduced over the data axis; the options of a user's reduction are added to the same group."""

    name: str = option(
        SUM,
        f"how gradients are summed over the data axis: {', '.join(NAMES)}, or {FORM}",
        choices=NAMES,
        names=WITH_OPTIONS,
    )


def sum_over(x: jax.Array, over: str, dim: int) -> jax.Array:
    """Returns the sum of an array over a manual axis: the full sum, or this device's shard of the sum along `dim`.

    Args:
      x: this device's array, in the dtype that is sent.
      over: the name of the manual axis.
      dim: the dim to scatter, counted from the end (-1 is the last); 0: return the full sum.
    """
    if dim == 0:
        return jax.lax.psum(x, over)
    return jax.lax.psum_scatter(x, over, scatter_dimension=x.ndim + dim, tiled=True)


def nothing(shapes: Arrays) -> Arrays:
    """Returns `()`, the state of a reduction that saves no arrays from step to step."""
    return ()


def in_equal_parts(residual: Arrays, replicas: int) -> Arrays:
    """Returns the residuals of a reduction for another number of replicas: each gets an equal part of their sum.

    A checkpoint has a residual (unsent part of earlier gradient sums) for each replica of the run that saved it. Equal
    parts can be compressed with smaller scales than the complete sum on one replica.

    Args:
      residual: the saved residuals, a pytree of float32 [saved replicas, ...].
      replicas: the current number of replicas n; the result is a pytree of [n, ...].
    """
    share = lambda leaf: jnp.broadcast_to(jnp.sum(leaf, axis=0) / replicas, (replicas, *leaf.shape[1:]))  # noqa: E731
    return jax.tree.map(share, residual)


def no_advice(replicas: int, is_scattered: bool) -> list[tuple[str, str]]:
    """Returns [], no reason to choose another reduction; the default of `Reduction.advice`."""
    return []


@dataclasses.dataclass(frozen=True)
class Transfers:
    """The transfers of the built-in sum on one device in a step, for advice on whether another reduction is faster.

    Attributes:
      num_replicas: number of replicas n.
      reduced: number of gradient elements that are all-reduced.
      scattered: number of gradient elements that are reduce-scattered.
      itemsize: bytes of an element in the dtype that is sent.
      wire_bytes_per_second: bandwidth of a device over the data axis.
      memory_bytes_per_second: bandwidth of a device's memory.
      backward_seconds: duration of the backward pass of one microbatch, which hides a part of the transfers.
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
      update: a function (gradients, state, over, scattered) -> (gradient sums over replicas, state of the next step).
        It is traced in a region in which all mesh axes are manual, for any number of replicas, including 1. `gradients`
        is a pytree of this device's float32 shards, the gradients of the mean loss. `state` has the structure of the
        gradients, or is `()`. `over` is the name of the data axis. `scattered` is a pytree with an int for each
        gradient: the dim, counted from the end (-1 is the last), along which each replica gets its shard of the sum. 0
        means that each replica gets the full sum, which must be bitwise the same on all replicas.
      sent_bytes: a function (elements, replicas, is_scattered) -> the bytes that a device sends in a step for this
        number of gradient elements, without padding.
      init: a function of the gradients' shapes. If each replica saves a float32 array for each gradient from step to
        step, it returns the same shapes, else `()`. The arrays start as zeros and are saved in checkpoints.
      reshard: a function (state [saved replicas, ...], replicas) -> the state for this number of replicas.
      extension: a function (reduction, the task on its mesh) -> `Extension`, if the reduction changes more of the step
        than the sum; else None.
      moved_bytes: bytes of device memory that compressing one element reads and writes, for the advice of `plan`.
      advice: a function (replicas, is_scattered) -> a list of (what is wrong, which option to change), one for each
        reason to choose another reduction, except the reason in `slower_than_sum`.
      unread: dotted keys of options that the built-in sum reads, and this reduction does not.
      name: the value of `reduction.name` that selects it.
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
        """Returns [(what is wrong, option to change)] if compressing takes longer than the saved transfers, else [].

        The built-in sum reduces gradients of layers in the backward pass of the last microbatch, which hides a part of
        its transfers. Any other reduction sends after the backward pass, so it saves no time on the hidden part.
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
            f"reduction.name={self.name} does not save time: at {speed / 1e9:.0f} GB/s over data it saves "
            f"{max(saved, 0) * 1e3:.3g} ms of transfers that the backward pass would not hide, and packing takes about "
            f"{packing * 1e3:.3g} ms"
        )
        return [(what, f"{KEY}={SUM}")]
