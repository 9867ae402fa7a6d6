"""Derives advice from a plan: explains compiler warnings, and names options that would reduce costs of the step."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp

from meshtrain.assembly.assemble import Assembly
from meshtrain.cli.tables import format_bytes
from meshtrain.config import tasks, unused_options
from meshtrain.config.mesh_checks import num_microbatches
from meshtrain.config.schema import Config
from meshtrain.config.smaller import Change
from meshtrain.errors import divisors
from meshtrain.hardware.accelerators import DEFAULT_MEMORY_FRACTION, FRACTION_VARIABLE, POOL_FRACTION
from meshtrain.models.attention.select import APART
from meshtrain.models.cost import ATTENTION, EXPERTS, Kernel
from meshtrain.plan.cluster.clusters import Cluster
from meshtrain.plan.cluster.compile import Compiled
from meshtrain.plan.cost.context_sizes import activations_dominate, in_more_parts
from meshtrain.plan.cost.lower_bound import FSDP, idle_share, reduced_and_scattered
from meshtrain.plan.cost.memory import Memory
from meshtrain.plan.hlo.collectives import Traffic, along
from meshtrain.plan.planner import Plan
from meshtrain.plan.timing.streams import Assumptions, Sending, bandwidth
from meshtrain.sharding.mesh import advice
from meshtrain.sharding.reduction import Transfers
from meshtrain.sharding.rules import CONTEXT, DATA, EXPERT, PIPELINE

FAR_ABOVE_MINIMUM = 1.2
MATTERS_BYTES = 100e6  # traffic below this costs no noticeable time
MATTERS_SHARE = 0.1  # of the bytes that a device sends along all axes
LITTLE_OVERLAP = 0.5  # share of the bytes sent
ADDED = 0.02  # share of the traced FLOPs
MUCH_IDLE = 0.15  # share of a pipeline's clock ticks
UNROLLED: Change = {"remat.policy": "none", "remat.unroll": True}  # compiles each layer separately, recomputes nothing
BACKWARD_SHARE = 2 / 3  # of a microbatch's time: the share of its backward pass
BUDGET = re.compile(r"Can't reduce memory use below ([\d.]+\w+).*?only reduced to ([\d.]+\w+)")


class Finding(NamedTuple):
    """An observation about a plan, and a change that would help.

    Attributes:
      what: the observation as text.
      change: the change as text, such as `accumulation_steps=2`.
    """

    what: str
    change: str

    def line(self) -> str:
        """Returns the observation and the change as one line of text."""
        return f"{self.what}; {self.change}"


def findings(plan: Plan) -> list[Finding]:
    """Returns all findings about a plan; findings about memory come first."""
    compiled, assembly = plan.compiled, plan.compiled.assembly
    results = [*_memory(plan), *_messages(compiled.messages, assembly.config.remat.policy)]
    for axis, least in plan.minimum.items():
        bound = least + (plan.idle_bytes[axis] if axis in plan.idle_bytes else 0.0)
        if axis == PIPELINE:
            bound = max(bound, plan.executor_bytes or 0.0)
        results += _traffic(axis, bound, plan.traffic, plan.timing.sending if plan.timing else None)
    results += [*_fallbacks(plan), *_attention(plan), *microbatch_reason(plan), *free_memory(plan)]
    results += [Finding(what, change) for what, change in advice(assembly.mesh)]
    if plan.added_share is not None and plan.added_share > ADDED:
        results.append(
            Finding(
                f"the compiler added {plan.added_share:.1%} to the traced matrix products",
                "it recomputes to save memory, or repeats work that it could not split on several devices",
            )
        )
    if (idle := idle_share(assembly)) > MUCH_IDLE:
        results.append(
            Finding(
                f"the pipeline is idle in {idle:.0%} of its clock ticks",
                "more pipeline.num_microbatches, or interleaved_1f1b with more pipeline.num_chunks",
            )
        )
    compute_seconds = plan.timing.compute_seconds if plan.timing else 0.0
    return results + compression_advice(assembly, plan.cluster, plan.assumptions, compute_seconds)


def _memory(plan: Plan) -> list[Finding]:
    compiled, memory, cluster = plan.compiled, plan.memory, plan.cluster
    results = [*_long_sequences(compiled, memory)]
    if compiled.refusal:
        first = compiled.refusal.strip().splitlines()[0]
        results.append(Finding(f"the compiler gave up: {first}", "see the changes that would make it fit"))
    stats, device = memory.compiler, memory.device_bytes
    if stats and device and cluster.platform == "cuda" and memory.fits is not False:
        default = DEFAULT_MEMORY_FRACTION * device
        if stats.peak_bytes + memory.uncertainty_bytes > default:
            taken = f"by default JAX uses {format_bytes(int(default))} of the GPU's memory, but the step needs more"
            setting = f"{FRACTION_VARIABLE}={POOL_FRACTION}"
            results.append(Finding(taken, f"{setting}, which train sets if it is not set"))
    return results


def free_memory(plan: Plan) -> list[Finding]:
    """Returns the finding that a compiled alternative is faster and fits (`Plan.faster`), else `layers_in_loop`."""
    faster, timing, margin = plan.faster, plan.timing, plan.memory.margin_bytes
    if faster is None or timing is None or margin is None:
        return layers_in_loop(plan.compiled.assembly, plan.cluster)
    again = f"{_milliseconds(plan.recomputed_seconds)} of {_milliseconds(timing.step_seconds)} ms recomputed"
    looped = "layers run in a loop, which copies saved activations"
    what = f"{format_bytes(margin)} free and {again if plan.recomputed_seconds else looped}"
    change = ", ".join(f"{key}={str(value).lower()}" for key, value in faster.change.items())
    result = f"{_milliseconds(faster.step_seconds)} ms instead of {_milliseconds(timing.step_seconds)}"
    return [Finding(what, f"{change}: {result}, peak {format_bytes(faster.peak_bytes)} (compiled)")]


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.3g}"


def can_unroll(config: Config, shape: Mapping[str, int]) -> bool:
    """Returns whether `UNROLLED` affects the step: a built-in task's layers run in a loop, and not in a pipeline.

    Args:
      config: the configuration.
      shape: mesh axis -> size.
    """
    remat = dataclasses.replace(config.remat, policy="none", unroll=True)
    unread = unused_options.without_effect(dataclasses.replace(config, remat=remat), shape)
    return config.task in tasks.names() and not config.remat.unrolls and "remat.unroll" not in unread


def layers_in_loop(assembly: Assembly, cluster: Cluster) -> list[Finding]:
    """Returns a finding if `remat.unroll=true` would avoid copies of activations; else [], as for every CPU cluster.

    A loop over layers copies the saved activations of each layer into arrays that are stacked over layers.
    """
    config, shape = assembly.config, dict(assembly.mesh.shape)
    if cluster.platform == "cpu" or config.remat.policy != UNROLLED["remat.policy"] or not can_unroll(config, shape):
        return []
    what = "layers run in a loop, which copies saved activations into arrays of all layers and back"
    return [Finding(what, "remat.unroll=true, which takes longer to compile")]


def _long_sequences(compiled: Compiled, memory: Memory) -> list[Finding]:
    config, shape = compiled.assembly.config, dict(compiled.assembly.mesh.shape)
    change = in_more_parts(config, shape) if activations_dominate(memory) else {}
    if not change or memory.activations_bytes is None or memory.capacity_bytes is None:
        return []
    tokens = config.sequence_length // shape[CONTEXT]
    taken, room = format_bytes(memory.activations_bytes), format_bytes(memory.capacity_bytes)
    what = f"activations take {taken} of {room}: a device has {tokens:,} tokens of each sequence"
    return [Finding(what, ", ".join(f"{key}={value}" for key, value in change.items()))]


def _messages(messages: Sequence[str], remat: str) -> list[Finding]:
    recomputed = "" if remat == "full" else "remat.policy=full, "
    results: dict[str, Finding] = {}
    for line in messages:
        if "nvoluntary full rematerialization" in line:
            results["rematerialization"] = Finding(
                "the partitioner gathers a complete array to split it differently (involuntary full rematerialization)",
                "add a sharding constraint for the activation, or change the rule that splits it",
            )
        if budget := BUDGET.search(line):
            results["budget"] = Finding(
                f"the compiler's memory budget is {budget[1]}, and it could not get below {budget[2]}: it traded "
                "time for memory",
                f"smaller microbatches (accumulation_steps), {recomputed}or more devices for the weights",
            )
    return list(results.values())


def _traffic(
    axis: str, bound: float, rows: Sequence[Traffic], sending: Mapping[tuple[str, str], Sending] | None = None
) -> list[Finding]:
    """Returns findings about traffic far above its bound, and about transfers that overlap little computation.

    Args:
      axis: a key of `Plan.minimum`: a mesh axis, or axes joined by `+`.
      bound: lower bound of the bytes that a device sends along the axis in a step.
      rows: the collectives of the step along all axes.
      sending: (axes, kind of collective) -> modelled seconds of its transfers. None or empty: the time is not modelled,
        and the overlap is measured by the bytes that overlap matrix products.
    """
    mine, results = along(rows, axis), []
    sent = sum(row.wire_bytes for row in mine)
    if sent > FAR_ABOVE_MINIMUM * bound and sent - bound > MATTERS_BYTES:
        most = max(mine, key=lambda row: row.wire_bytes)
        where = ", ".join((most.kind, *most.sources[:1]))
        times = f"{sent / bound:.2f} times the minimum" if bound else "although the minimum is 0"
        what = f"{axis} sends {format_bytes(int(sent))}, {times} (mostly {where})"
        results.append(Finding(what, "look at the sharding constraint in that line"))
    if axis in (CONTEXT, EXPERT):
        return results  # matrix products depend on an exchange before and after it, so larger microbatches do not help
    of_all = sent / max(1.0, sum(row.wire_bytes for row in rows))
    if sent <= MATTERS_BYTES or of_all <= MATTERS_SHARE:
        return results
    timed = [sending[row.axis, row.kind] for row in mine] if sending else []
    if timed:
        total, hidden = (sum(one[index] for one in timed) for index in (0, 1))
        what = f"only {_milliseconds(hidden)} of {_milliseconds(total)} ms of transfers along {axis} are hidden"
    else:
        total, hidden = sent, sum(row.wire_bytes * row.overlapped_fraction for row in mine)
        what = f"only {hidden / sent:.0%} of the bytes sent along {axis} overlap matrix products"
    if hidden < LITTLE_OVERLAP * total:
        results.append(Finding(what, "larger microbatches, or fewer devices along this axis"))
    return results


def _kernel(plan: Plan, part: str) -> Kernel | None:
    """Returns the implementation chosen for a part of the model; None on CPUs, or if the task does not state it.

    Args:
      plan: the plan of the step.
      part: `ATTENTION` or `EXPERTS`.
    """
    kernels = plan.compiled.assembly.cost.kernels if plan.cluster.platform != "cpu" else ()
    return next((kernel for kernel in kernels if kernel.part == part and kernel.by), None)


def _fallbacks(plan: Plan) -> list[Finding]:
    kernels = plan.compiled.assembly.cost.kernels if plan.cluster.platform != "cpu" else ()
    return [Finding(f"{part.part}: {lost.what}", lost.change) for part in kernels if (lost := part.fallback)]


def microbatch_reason(plan: Plan) -> list[Finding]:
    """Returns a finding if the weights of experts are gathered again for each of several microbatches; otherwise [].

    The finding suggests a smaller number of microbatches, or states that memory requires this number. The result is
    also [] for pipelines, on CPUs, and if the bytes of activations or the usable memory are unknown.
    """
    config, shape, memory = plan.compiled.assembly.config, plan.compiled.assembly.mesh.shape, plan.memory
    parts, activations = num_microbatches(config, shape), memory.activations_bytes
    is_gathered = _kernel(plan, EXPERTS) is not None and shape[FSDP] > 1 and shape[PIPELINE] == 1
    if not is_gathered or parts == 1 or activations is None or memory.capacity_bytes is None:
        return []
    state = memory.arguments_expected_bytes + memory.state.gradients
    return [fewer_microbatches(parts, activations, memory.capacity_bytes - state)]


def fewer_microbatches(parts: int, activations_bytes: int, free_bytes: int) -> Finding:
    """Returns the advice to use fewer microbatches if they would fit in memory, else the advice to save memory.

    The smaller number of microbatches is the next smaller divisor of `parts`.

    Args:
      parts: current number of microbatches, at least 2.
      activations_bytes: bytes of activations on one device, with this number of microbatches.
      free_bytes: bytes of one device that are available for activations.
    """
    fewer = divisors(parts)[-2]
    needed = activations_bytes * parts // fewer
    taken = f"with {fewer}, activations would take about {format_bytes(needed)} of {format_bytes(free_bytes)}"
    if needed <= free_bytes:
        what = f"weights of experts are gathered for each of {parts} microbatches, and fewer fit: {taken}"
        return Finding(what, f"accumulation_steps={fewer}")
    what = f"memory requires {parts} microbatches, and weights of experts are gathered for each: {taken}"
    return Finding(what, "a remat.policy that saves less (save_attention, full), or zero.level=1 with mesh.fsdp=1")


def _attention(plan: Plan) -> list[Finding]:
    length, by, platform = plan.compiled.assembly.config.sequence_length, plan.compiled.attention, plan.cluster.platform
    if by == "cudnn" and platform == "cuda":
        unseen = (
            "attention is cuDNN's kernel, which was compiled without cuDNN: its workspace is not included in "
            "these numbers"
        )
        return [Finding(unseen, "leave some memory to spare")]
    if by == "splash" and platform != "tpu":
        return [
            Finding("attention is a TPU kernel, which is interpreted on this platform, slowly", "model.attention=auto")
        ]
    chosen = _kernel(plan, ATTENTION)
    # Other tasks have no options of attention to advise on. A fallback has a finding already.
    if chosen is None or chosen.fallback:
        return []
    if by == "xla" and length >= 2048:
        keeps = f"attention stores {length} x {length} numbers for each head"
        return [Finding(f"{keeps}: {chosen.why}", "model.attention=auto")]
    if by == "triton":
        slower = f"attention is a kernel that was half as fast as cuDNN's on an H100: {chosen.why}"
        apart = plan.compiled.assembly.task.attends_within_segments
        return [Finding(slower, APART if apart else "heads of at most 128")]
    return []


def compression_advice(
    assembly: Assembly, cluster: Cluster, assumptions: Assumptions, compute_seconds: float
) -> list[Finding]:
    """Returns a finding for each reason not to compress gradients by the configured `reduction.name`.

    One reason is that compression takes more modelled seconds than it saves on the wire. Returns [] for the built-in
    sum, which does not compress, and without replicas.

    Args:
      assembly: the assembled step.
      cluster: the target cluster; if its speeds are unknown, the reason about modelled seconds is not checked.
      assumptions: the assumptions of the time model.
      compute_seconds: modelled seconds of a step's computation, without transfers.
    """
    replicas, costs = assembly.placed.replicas, assembly.extension.costs
    if costs.reduction is None or not replicas.has_copies:
        return []
    num_replicas = assembly.mesh.shape[DATA]
    result = [Finding(*one) for one in costs.reduction.advice(num_replicas, replicas.level > 0)]
    if cluster.accelerator is None or costs.hides_transfers:
        return result
    transfers = Transfers(
        num_replicas,
        *reduced_and_scattered(assembly),
        jnp.dtype(replicas.wire_dtype).itemsize,
        bandwidth(assembly.mesh, cluster, DATA) * assumptions.link_efficiency,
        cluster.accelerator.memory_bytes_per_second * assumptions.memory_efficiency,
        BACKWARD_SHARE * compute_seconds / num_microbatches(assembly.config, assembly.mesh.shape),
    )
    return result + [Finding(*one) for one in costs.reduction.slower_than_sum(transfers)]
