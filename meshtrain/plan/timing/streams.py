"""Models the time of a step (MODELLED, not measured): simulates the scheduled program with two streams.

One stream computes and the other communicates. Nothing is measured on the cluster, except for the links if a file of
measured links is given. Matrix products run at a share of the peak that depends on the card and on their shape
(`shape_share`); all other operations run at the speed of memory. Transfers run at the speed of the slowest link of a
ring over the group; an all-to-all has a separate speed (`exchange_bandwidth`). A transfer overlaps the operations after
its start, until its done operation waits for it. Transfers between TPU slices and transfers within a slice do not delay
each other.

The program computes in a pipeline's idle clock ticks too, so the time contains the bubble. The interval comes from two
more simulations. The fast end has faster products, attention and memory, and hides every asynchronous transfer. The
slow end has slower products, slower kernels of experts, kernels launched by the host, and hides no transfer.

The module also reads the seconds of a measured step for calibration: from a run's metrics.jsonl, or as a number.
"""

import collections
import dataclasses
import enum
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from meshtrain.errors import Problem, UserError
from meshtrain.files import expand_user, read_json, what_is_at
from meshtrain.hardware.accelerators import Accelerator
from meshtrain.hardware.links import Link, Links, link_for
from meshtrain.plan.cluster.clusters import Cluster
from meshtrain.plan.hlo.between_slices import BETWEEN
from meshtrain.plan.hlo.collectives import Collective, collectives
from meshtrain.plan.hlo.flops import attention_flops, attention_kernel
from meshtrain.plan.hlo.memory_traffic import bytes_moved
from meshtrain.plan.hlo.parse import FUSIONS, Instruction, Program, runs_of_called
from meshtrain.plan.hlo.products import Product, grouped_kernel, product_flops, product_of
from meshtrain.plan.hlo.shapes import dtypes
from meshtrain.sharding.mesh import first_slice, over_slices

FREE = ("parameter", "tuple", "get-tuple-element", "bitcast", "constant", "iota", "partition-id", "opt-barrier",
        "after-all", "recv")  # fmt: skip
CALLS = ("while", "call", "conditional", "async-start")
# Rows x columns of a tile -> its speed relative to the largest tile. An assumption: operands are read again for each
# tile, so a tile of 64 x 64 reads almost three times the bytes for the same work.
TILES = {(256, 128): 1.0, (128, 256): 1.0, (128, 128): 0.92, (128, 64): 0.75, (64, 128): 0.75, (64, 64): 0.55}
# Numbers of parts into which a contraction is split; different units compute the parts, which are then added.
SPLITS = (1, 2, 4, 8)
# Contracted elements whose time equals filling and draining the pipeline of a tile: an assumption.
FILLING = 64


