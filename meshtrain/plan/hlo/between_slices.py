"""Reads transfers between TPU slices: the compiler writes them as pairs of `send` and `recv` for the host's runtime.

Uses no JAX. A collective over several slices becomes collectives within each slice, and pairs like this between slices:

    %send = (f32[4,8]{1,0}, u32[], token[]) send(%x, %token), frontend_attributes={
      _xla_host_transfer_handler_name="xla_megascale_runtime", _xla_host_transfer_rendezvous="psum.1_0",
      _xla_megascale_target="{1,2}x{0:7}", _xla_megascale_transfer_type="ALL_REDUCE"}

The target is `{slices}x{chips of each slice}`, or groups of chips, `{{100000,200000},{100001,200001}}`, or pairs of
chips, `{{100000->200000},{200000->100000}}`. Slices count from 1; chip 7 of slice 2 is 200007.
"""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from meshtrain.plan.hlo.parse import Instruction
from meshtrain.plan.hlo.replica_groups import axes_of
from meshtrain.plan.hlo.shapes import num_bytes, parts

BETWEEN = " between slices"  # suffix of the kind of a collective between slices
RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="([^"]+)"')
TARGET = re.compile(r'_xla_megascale_target="?(\{.*?\})"?,_xla_megascale_transfer_type="(\w+)"')
GROUP = re.compile(r"\{([\d,>-]+)\}")
PERMUTE = "collective-permute"
CHIPS = 100_000  # chip numbers reserved for each slice


class Sent(NamedTuple):
    """A collective as read from an instruction, before its wire bytes are computed.

    Attributes:
      kind: one of `collectives.KINDS`, followed by `BETWEEN` if the collective connects slices.
      axes: the mesh axes along which it runs, joined by `+`, or `irregular`.
      group_size: number of devices in one group; number of slices if the collective connects slices.
      whole_bytes: bytes of the full array.
    """

    kind: str
    axes: str
    group_size: int
    whole_bytes: float


def is_send(line: Instruction) -> bool:
    """Returns whether an instruction starts a transfer to another slice."""
    return line.opcode == "send" and TARGET.search(line.rest) is not None


def sent_collective(line: Instruction, body: Sequence[Instruction], over: Mapping[str, int]) -> Sent:
    """Returns the collective that a `send` starts; the full array is the larger of the sent and the received array.

    Args:
      line: the `send` instruction.
      body: the instructions of its computation, including the matching `recv`.
      over: mesh axis -> number of slices along it, in mesh order; slices are numbered in row-major order.
    """
    target, name = TARGET.search(line.rest), RENDEZVOUS.search(line.rest)
    assert target, line.rest
    assert name, line.rest
    kind = PERMUTE if target[2] == "ONE_TO_ONE" else target[2].lower().replace("_", "-")
    groups = GROUP.findall(target[1].partition("x")[0])
    slices = np.array([[int(number) for number in re.findall(r"\d+", group)] for group in groups])
    slices = np.where(slices < CHIPS, slices, slices // CHIPS) - 1
    axes = axes_of(slices, over, are_pairs=kind == PERMUTE)
    ends = [other for other in body if other.opcode in ("send", "recv") and name[0] in other.rest]
    return Sent(kind + BETWEEN, axes, slices.shape[1], max(num_bytes(parts(end.shape)[0]) for end in ends))
