"""Advice on a plan: compiler warnings that matter, and numbers far from their optimum."""

import dataclasses
import re
from collections.abc import Mapping, Sequence

from meshtrain.cli.tables import format_bytes
from meshtrain.launch.hardware import DEFAULT_MEMORY_FRACTION
from meshtrain.models.cost import ATTENTION, EXPERTS, LOOP, Kernel
from meshtrain.plan.cost.context_sizes import activations_dominate, in_more_parts
from meshtrain.plan.cost.lower_bound import idle_share
from meshtrain.plan.cost.memory import Memory
from meshtrain.plan.hlo.collectives import Traffic, along
from meshtrain.plan.target.clusters import Cluster
from meshtrain.plan.target.compile import Compiled
from meshtrain.sharding.axes import CONTEXT, EXPERT

FAR_ABOVE_MINIMUM = 1.2
MATTERS_BYTES = 100e6  # traffic below this costs no noticeable time
MATTERS_SHARE = 0.1  # of all that is sent
LITTLE_OVERLAP = 0.5
ADDED = 0.02
MUCH_IDLE = 0.15
REMATERIALIZED = re.compile(r"Involuntary full rematerialization.*?(?:for HLO operation: %?([\w.\-]+))?", re.IGNORECASE)
BUDGET = re.compile(r"Can't reduce memory use below ([\d.]+\w+).*?only reduced to ([\d.]+\w+)")
OFFLOAD = "pinned_host"
APART = "model.within_documents=false where neighbouring documents may see each other"
SPLASH = "precision.policy=bfloat16, heads of 64, 128 or 256, a sequence_length that is a multiple of 128"


@dataclasses.dataclass(frozen=True)
class Finding:
    """An observation, and the change that helps."""

    what: str
    change: str

    def line(self) -> str:
        """Returns the finding as one line."""
        return f"{self.what}; {self.change}"


def findings(
    compiled: Compiled,
    cluster: Cluster,
    memory: Memory,
    rows: Sequence[Traffic],
    minimum: Mapping[str, float],
    executor_bytes: float | None,
    added_share: float | None,
) -> list[Finding]:
    """Returns the findings of a plan, memory first.

    Args:
      compiled: the step.
      cluster: the target.
      memory: of a device.
      rows: the traffic of a device.
      minimum: axis -> least bytes, with what a pipeline's idle rows send.
      executor_bytes: what the pipeline's executor sends over its axis, by its own formula; None without one.
      added_share: FLOPs that the compiler added, as a share of those traced.
    """
    results = [
        *_memory(compiled, cluster, memory),
        *_messages(compiled.messages, compiled.assembly.config.remat.policy),
    ]
    idle = idle_share(compiled.assembly)
    for axis, least in minimum.items():
        results += _traffic(axis, least, executor_bytes if axis == "pipeline" else None, rows)
    results += _attention(compiled, cluster)
    results += _experts(compiled, cluster)
    if added_share is not None and added_share > ADDED:
        results.append(
            Finding(
                f"the compiler added {added_share:.1%} of matrix products to those traced",
                "it recomputes to save memory, or repeats on several devices what it could not split",
            )
        )
    if idle > MUCH_IDLE:
        results.append(
            Finding(
                f"the pipeline idles {idle:.0%} of its rows",
                "more pipeline.num_microbatches, or interleaved_1f1b with more pipeline.num_chunks",
            )
        )
    return results


def _memory(compiled: Compiled, cluster: Cluster, memory: Memory) -> list[Finding]:
    results = [*_long_sequences(compiled, memory)]
    if compiled.refusal:
        first = compiled.refusal.strip().splitlines()[0]
        results.append(Finding(f"the compiler gave up: {first}", "see the changes that would make it fit"))
    stats, device = memory.compiler, memory.device_bytes
    if stats and device and cluster.platform == "cuda" and memory.fits is not False:
        default = DEFAULT_MEMORY_FRACTION * device
        if stats.peak_bytes + memory.uncertainty_bytes > default:
            results.append(
                Finding(
                    f"JAX by default takes {format_bytes(int(default))} of the GPU's memory, and the step needs more",
                    "start with XLA_PYTHON_CLIENT_MEM_FRACTION=0.93",
                )
            )
    if compiled.assembly.config.remat.policy == "offload" and cluster.platform == "cuda":
        results.append(
            Finding(
                "offload to the host cannot be seen without a GPU: compiled this way it stays in device memory",
                "measure it on one GPU",
            )
        )
    return results