@dataclasses.dataclass(frozen=True)
class Assumptions:
    """The assumptions of the time model, which every report prints.

    The fast and the slow end are the ends of the interval of step times.

    Attributes:
      product_faster, product_slower: number added to the card's share of the peak at the fast end, and subtracted from
        it at the slow end.
      attention_efficiency, fast_attention_efficiency: share of the peak that attention kernels reach, in the modelled
        step and at the fast end. cuDNN's kernel reached 0.52 on an H100 (8,192 tokens, heads of 128, forward and
        backward; 0.59 forward).
      triton_efficiency: share of the peak that JAX's attention kernel for GPUs reaches, which uses the instructions of
        FlashAttention-2; it reached 0.29 in the same measurement.
      grouped_efficiency, slow_grouped_efficiency: speed of a GPU's Triton kernels of experts relative to other
        products, in the modelled step and at the slow end. The slow end has 1 / 1.86, because the best kernels have
        1.86 times the throughput of Triton's (Guo et al. 2025, arXiv 2512.14080).
      launch_seconds, slow_launch_seconds: time of each GPU kernel in addition to its work, in the modelled step and at
        the slow end. A kernel starts and drains, and 0.5 us pass before the next kernel of a command buffer. At the
        slow end, the host launches each kernel and waits, 6.7 us (NVIDIA, Getting Started with CUDA Graphs).
      memory_efficiency, fast_memory_efficiency: share of the memory's speed that all other operations reach, in the
        modelled step (measured by a large copy on an H100) and at the fast end (the cache keeps some arrays between
        kernels).
      link_efficiency: share of a link's speed that transfers reach.
      latency_seconds: latency of a collective for each doubling of its group.
      slices_latency_seconds: latency of a collective between slices for each doubling of its group: from a chip through
        its host, the network and another host.
      calibrated_margin: share of a measured step's time by which the interval extends to both sides of it.
      links: links measured on the cluster's platform; they replace link_efficiency and the latency for collectives that
        were measured. None: no links were measured.
    """

    product_faster: float = 0.05
    product_slower: float = 0.1
    attention_efficiency: float = 0.52
    fast_attention_efficiency: float = 0.6
    triton_efficiency: float = 0.29
    grouped_efficiency: float = 1.0
    slow_grouped_efficiency: float = 0.54
    launch_seconds: float = 2e-6
    slow_launch_seconds: float = 7e-6
    memory_efficiency: float = 0.88
    fast_memory_efficiency: float = 1.0
    link_efficiency: float = 0.8
    latency_seconds: float = 5e-6
    slices_latency_seconds: float = 50e-6
    calibrated_margin: float = 0.07
    links: Links | None = None

    @property
    def at_the_fast_end(self) -> "Assumptions":
        """The assumptions with the kernel speeds of the fast end of the interval."""
        attention, memory = self.fast_attention_efficiency, self.fast_memory_efficiency
        return dataclasses.replace(self, attention_efficiency=attention, memory_efficiency=memory)

    @property
    def at_the_slow_end(self) -> "Assumptions":
        """The assumptions with the kernel speeds of the slow end of the interval."""
        grouped, launch = self.slow_grouped_efficiency, self.slow_launch_seconds
        return dataclasses.replace(self, grouped_efficiency=grouped, launch_seconds=launch)

    def lines(self, accelerator: Accelerator, num_slices: int) -> list[str]:
        """Returns a line of text for each assumption, except for the interval and the measured links.

        Args:
          accelerator: the published peaks of a device.
          num_slices: number of TPU slices; 1 for other devices.
        """
        network = f"{(accelerator.network_bytes_per_second or 0.0) / 1e9:.4g} GB/s a chip ({accelerator.source})"
        latency = f"{self.slices_latency_seconds * 1e6:.0f} us for each doubling of their number"
        between = f"between slices at {self.link_efficiency:.0%} of {network}, and {latency}"
        shapes = ", less if tiles do not fill its units" if accelerator.num_units else ""
        launch = f", and {self.launch_seconds * 1e6:.0f} us a kernel" if accelerator.num_units else ""
        return [
            f"large matrix products at {accelerator.product_share:.0%} of the peak{shapes}",
            f"source of this share for {accelerator.name}: {accelerator.product_source}",
            f"attention kernels at {self.attention_efficiency:.0%}, JAX's own for GPUs (triton) at "
            f"{self.triton_efficiency:.0%}",
            f"everything else at {self.memory_efficiency:.0%} of the memory's speed, each array read and written once"
            f"{launch}",
            f"transfers at {self.link_efficiency:.0%} of the slowest link of a ring (all-to-all: of each device's own "
            f"links), and {self.latency_seconds * 1e6:.0f} us for each doubling of the group",
            *([between] if num_slices > 1 else []),
        ]

    def interval_line(self, accelerator: Accelerator, *, is_calibrated: bool) -> str:
        """Returns a line of text that describes the ends of the interval.

        Args:
          accelerator: the published peaks of a device.
          is_calibrated: whether a measured step calibrates the model.
        """
        if is_calibrated:
            return f"the interval extends {self.calibrated_margin:.0%} below and above the measured step"
        fast, slow = accelerator.product_share + self.product_faster, accelerator.product_share - self.product_slower
        grouped, launch = self.slow_grouped_efficiency * slow, self.slow_launch_seconds * 1e6
        kernels = f", experts' at {grouped:.0%}, {launch:.0f} us a kernel" if accelerator.num_units else ""
        others = f"attention at {self.fast_attention_efficiency:.0%}, memory at {self.fast_memory_efficiency:.0%}"
        ends = f"products at {fast:.0%}, {others}, asynchronous transfers all hidden, to {slow:.0%}{kernels}"
        return f"the interval: {ends} and none hidden"


