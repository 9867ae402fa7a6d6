"""The bytes that a device sends in a collective over a ring of devices. Imports no JAX."""

from meshtrain.hardware.links import RING


def wire_share(operation: str, group_size: int) -> float:
    """Returns the bytes that one device sends, relative to the bytes of the larger of its input and output.

    The formulas are for a ring (Patarasuk and Yuan 2009), and define bus bandwidth as nccl-tests does
    (doc/PERFORMANCE.md).

    Args:
      operation: the name of a collective, such as "all-reduce": one of `hardware.links.OPERATIONS`.
      group_size: the number of devices in the ring, at least 2.
    """
    if operation in ("collective-permute", "collective-broadcast"):
        return 1.0
    return (2.0 if operation in ("all-reduce", RING) else 1.0) * (group_size - 1) / group_size
