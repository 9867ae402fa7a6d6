"""Whether gradient compression pays: seconds saved on the wire beside seconds of packing, MODELLED, nothing measured.

N: elements of a device's gradients. Packing moves about 24 N bytes of a device's memory, without error feedback 16 N:
gradient and residual are read for the scales and again to be packed, bytes are written and read, sum and residual are
written. This is counted by hand; kernels that fuse less move more.
"""

import jax.numpy as jnp

from meshtrain.assemble import Assembly
from meshtrain.layout.axes import DATA
from meshtrain.layout.compression import CompressionOptions
from meshtrain.plan.minimum import reduced_and_scattered
from meshtrain.plan.timing import Assumptions, bandwidths
from meshtrain.plan.topology import Cluster

PACKED_BYTES = {True: 24, False: 16}  # whether there is error feedback -> bytes moved for each element


def advice(assembly: Assembly, cluster: Cluster, assumptions: Assumptions) -> list[tuple[str, str]]:
    """Returns (what, change) for each reason to compress gradients in another way or not at all.

    Args:
      assembly: of the step.
      cluster: the target; only the sizes of top-k are judged where its speeds are unknown.
      assumptions: the shares of those speeds that are reached.
    """
    replicas, options = assembly.replicas, assembly.replicas.compression
    if not replicas.is_compressed:
        return []
    num_replicas = assembly.mesh.shape[DATA]
    found = larger_than_int8(options, num_replicas, is_scattered=replicas.level > 0)
    if cluster.accelerator is None:
        return found
    wire = bandwidths(assembly.mesh, cluster, [DATA])[DATA] * assumptions.link_efficiency
    memory = cluster.accelerator.memory_bytes_per_second * assumptions.memory_efficiency
    itemsize = jnp.dtype(replicas.wire_dtype).itemsize
    return found + slower_than_plain(options, num_replicas, reduced_and_scattered(assembly), itemsize, wire, memory)


def slower_than_plain(
    options: CompressionOptions,
    num_replicas: int,
    elements: tuple[int, int],
    itemsize: int,
    wire_bytes_per_second: float,
    memory_bytes_per_second: float,
) -> list[tuple[str, str]]:
    """Returns (what, change) where packing takes longer than the transfers that it saves.

    Args:
      options: int8 or topk.
      num_replicas: n.
      elements: of a device's gradients, (all-reduced, reduce-scattered).
      itemsize: bytes of an element that is sent uncompressed.
      wire_bytes_per_second: of a device over data.
      memory_bytes_per_second: of a device.
    """
    reduced, scattered = elements
    plain = itemsize * (num_replicas - 1) / num_replicas * (2 * reduced + scattered)
    sent = options.wire_bytes(num_replicas) * reduced
    sent += options.wire_bytes(num_replicas, is_scattered=True) * scattered
    saved = (plain - sent) / wire_bytes_per_second
    packing = PACKED_BYTES[options.feedback] * (reduced + scattered) / memory_bytes_per_second
    if saved >= packing:
        return []
    return [
        (
            f"compression.kind={options.kind} does not pay: it saves {saved * 1e3:.3g} ms of transfers over data at "
            f"{wire_bytes_per_second / 1e9:.0f} GB/s, and packing takes about {packing * 1e3:.3g} ms",
            "compression.kind=none; uncompressed gradients are also reduced beside the backward pass",
        )
    ]


def larger_than_int8(
    options: CompressionOptions, num_replicas: int, *, is_scattered: bool = False
) -> list[tuple[str, str]]:
    """Returns (what, change) where top-k sends at least as much as int8, which is also nearer to the gradient.

    At ZeRO level 0 that is a share K / S of 0.51 / n or more.

    Args:
      options: any.
      num_replicas: n.
      is_scattered: as at ZeRO level 1, where int8 sends half.
    """
    if options.kind != "topk":
        return []
    whole = CompressionOptions(kind="int8").wire_bytes(num_replicas, is_scattered=is_scattered)
    sent = options.wire_bytes(num_replicas, is_scattered=is_scattered)
    if sent < whole:
        return []
    return [
        (
            f"top-k sends {sent:.3g} bytes a parameter over {num_replicas} replicas, which grows with their number, "
            f"and int8 {whole:.3g}",
            "compression.kind=int8, which loses less as well",
        )
    ]