class Sending(NamedTuple):
    """Modelled seconds of all transfers of one kind along the same axes, in a step.

    Attributes:
      seconds: total time of the transfers without any overlap.
      hidden_seconds: the part of this time that overlaps computation, and so does not lengthen the step.
    """

    seconds: float
    hidden_seconds: float


@dataclasses.dataclass(frozen=True)
class Timing:
    """Modelled seconds of a step.

    Attributes:
      step_seconds: time of the step with both streams, times `factor`.
      low_seconds, high_seconds: the interval around `step_seconds`: faster products and all transfers hidden, or slower
        products and no transfer hidden.
      compute_seconds: total time of the computing stream, without `factor`.
      wire_seconds: total time of the communicating stream, without `factor`.
      factor: measured over modelled seconds; 1 if nothing was measured.
      links: (axes, kind of collective) -> its measured link, or None if no similar collective was measured; empty if no
        links were given.
      sending: (axes, kind of collective) -> modelled seconds of its transfers, times `factor`.
    """

    step_seconds: float
    low_seconds: float
    high_seconds: float
    compute_seconds: float
    wire_seconds: float
    factor: float
    links: Mapping[tuple[str, str], Link | None] = dataclasses.field(default_factory=dict)
    sending: Mapping[tuple[str, str], Sending] = dataclasses.field(default_factory=dict)


def bandwidth(mesh: Mesh, cluster: Cluster, axis: str) -> float:
    """Returns the bytes per second that each device can send in a ring along an axis, or along axes joined by `+`.

    If the ring spans several hosts (GPUs) or slices (TPUs), it leaves a host through the network adapters of all its
    devices in the host. On a torus of TPUs, a ring uses two links of each chip, to the two neighbors.

    Args:
      mesh: the mesh of the program.
      cluster: the target cluster; its accelerators have known peaks.
      axis: a mesh axis, or axes joined by `+`.
    """
    accelerator, is_tpu = cluster.accelerator, cluster.platform == "tpu"
    assert accelerator is not None
    link = accelerator.link_bytes_per_second * (2 / accelerator.num_links if is_tpu else 1)
    near = devices_by(mesh, axis, "slice_index" if is_tpu else "process_index")
    if len(near) <= 1:
        return link
    assert accelerator.network_bytes_per_second is not None
    return min(link, accelerator.network_bytes_per_second * min(near.values()))


def exchange_bandwidth(mesh: Mesh, cluster: Cluster, axis: str) -> float:
    """Returns the bytes per second that each device can send in an all-to-all along an axis, or axes joined by `+`.

    Each GPU sends data for other hosts through a separate network adapter, and all other data over the links inside the
    host. On a torus, data for one chip travels n / 4 hops on average around a ring of n chips; in a ring collective,
    data is sent only to the neighboring chip.

    Args:
      mesh: the mesh of the program.
      cluster: the target cluster; its accelerators have known peaks.
      axis: a mesh axis, or axes joined by `+`.
    """
    accelerator = cluster.accelerator
    assert accelerator is not None
    hosts = devices_by(mesh, axis, "process_index")
    size = sum(hosts.values())
    if cluster.platform == "tpu":
        return bandwidth(mesh, cluster, axis) * min(1.0, 4 * (size - 1) / size**2)
    link, network = accelerator.link_bytes_per_second, accelerator.network_bytes_per_second
    if len(hosts) <= 1:
        return link
    assert network is not None
    leaving = (size - min(hosts.values())) / (size - 1)
    return min(network / leaving, link / (1 - leaving) if leaving < 1 else math.inf)


