"""Defines `Reduction`, with which a user's function replaces the built-in sum of gradients over the data axis.

`reduction.name` names a function (options, dtype) -> `Reduction`. The function may have two attributes. `options` is a
frozen dataclass, whose fields become options under `config.reduction`. `check` is a function (config, mesh_shape) -> an
error line for each problem.

n: replicas.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from meshtrain.options import FORM, WITH_OPTIONS, option, plugin_names
from meshtrain.sharding.trees import Arrays

KEY = "reduction.name"
SUM = "sum"  # built in: in the backward loop where there is one, see `gradients.py`
NAMES = (SUM, *plugin_names(KEY))
HIDDEN_SHARE = 0.58  # of uncompressed gradients, where the backward pass takes long enough; of a GPT with tied tables
MAX_LEVEL = 1  # of ZeRO with another reduction: higher levels reduce-scatter the gradients of each microbatch

Dims: TypeAlias = Any  # a tree of int like the gradients: the dim that data splits, from the end; 0: none
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
    """Returns the sum of an array over a manual axis: the whole sum, or this device's shard of it along `dim`.

    Args:
      x: this device's array, in the dtype that is sent.
      over: the axis.
      dim: counted from the end (-1 is the last); 0: the whole sum.
    """
    if dim == 0:
        return jax.lax.psum(x, over)
    return jax.lax.psum_scatter(x, over, scatter_dimension=x.ndim + dim, tiled=True)


def nothing(shapes: Arrays) -> Arrays:
    """Returns the state of a reduction that keeps nothing from step to step."""
    return ()


def in_equal_parts(residual: Arrays, replicas: int) -> Arrays:
    """Returns residuals for another number of replicas: each replica gets the same part of their sum.

    Equal parts can be compressed with smaller scales than the whole sum on one replica.

    Args:
      residual: a pytree of float32 [saved replicas, ...].
      replicas: the current number of replicas, n.
    """
    share = lambda leaf: jnp.broadcast_to(jnp.sum(leaf, axis=0) / replicas, (replicas, *leaf.shape[1:]))  # noqa: E731
    return jax.tree.map(share, residual)


def no_advice(replicas: int, is_scattered: bool) -> list[tuple[str, str]]:
    """Returns no advice; the default of `Reduction.advice`."""
    return []


@dataclasses.dataclass(frozen=True)
class Transfers:
    """The bytes that the built-in sum would send from a device in a step, and their speed; for advice on a reduction.

    Attributes:
      num_replicas: n.
      reduced: elements of gradients that are all-reduced.
      scattered: elements of gradients that are reduce-scattered.
      itemsize: bytes of an element.
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
      update: (gradients, state, over, scattered) -> (their sums over replicas, the state of the next step). It is
        traced where all mesh axes are manual, for any number of replicas, including 1. `gradients` is a tree of this
        device's float32 shards, of the mean loss; `state` has their structure, or is `()`; `over` is the axis.
        `scattered` is a tree of int: 0 if each replica gets the whole sum, which has to be bitwise the same on all
        replicas; otherwise the dim, counted from the end (-1 is the last), along which each replica gets its shard of
        the sum.
      sent_bytes: (elements, replicas, is_scattered) -> the bytes that a device sends in a step for that many gradient
        elements, without padding.
      init: (shapes of the gradients) -> the same shapes if each replica keeps a float32 array for each gradient from
        step to step, else `()`. The arrays start as zeros and are saved in checkpoints.
      reshard: (state [saved replicas, ...], replicas) -> the state for that number of replicas.
      extension: (reduction, the task on its mesh) -> `Extension`, if the reduction changes more than the sum; else
        None.
      moved_bytes: bytes of device memory that compressing one element reads and writes, for the advice of `plan`.
      advice: (replicas, is_scattered) -> (what is wrong, which option to change) for each further reason to choose
        another reduction.
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
        """Returns (what is wrong, which option to change) if compressing takes longer than the transfers that it saves.

        The built-in sum reduces gradients of layers in the backward pass of the last microbatch, which hides a part of
        them. Any other reduction sends after the backward pass, so it saves no time on the hidden part.
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
