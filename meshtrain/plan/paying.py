"""Whether gradient compression pays: seconds saved on the wire beside seconds of packing, MODELLED, nothing measured.

N: elements of a device's gradients. Packing moves about 24 N bytes of a device's memory, without error feedback 16 N:
gradient and residual are read for the scales and again to be packed, bytes are written and read, sum and residual are
written. This is counted by hand; kernels that fuse less move more.

Uncompressed gradients of layers are reduced inside the backward pass of the last microbatch, which hides a part of
them. Compressed ones are sent after it, so what was hidden saves nothing.
"""

import jax.numpy as jnp

from meshtrain.assemble import Assembly
from meshtrain.config.config import num_microbatches
from meshtrain.layout.axes import DATA
from meshtrain.layout.compression import CompressionOptions
from meshtrain.plan.minimum import reduced_and_scattered
from meshtrain.plan.timing import Assumptions, bandwidths
from meshtrain.plan.topology import Cluster

HIDDEN_SHARE = 0.58  # of uncompressed gradients, where the backward pass takes long enough; of a GPT with tied tables
BACKWARD_SHARE = 2 / 3  # of the time of a microbatch
PACKED_BYTES = {True: 24, False: 16}  # whether there is error feedback -> bytes moved for each element


def advice(
    assembly: Assembly, cluster: Cluster, assumptions: Assumptions, compute_seconds: float
) -> list[tuple[str, str]]:
    """Returns (what, change) for each reason to compress gradients in another way or not at all.

    Args:
      assembly: of the step.
      cluster: the target; only the sizes of top-k are judged where its speeds are unknown.
      assumptions: the shares of those speeds that are reached.
      compute_seconds: of a step, without transfers.
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
    backward = BACKWARD_SHARE * compute_seconds / num_microbatches(assembly.config, assembly.mesh.shape)
    elements = reduced_and_scattered(assembly)
    return found + slower_than_plain(options, num_replicas, elements, itemsize, wire, memory, backward)


def slower_than_plain(
    options: CompressionOptions,
    num_replicas: int,
    elements: tuple[int, int],
    itemsize: int,
    wire_bytes_per_second: float,
    memory_bytes_per_second: float,
    backward_seconds: float,
) -> list[tuple[str, str]]:
    """Returns (what, change) where packing takes longer than the transfers that it saves.

    Args:
      options: int8 or topk.
      num_replicas: n.
      elements: of a device's gradients, (all-reduced, reduce-scattered).
      itemsize: bytes of an element that is sent uncompressed.
      wire_bytes_per_second: of a device over data.
      memory_bytes_per_second: of a device.
      backward_seconds: of one microbatch, beside which uncompressed gradients are sent.
    """
    reduced, scattered = elements
    plain = itemsize * (num_replicas - 1) / num_replicas * (2 * reduced + scattered) / wire_bytes_per_second
    sent = options.wire_bytes(num_replicas) * reduced
    sent += options.wire_bytes(num_replicas, is_scattered=True) * scattered
    saved = plain - min(HIDDEN_SHARE * plain, backward_seconds) - sent / wire_bytes_per_second
    packing = PACKED_BYTES[options.feedback] * (reduced + scattered) / memory_bytes_per_second
    if saved >= packing:
        return []
    return [
        (
            f"compression.kind={options.kind} does not pay: at {wire_bytes_per_second / 1e9:.0f} GB/s over data it "
            f"saves {max(saved, 0) * 1e3:.3g} ms of transfers that the backward pass would not hide, and packing takes "
            f"about {packing * 1e3:.3g} ms",
            "compression.kind=none",
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