def devices_by(mesh: Mesh, axis: str, key: str) -> dict[int, int]:
    """Returns index of a host (or slice) -> number of its devices in the first group along an axis, or joined axes.

    Args:
      mesh: the mesh of the program.
      axis: a mesh axis, or axes joined by `+`.
      key: the attribute of a device with this index: `process_index` for hosts, `slice_index` for slices.
    """
    names = mesh.axis_names
    chosen = [names.index(name) for name in axis.split("+") if name in names]
    lead = np.moveaxis(mesh.devices, chosen, range(len(chosen)))
    group = lead.reshape(-1, math.prod(lead.shape[len(chosen) :]) if chosen else 1)[:, 0]
    return collections.Counter(getattr(device, key, 0) for device in group)


def links_of(found: Iterable[Collective], mesh: Mesh, assumptions: Assumptions) -> dict[tuple[str, str], Link | None]:
    """Returns (axes, kind) of each collective -> the measured link that models it; None if no such link was measured.

    Links along joined axes are never measured. The result is empty if the assumptions have no measured links.
    """
    if assumptions.links is None:
        return {}
    used: dict[tuple[str, str], Link | None] = {}
    for axes, kind in sorted({(one.axes, one.kind) for one in found}):
        used[axes, kind] = None
        if axes in mesh.axis_names:
            num_hosts = len(devices_by(mesh, axes, "process_index"))
            used[axes, kind] = link_for(assumptions.links, axes, kind, mesh.shape[axes], num_hosts)
    return used


def link_lines(used: Mapping[tuple[str, str], Link | None]) -> list[str]:
    """Returns a line of text for each kind of collective: its measured link, or a note that it was not measured.

    Args:
      used: (axes, kind of collective) -> its measured link or None, from `links_of`.
    """
    lines = []
    for (axes, kind), link in used.items():
        if link is None:
            lines.append(f"assumed, as above: {kind} along {axes}, for which there is no measurement")
            continue
        hosts = f"{link.num_hosts} hosts" if link.num_hosts > 1 else "a host"
        speed = f"{link.latency_seconds * 1e6:.1f} us plus its bytes at {link.bytes_per_second / 1e9:.3g} GB/s"
        lines.append(f"measured: {kind} along {axes}, {link.group_size} devices on {hosts}, takes {speed}")
    return lines


def transfer_seconds(
    found: Sequence[Collective], mesh: Mesh, cluster: Cluster, assumptions: Assumptions
) -> dict[str, tuple[float, float]]:
    """Returns name of each collective -> (seconds of latency, seconds that its bytes take), run once without overlap.

    Args:
      found: the collectives of a program.
      mesh: the mesh of the program.
      cluster: the target cluster; its accelerators have known peaks.
      assumptions: the assumptions of the time model.
    """
    measured = {key: link for key, link in links_of(found, mesh, assumptions).items() if link}
    network = (cluster.accelerator and cluster.accelerator.network_bytes_per_second) or math.nan
    inside = first_slice(mesh)

    def of(one: Collective) -> tuple[float, float]:
        if (one.axes, one.kind) in measured:
            link = measured[one.axes, one.kind]
            return link.latency_seconds, one.wire_bytes / link.bytes_per_second
        hops = math.log2(max(2, one.group_size))
        if one.kind.endswith(BETWEEN):  # all chips send at once, each through its share of its host's adapters
            seconds = one.wire_bytes / (network * assumptions.link_efficiency)
            return hops * assumptions.slices_latency_seconds, seconds
        speed = (exchange_bandwidth if one.kind == "all-to-all" else bandwidth)(inside, cluster, one.axes)
        return hops * assumptions.latency_seconds, one.wire_bytes / (speed * assumptions.link_efficiency)

    return {one.name: of(one) for one in found}


class Hidden(enum.Enum):
    """Which asynchronous transfers overlap computation: those that the schedule overlaps, all, or none."""

    SCHEDULED = "scheduled"
    ALL = "all"
    NONE = "none"


