"""Options of gradient compression over the data axis, which combinations are legal, and what they send. No JAX.

n: replicas, N: elements of the gradients on one device, S: elements in a block, K: elements of a block that topk keeps.

    kind   what a device sends in a step                         n = 8, S = 256, K = 8
    none   2 (n - 1) / n x 4 N, or x 2 N in bfloat16             7 N or 3.5 N
    int8   2 (n - 1) / n x (1 + 4 / S) N, at ZeRO level 1 half   1.78 N
    topk   (n - 1) x 4 K / S N, which grows with n               0.88 N
"""

import dataclasses

from meshtrain.words.options import option

SCALE_BYTES = 4  # of a block's float32 scale
PAIR_BYTES = 4  # of an element that topk sends: a bfloat16 and its uint16 place in the block
MAX_LEVEL = 1  # of ZeRO: higher levels reduce-scatter the gradients of each microbatch
MAX_BLOCK = 2**16  # a place in a block fits 16 bits

_COMPRESSED = {"kind": ("int8", "topk")}


@dataclasses.dataclass(frozen=True)
class CompressionOptions:
    """How gradients cross the data axis."""

    kind: str = option(
        "none",
        "gradients over data: none; int8, where a block shares a scale; topk, the largest elements of each block",
        choices=("none", "int8", "topk"),
    )
    block: int = option(
        256, "elements that share a scale, or of which topk sends some", minimum=8, maximum=MAX_BLOCK,
        only_for=_COMPRESSED,
    )  # fmt: skip
    kept: int = option(8, "elements of each block that topk sends", minimum=1, only_for={"kind": ("topk",)})
    feedback: bool = option(
        True, "whether what a step does not send is added to the next gradient (4 bytes a parameter, saved)",
        only_for=_COMPRESSED,
    )  # fmt: skip

    @property
    def is_on(self) -> bool:
        """Whether gradients are compressed."""
        return self.kind != "none"

    @property
    def has_residual(self) -> bool:
        """Whether each replica keeps what it has not sent yet."""
        return self.is_on and self.feedback

    def wire_bytes(self, num_replicas: int, *, is_scattered: bool = False) -> float:
        """Returns the bytes that a device sends for each element of a gradient, without padding.

        Args:
          num_replicas: n.
          is_scattered: whether each replica needs its own shard of the sum only, as at ZeRO level 1.
        """
        assert self.is_on, "what is not compressed has a dtype"
        if self.kind == "topk":
            return (num_replicas - 1) * PAIR_BYTES * self.kept / self.block
        halves = 1 if is_scattered else 2
        return halves * (num_replicas - 1) / num_replicas * (1 + SCALE_BYTES / self.block)


def problems(options: CompressionOptions, level: int, num_replicas: int) -> list[str]:
    """Returns one line for each value that is not allowed with the others.

    Args:
      options: each within its own bounds.
      level: of ZeRO.
      num_replicas: the size of the data axis, 1 where it is not known yet.
    """
    lines = []
    if options.kind == "topk" and options.kept > options.block:
        lines.append(
            f"compression.kept: got {options.kept}; allowed: 1 to compression.block = {options.block}; nearest: "
            f"{options.block}"
        )
    if options.is_on and level > MAX_LEVEL and num_replicas > 1:
        lines.append(
            f"compression.kind: got {options.kind} with zero.level={level}, which reduces the gradients of each "
            f"microbatch; allowed: zero.level 0 or {MAX_LEVEL}; nearest: zero.level={MAX_LEVEL}"
        )
    return lines