def _long_sequences(compiled: Compiled, memory: Memory) -> list[Finding]:
    config, shape = compiled.assembly.config, dict(compiled.assembly.mesh.shape)
    change = in_more_parts(config, shape) if activations_dominate(memory) else {}
    if not change or memory.activations_bytes is None or memory.capacity_bytes is None:
        return []
    tokens = config.sequence_length // shape[CONTEXT]
    taken, room = format_bytes(memory.activations_bytes), format_bytes(memory.capacity_bytes)
    return [
        Finding(
            f"activations take {taken} of {room}: a device has {tokens:,} tokens of each sequence",
            ", ".join(f"{key}={value}" for key, value in change.items()),
        )
    ]


def _messages(messages: Sequence[str], remat: str) -> list[Finding]:
    recomputed = "" if remat == "full" else "remat.policy=full, "
    results: dict[str, Finding] = {}
    for line in messages:
        if "nvoluntary full rematerialization" in line:
            results["rematerialization"] = Finding(
                "the partitioner gathers a whole array to split it differently (involuntary full rematerialization)",
                "constrain the activation there, or change the rule that splits it",
            )
        if budget := BUDGET.search(line):
            results["budget"] = Finding(
                f"the compiler's memory budget is {budget[1]}, and it got no lower than {budget[2]}: it has traded "
                "time for memory",
                f"smaller microbatches (accumulation_steps), {recomputed}or more devices for the weights",
            )
    return list(results.values())


def _traffic(axis: str, least: float, formula: float | None, rows: Sequence[Traffic]) -> list[Finding]:
    mine = along(rows, axis)
    sent = sum(row.wire_bytes for row in mine)
    results = []
    bound = max(least, formula or 0.0)
    if sent > FAR_ABOVE_MINIMUM * bound and sent - bound > MATTERS_BYTES:
        most = max(mine, key=lambda row: row.wire_bytes)
        where = f" (most of it {most.kind}, {most.sources[0]})" if most.sources else f" (most of it {most.kind})"
        times = f"{sent / bound:.2f} times what it has to" if bound else "and has to send nothing"
        results.append(
            Finding(
                f"{axis} sends {format_bytes(int(sent))}, {times}{where}",
                "look at the constraint in that line",
            )
        )
    if axis in (CONTEXT, EXPERT):
        return results  # products before and after an exchange wait for it, however large microbatches are
    hidden = sum(row.wire_bytes * row.overlapped_fraction for row in mine)
    of_all = sent / max(1.0, sum(row.wire_bytes for row in rows))
    if sent > MATTERS_BYTES and of_all > MATTERS_SHARE and hidden < LITTLE_OVERLAP * sent:
        results.append(
            Finding(
                f"only {hidden / sent:.0%} of what {axis} sends is overlapped by matrix products",
                "larger microbatches, or less along this axis",
            )
        )
    return results


def _experts(compiled: Compiled, cluster: Cluster) -> list[Finding]:
    chosen = _kernel(compiled, EXPERTS)
    if cluster.platform == "cpu" or chosen is None or chosen.by != LOOP:
        return []
    change = "model.expert_dim / mesh.tensor and model.embed_dim that are such multiples"
    return [Finding(f"products of experts run in a loop in plain JAX, slower than a kernel: {chosen.why}", change)]


def _kernel(compiled: Compiled, part: str) -> Kernel | None:
    return next((kernel for kernel in compiled.assembly.cost.kernels if kernel.part == part and kernel.by), None)


def _attention(compiled: Compiled, cluster: Cluster) -> list[Finding]:
    config = compiled.assembly.config
    if compiled.attention == "cudnn" and cluster.platform == "cuda":
        return [
            Finding(
                "attention is cuDNN's kernel, compiled without cuDNN at hand: its workspace is not in these numbers",
                "leave some memory to spare",
            )
        ]
    if compiled.attention == "splash" and cluster.platform != "tpu":
        return [Finding("attention is a TPU's kernel, which is interpreted here, slowly", "model.attention=auto")]
    chosen = _kernel(compiled, ATTENTION)
    if cluster.platform == "cpu" or chosen is None:
        return []  # other tasks have no options of attention to advise on
    if compiled.attention == "xla" and config.sequence_length >= 2048:
        keeps = f"attention keeps {config.sequence_length} x {config.sequence_length} numbers for each head"
        return [Finding(f"{keeps}: {chosen.why}", "model.attention=auto")]
    if compiled.attention == "triton":
        slower = f"attention is a kernel that is assumed to be half as fast as cuDNN's: {chosen.why}"
        return [Finding(slower, APART if compiled.assembly.task.attends_within_segments else "heads of at most 128")]
    if compiled.attention != "blockwise":
        return []
    change = SPLASH if cluster.platform == "tpu" else "a 16-bit policy; no window or cap with documents"
    return [Finding(f"attention is a loop in plain JAX, slower than a kernel: {chosen.why}", change)]