@dataclasses.dataclass
class Streams:
    """Simulates the computing and the communicating stream of a program.

    Attributes:
      program: the scheduled program.
      accelerator: the published peaks of the devices that run it.
      transfers: name of a collective -> its seconds without overlap.
      assumptions: the assumptions of the time model.
      hidden: the asynchronous transfers that overlap computation.
      seconds: name of a computation -> cached result of `computation`.
    """

    program: Program
    accelerator: Accelerator
    transfers: Mapping[str, float]
    assumptions: Assumptions
    hidden: Hidden = Hidden.SCHEDULED
    seconds: dict[str, tuple[float, float, float]] = dataclasses.field(default_factory=dict, init=False)

    def step(self) -> tuple[float, float, float]:
        """Returns the seconds of a step: (from start to end, of the computing stream, of the communicating stream)."""
        entry = [name for name in self.program.computations if self.program.num_runs[name]][-1]
        return self.computation(entry)

    def computation(self, name: str) -> tuple[float, float, float]:
        """Returns the seconds of one run of a computation: (from start to end, of computing, of communicating)."""
        if name not in self.seconds:
            self.seconds[name] = self._walk(name)
        return self.seconds[name]

    def _walk(self, name: str) -> tuple[float, float, float]:
        body = self.program.computations[name]
        shapes = {line.name: line.shape for line in body}
        now = computed = sent = 0.0
        free = {False: 0.0, True: 0.0}  # when the links (False), or the network between TPU slices (True), are free
        ends: dict[str, float] = {}
        for line in body:
            if line.name in self.transfers:
                seconds, wire = self.transfers[line.name], line.opcode == "send"
                sent += seconds
                free[wire] = max(now, free[wire]) + seconds
                if line.is_asynchronous and self.hidden is not Hidden.NONE:
                    # With `ALL`, a transfer delays only the end of its computation, wherever its done operation is.
                    ends[line.name] = free[wire] if self.hidden is Hidden.SCHEDULED else now
                else:
                    now = free[wire]
            elif line.opcode.endswith("-done"):
                now = max([now, *(ends[operand] for operand in line.operands if operand in ends)])
            elif line.opcode in CALLS:
                total, inner_computed, inner_sent = self._called(name, line)
                now, computed, sent = now + total, computed + inner_computed, sent + inner_sent
            elif line.opcode not in FREE:
                seconds, inner_sent = self.operation(line, shapes)
                together = seconds + inner_sent if self.hidden is Hidden.NONE else max(seconds, inner_sent)
                now, computed, sent = now + together, computed + seconds, sent + inner_sent
        return max(now, *free.values()), computed, sent

    def _called(self, caller: str, line: Instruction) -> tuple[float, float, float]:
        program = self.program
        total = computed = sent = 0.0
        for name, times in runs_of_called(program.computations, caller, line, program.shares).items():
            inner = self.computation(name)
            total, computed, sent = total + times * inner[0], computed + times * inner[1], sent + times * inner[2]
        return total, computed, sent

    def operation(self, line: Instruction, shapes: Mapping[str, str]) -> tuple[float, float]:
        """Returns the (computing, communicating) seconds of one operation; a TPU's fusion may contain a transfer.

        Args:
          line: the operation.
          shapes: name of each operand -> its shape.
        """
        body = [line]
        inside = shapes
        if line.opcode in FUSIONS and (called := line.attribute("calls")):
            body = self.program.computations[called]
            inside = {one.name: one.shape for one in body}
        sent = sum(self.transfers[one.name] for one in body if one.name in self.transfers)
        seconds = sum(self._product_seconds(one, inside) for one in body)
        moved = bytes_moved(line, body, shapes, self.program.shares) if body else 0.0
        speed = self.accelerator.memory_bytes_per_second * self.assumptions.memory_efficiency
        launch = self.assumptions.launch_seconds if self.accelerator.num_units else 0.0
        return max(seconds, moved / speed) + launch, sent

    def _product_seconds(self, line: Instruction, shapes: Mapping[str, str]) -> float:
        peak = self.accelerator.bfloat16_flops_per_second
        if kernel := attention_kernel(line):
            assumed = self.assumptions
            share = assumed.triton_efficiency if kernel.by == "triton" else assumed.attention_efficiency
            return attention_flops(line, shapes)[0] / (peak * share)
        flops = product_flops(line, shapes, self.program.shares)
        if not flops:
            return 0.0
        inputs = [dtypes(shape)[0] for shape in line.operand_shapes(shapes)]
        inputs = [dtype for dtype in inputs if dtype[0] in "bf"][:2]  # without the indices of blocks' experts
        if set(inputs) == {"f32"} and self.accelerator.float32_flops_per_second:
            peak = self.accelerator.float32_flops_per_second
        if inputs and all(dtype.startswith("f8") for dtype in inputs):
            peak = self.accelerator.float8_flops_per_second or peak
        product = product_of(line, shapes, self.program.shares)
        share = shape_share(product, self.accelerator.num_units) if product else 1.0
        if self.accelerator.num_units and grouped_kernel(line):
            share *= self.assumptions.grouped_efficiency
        return flops / (peak * self.accelerator.product_share * share)


