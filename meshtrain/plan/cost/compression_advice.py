"""Whether a reduction pays: seconds saved on the wire beside seconds of packing, MODELLED, nothing measured.

The built-in sum reduces gradients of layers in the backward pass of the last microbatch, which hides a part of them.
What another reduction sends is sent after it, so what was hidden saves nothing.
"""

import jax.numpy as jnp

from meshtrain.assemble import Assembly
from meshtrain.config.config import num_microbatches
from meshtrain.plan.cost.lower_bound import reduced_and_scattered
from meshtrain.plan.target.clusters import Cluster
from meshtrain.plan.timing.streams import Assumptions, bandwidth
from meshtrain.sharding.axes import DATA
from meshtrain.sharding.reduction import SUM, Reduction

HIDDEN_SHARE = 0.58  # of uncompressed gradients, where the backward pass takes long enough; of a GPT with tied tables
BACKWARD_SHARE = 2 / 3  # of the time of a microbatch


def advice(
    assembly: Assembly, cluster: Cluster, assumptions: Assumptions, compute_seconds: float
) -> list[tuple[str, str]]:
    """Returns (what, change) for each reason to reduce gradients in another way.

    Args:
      assembly: of the step.
      cluster: the target; where its speeds are unknown, there is only what the reduction says of itself.
      assumptions: the shares of those speeds that are reached.
      compute_seconds: of a step, without transfers.
    """
    replicas, reduction = assembly.replicas, assembly.replicas.reduction
    if reduction is None or not replicas.axes:
        return []
    num_replicas = assembly.mesh.shape[DATA]
    result = reduction.advice(num_replicas, replicas.level > 0)
    if cluster.accelerator is None or replicas.is_late:  # late gradients are sent beside a whole step
        return result
    wire = bandwidth(assembly.mesh, cluster, DATA) * assumptions.link_efficiency
    memory = cluster.accelerator.memory_bytes_per_second * assumptions.memory_efficiency
    itemsize = jnp.dtype(replicas.wire_dtype).itemsize
    backward = BACKWARD_SHARE * compute_seconds / num_microbatches(assembly.config, assembly.mesh.shape)
    elements = reduced_and_scattered(assembly)
    return result + slower_than_sum(reduction, num_replicas, elements, itemsize, wire, memory, backward)


def slower_than_sum(
    reduction: Reduction,
    num_replicas: int,
    elements: tuple[int, int],
    itemsize: int,
    wire_bytes_per_second: float,
    memory_bytes_per_second: float,
    backward_seconds: float,
) -> list[tuple[str, str]]:
    """Returns (what, change) where packing takes longer than the transfers that it saves.

    Args:
      reduction: not the built-in sum.
      num_replicas: n.
      elements: of a device's gradients, (all-reduced, reduce-scattered).
      itemsize: bytes of an element that the built-in sum sends.
      wire_bytes_per_second: of a device over data.
      memory_bytes_per_second: of a device.
      backward_seconds: of one microbatch, beside which uncompressed gradients are sent.
    """
    reduced, scattered = elements
    plain = itemsize * (num_replicas - 1) / num_replicas * (2 * reduced + scattered) / wire_bytes_per_second
    sent = reduction.sent_bytes(reduced, num_replicas, False) + reduction.sent_bytes(scattered, num_replicas, True)
    saved = plain - min(HIDDEN_SHARE * plain, backward_seconds) - sent / wire_bytes_per_second
    packing = reduction.moved_bytes * (reduced + scattered) / memory_bytes_per_second
    if saved >= packing:
        return []
    return [
        (
            f"reduction.name={reduction.name} does not pay: at {wire_bytes_per_second / 1e9:.0f} GB/s over data it "
            f"saves {max(saved, 0) * 1e3:.3g} ms of transfers that the backward pass would not hide, and packing takes "
            f"about {packing * 1e3:.3g} ms",
            f"reduction.name={SUM}",
        )
    ]