def shape_share(product: Product, num_units: int) -> float:
    """Returns the speed of a product relative to a large product on the same card, in (0, 1].

    A GPU cuts the result into tiles, and each of its units (streaming multiprocessors) computes one tile at a time. A
    tile that extends beyond the border computes zeros. The last wave of tiles leaves units idle. A short contraction
    does not fill the units' pipelines, and a small tile reads its operands more often. (NVIDIA, Matrix Multiplication
    Background User's Guide: tile and wave quantization.) Libraries try several tiles and split long contractions; the
    model takes the best combination.

    Args:
      product: the dims of the product.
      num_units: number of units of the card, which compute tiles in parallel; 0 if unknown, and every shape then has
        speed 1.
    """
    if not num_units:
        return 1.0
    whole = Product(*(max(1, round(size)) for size in dataclasses.astuple(product)))
    return max(_tile_speed(whole, tile, speed, parts, num_units) for tile, speed in TILES.items() for parts in SPLITS)


def _tile_speed(product: Product, tile: tuple[int, int], speed: float, parts: int, num_units: int) -> float:
    """Returns the relative speed of a product for one tile size and one number of parts of the contraction.

    Args:
      product: the dims of the product, integers.
      tile: (rows, columns) of a tile of the result.
      speed: the tile's speed relative to the largest tile.
      parts: number of parts into which the contraction is split.
      num_units: number of units that compute tiles in parallel.
    """
    rows, columns = (math.ceil(size / side) for size, side in zip((product.rows, product.columns), tile, strict=True))
    num_tiles = product.batch * rows * columns
    on_data = product.batch * product.rows * product.columns / (num_tiles * math.prod(tile))
    num_waves = math.ceil(num_tiles * parts / num_units)
    busy = num_tiles * parts / (num_waves * num_units)
    # Each part fills a separate pipeline, and its result is added to the other parts.
    depth = product.contracted / parts
    filled = depth / (depth + FILLING * (1 if parts == 1 else 2))
    return speed * on_data * busy * filled


def timing(
    mesh: Mesh,
    cluster: Cluster,
    program: Program,
    assumptions: Assumptions,
    measured_seconds: float | None = None,
) -> Timing:
    """Returns the modelled time of a step.

    Args:
      mesh: the mesh of the program.
      cluster: the target cluster; its accelerators have known peaks.
      program: the scheduled program.
      assumptions: the assumptions of the time model.
      measured_seconds: measured time of this step on this cluster, which calibrates one factor and narrows the
        interval; None if not measured.
    """
    assert cluster.accelerator is not None
    transfers = collectives(program, dict(mesh.shape), over_slices(mesh))
    each = transfer_seconds(transfers, mesh, cluster, assumptions)
    alone = {name: latency + bandwidth for name, (latency, bandwidth) in each.items()}
    streams = Streams(program, cluster.accelerator, alone, assumptions)
    total, computed, sent = streams.step()
    factor = measured_seconds / total if measured_seconds else 1.0
    step, used = total * factor, links_of(transfers, mesh, assumptions)
    margin = assumptions.calibrated_margin
    low, high = (1 - margin) * step, (1 + margin) * step
    if not measured_seconds:
        low, high = _ends(program, cluster.accelerator, alone, assumptions)
    sending = sending_of(streams, transfers, factor)
    return Timing(step, low, high, computed, sent, factor, used, sending)


def sending_of(streams: Streams, found: Iterable[Collective], factor: float = 1.0) -> dict[tuple[str, str], Sending]:
    """Returns (axes, kind) -> modelled seconds of the collectives of this kind along these axes in a step.

    The hidden part follows from simulating the step with and without the collectives.

    Args:
      streams: the simulation of the step.
      found: the collectives of the program.
      factor: measured over modelled seconds, which multiplies the results.
    """
    total, members = streams.step()[0], dict[tuple[str, str], list[Collective]]()
    for one in found:
        members.setdefault((one.axes, one.kind), []).append(one)
    result = {}
    for key, alike in members.items():
        rest = {**streams.transfers, **dict.fromkeys((one.name for one in alike), 0.0)}
        waited = total - dataclasses.replace(streams, transfers=rest).step()[0]
        alone = sum(one.count * streams.transfers[one.name] for one in alike)
        result[key] = Sending(alone * factor, max(0.0, alone - waited) * factor)
    return result


def _ends(
    program: Program, accelerator: Accelerator, transfers: Mapping[str, float], assumptions: Assumptions
) -> tuple[float, float]:
    """Returns the modelled seconds of a step at the (fast end, slow end) of the interval.

    At the fast end, kernels are fast and all asynchronous transfers are hidden. At the slow end, kernels are slow and
    no transfer is hidden.

    Args:
      program: the scheduled program.
      accelerator: the published peaks of a device.
      transfers: name of a collective -> its seconds without overlap.
      assumptions: the assumptions of the time model.
    """
    fast, slow = (
        dataclasses.replace(accelerator, product_share=accelerator.product_share + change)
        for change in (assumptions.product_faster, -assumptions.product_slower)
    )
    return (
        Streams(program, fast, transfers, assumptions.at_the_fast_end, Hidden.ALL).step()[0],
        Streams(program, slow, transfers, assumptions.at_the_slow_end, Hidden.NONE).step()[0],
    )


ALLOWED = "metrics.jsonl of a run, or seconds a step such as 1.25"
_NEAREST = "--calibrate=1.25"


def measured_seconds(given: str) -> float | None:
    """Returns the measured seconds of a step, from a number or the median over a run's log; None for an empty text.

    Args:
      given: the value of `--calibrate`: the path of a metrics.jsonl, or a number of seconds.

    Raises:
      UserError: the text is neither a path nor a number, or the log has no step times.
    """
    if not given:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = _from_log(expand_user(given))
    if not 0 < seconds < float("inf"):
        raise UserError(Problem("--calibrate", got=given, allowed=ALLOWED, nearest=_NEAREST))
    return seconds


def _from_log(path: Path) -> float:
    if (what := what_is_at(path)) != "a file":
        raise UserError(
            Problem("--calibrate", fault=f"'{path}' is not a file but {what}", allowed=ALLOWED, nearest=_NEAREST)
        )
    try:
        rows = [read_json(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        times = [float(row["step_seconds"]) for row in rows if isinstance(row, dict) and row.keys() >= {"step_seconds"}]
    except (ValueError, TypeError, OSError) as error:
        raise UserError(
            Problem("--calibrate", fault=f"'{path}' is not a log of a run ({error})", allowed=ALLOWED, nearest=_NEAREST)
        ) from error
    if not times:
        raise UserError(
            Problem("--calibrate", fault=f"'{path}' has no step_seconds", allowed=ALLOWED, nearest=_NEAREST)
        )
    return statistics.median(times)
