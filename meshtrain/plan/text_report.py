"""Reports a plan as aligned text for people, and as JSON for programs. All numbers are for one device and one step."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from meshtrain.cli.tables import align, format_bytes
from meshtrain.files import JsonObject
from meshtrain.plan.cost.context_sizes import longest
from meshtrain.plan.cost.lower_bound import idle_share
from meshtrain.plan.findings import findings
from meshtrain.plan.hlo import collectives
from meshtrain.plan.planner import OtherProgram, Plan
from meshtrain.plan.timing.streams import Sending, Timing, link_lines
from meshtrain.sharding.mesh import describe
from meshtrain.sharding.rules import CONTEXT, DATA, PIPELINE, TENSOR

VERDICTS = {True: "fits", False: "DOES NOT FIT", None: "may fit, too close to decide"}
UNKNOWN = "not known"
SMALL_PART = 0.01  # parts with a smaller share of the computation are left out of the table of kernels


def text(plan: Plan) -> str:
    """Returns the complete report of a plan as text."""
    parts = (_title, _memory, _communication, _others, _compute, _time, kernels, _options, _findings)
    return "\n\n".join(shown for part in parts if (shown := part(plan)))


def verdict(plan: Plan) -> str:
    """Returns a line of text that states whether the step fits its device, with the margin."""
    memory = plan.memory
    if memory.capacity_bytes is None:
        return "it is not known whether it fits, because this device's memory size is not known"
    if memory.margin_bytes is None:
        return f"{VERDICTS[memory.fits]}: the compiler gave up because of too little memory"
    side = "to spare" if memory.margin_bytes >= 0 else "too much"
    doubt = f", give or take {_bytes(memory.uncertainty_bytes)}" if memory.uncertainty_bytes else ""
    return f"{VERDICTS[memory.fits]}: {_bytes(abs(memory.margin_bytes))} {side}{doubt}"


def _title(plan: Plan) -> str:
    assembly, config = plan.compiled.assembly, plan.compiled.assembly.config
    task, program = assembly.task, assembly.placed.program
    entry: Any = next(iter(task.batch.values()))
    examples = f"{config.batch_size:,} examples"
    if task.unit == "tokens" and len(entry.shape) == 2:
        examples = f"{config.batch_size:,} sequences of {entry.shape[1]:,} tokens"
    schedule = [f"schedule     {program.schedule.text}"] if program else []
    lines = [
        f"plan         {plan.cluster.text}: {describe(assembly.mesh)}",
        f"model        {task.parameters_text}; {examples} a step, {task.num_units:,} {task.unit}",
        f"compiled     in {plan.compiled.seconds:.1f} s, attention {plan.compiled.attention}, "
        f"remat {config.remat.policy}, {config.precision.policy}",
        *schedule,
        f"memory       {verdict(plan)}",
    ]
    return "\n".join(lines)


def _bytes(number: float | None) -> str:
    return UNKNOWN if number is None else format_bytes(int(number))


def _memory(plan: Plan) -> str:
    memory, stats = plan.memory, plan.memory.compiler
    rows = [
        ("parameters", _bytes(memory.state.parameters), "from shardings"),
        ("gradients", _bytes(memory.state.gradients), "from shardings, float32"),
        ("optimizer", _bytes(memory.state.moments), "from shardings"),
        ("activations and temporaries", _bytes(memory.activations_bytes), "the compiler's temporaries minus gradients"),
        ("batch", _bytes(memory.batch_bytes), "from shardings"),
    ]
    if memory.state.extra:
        label = plan.compiled.assembly.extension.costs.label
        rows.insert(3, (label, _bytes(memory.state.extra), "from shardings"))
    if stats:
        unread = f"; the program does not read {', '.join(memory.unread)}" if memory.unread else ""
        rows += [
            ("arguments", _bytes(stats.arguments_bytes),
             f"by the compiler; {_bytes(memory.arguments_expected_bytes)} from shardings{unread}"),
            ("temporaries", _bytes(stats.temporary_bytes), "by the compiler"),
            ("outputs", _bytes(stats.output_bytes), f"by the compiler; {_bytes(stats.alias_bytes)} in place"),
            ("peak", _bytes(stats.peak_bytes), "by the compiler"),
        ]  # fmt: skip
        if stats.host_bytes:
            rows.append(("on the host", _bytes(stats.host_bytes), "by the compiler"))
    kept = f"of {_bytes(memory.device_bytes)}; the rest is for the runtime and allocator" if memory.device_bytes else ""
    rows.append(("capacity", _bytes(memory.capacity_bytes), kept))
    if (tokens := longest(plan.compiled.assembly.config, memory)) and plan.compiled.attention != "xla":
        rows.append(
            ("longest sequence", f"{_two_digits(tokens):,}", "tokens that would fit if temporaries grow at this rate")
        )
    shown = align(rows, ("memory", "a device", ""), "<>")
    if not memory.buffers:
        return shown
    buffers = [(_bytes(buffer.num_bytes), buffer.shape, buffer.source or "-") for buffer in memory.buffers]
    return f"{shown}\n\n" + align(buffers, ("largest", "array", "made in"), ">")


def _two_digits(number: int) -> int:
    """Rounds a number down to two significant digits."""
    unit = 10 ** max(0, len(str(number)) - 2)
    return number // unit * unit


def _communication(plan: Plan) -> str:
    if not plan.traffic:
        return ""
    table = _collectives(plan.traffic, plan.timing, "a step")
    bounds = []
    for axis, least in plan.minimum.items():
        sent = sent_along(plan, axis)
        formula = f"; the executor's formula: {_bytes(plan.executor_bytes)}" if axis == "pipeline" else ""
        bounds.append((axis, _bytes(sent), _bytes(least), f"{sent / least:.3f}{formula}" if least else "-"))
    shape = plan.compiled.assembly.mesh.shape
    bounds += [
        (axis, _bytes(sent_along(plan, axis)), UNKNOWN, "-")
        for axis in (PIPELINE, CONTEXT, TENSOR)
        if shape[axis] > 1 and axis not in plan.minimum
    ]
    parts = [table, align(bounds, ("axis", "on the wire", "minimum", "ratio"), "<>>")]
    if working := working_ratios(plan):
        parts.append(
            "sent in working clock ticks / minimum: "
            + ", ".join(f"{axis} {ratio:.3f}" for axis, ratio in working.items())
            + "\nidle clock ticks send "
            + ", ".join(
                f"{idle / sent_along(plan, axis):.1%} of {axis}'s bytes" for axis, idle in plan.idle_bytes.items()
            )
        )
    if layers := plan.layer_gradients:
        by = "the backward loop" if plan.compiled.assembly.placed.program is None else "later clock ticks"
        hidden = f"{layers.overlapped_fraction:.0%} of the bytes overlap products of {by}"
        parts.append(f"gradients of stacked layers: {_bytes(layers.wire_bytes)} over data, {hidden}")
    return "\n\n".join(parts)


def _collectives(traffic: Sequence[collectives.Traffic], timing: Timing | None, when: str) -> str:
    sending = timing.sending if timing else {}
    rows = [
        (
            row.axis,
            row.kind,
            f"{row.count:,}",
            _bytes(row.logical_bytes),
            _bytes(row.wire_bytes),
            f"{row.asynchronous_fraction:.0%}",
            *([f"{one:.3f} s" for one in sending[row.axis, row.kind]] if sending else ["-", "-"]),
            row.sources[0] if row.sources else "-",
        )
        for row in traffic
    ]
    header = ("axis", "collective", when, "array", "on the wire", "async", "time", "hidden", "mostly from")
    return align(rows, header, "<<>>>>>>")


def _others(plan: Plan) -> str:
    """Returns the traffic and time of each program that runs once every few steps, as text; '' without programs."""
    return "\n\n".join(_other(program) for program in plan.others)


def _other(program: OtherProgram) -> str:
    when = f"every {program.every} steps"
    sent = collectives.sent_along(program.traffic, DATA)
    rows = [
        (when, _bytes(sent), _bytes(program.minimum_bytes)),
        ("a step", _bytes(sent / program.every), _bytes(program.minimum_bytes / program.every)),
    ]
    parts = [_collectives(program.traffic, program.timing, when)] if program.traffic else []
    parts.append(align(rows, (program.name, "on the wire of data", "least"), "<>>"))
    if program.timing:
        seconds = f"{step_interval(program.timing)} {when}, not included in the step below"
        parts.append(align([(program.name, seconds, "modelled")], ("time", "a run", "")))
    return "\n\n".join(parts)


def interval(numbers: tuple[float, float, float], form: str, unit: str = "") -> str:
    """Returns an interval as text, such as `1.2 to 1.5 s, middle 1.3 s`.

    Args:
      numbers: (low, middle, high).
      form: the format of each number, such as `.3g`.
      unit: the text after each number.
    """
    low, middle, high = (f"{number:{form}}" for number in numbers)
    return f"{low} to {high}{unit}, middle {middle}{unit}"


def step_interval(timing: Timing) -> str:
    """Returns the low, middle and high modelled seconds of a step as text."""
    return interval((timing.low_seconds, timing.step_seconds, timing.high_seconds), ".3g", " s")


def working_ratios(plan: Plan) -> dict[str, float]:
    """Returns axis -> ratio of sent bytes to their lower bound, without a pipeline's idle clock ticks.

    The sent bytes are the bytes that a device sends along the axis in the other clock ticks. Only axes along which
    layers also send in idle clock ticks have an entry.
    """
    return {
        axis: (sent_along(plan, axis) - idle) / plan.minimum[axis]
        for axis, idle in plan.idle_bytes.items()
        if plan.minimum[axis] and sent_along(plan, axis)
    }


def sent_along(plan: Plan, axis: str) -> float:
    """Returns the bytes that a device sends in a step along `axis`, a key of `Plan.minimum`."""
    return collectives.sent_along(plan.traffic, axis)


def _compute(plan: Plan) -> str:
    if plan.work is None:
        return ""
    rows = [("compiled", f"{plan.work.total:.4g}", "matrix products; causal attention kernels without skipped blocks")]
    rows.append(("traced", f"{plan.compiled.traced_flops:.4g}", "before compilation, attention kernels in full"))
    if plan.model_flops:
        causal, full = plan.model_flops
        if causal == full:
            rows.append(("model", f"{full:.4g}", "according to the task"))
        else:
            rows.append(("model, causal", f"{causal:.4g}", "6 N and causal attention"))
            rows.append(("model, full", f"{full:.4g}", "6 N and full attention"))
    if plan.recomputed_share is not None:
        what = "recomputed or in idle clock ticks" if plan.compiled.assembly.placed.program else "computed again"
        rows.append(("more than the model", f"{max(0.0, plan.recomputed_share):.1%}", f"of the compiled work: {what}"))
    return align(rows, ("FLOPs", "a device", ""), "<>")


def _time(plan: Plan) -> str:
    timing, accelerator, task = plan.timing, plan.cluster.accelerator, plan.compiled.assembly.task
    if timing is None or accelerator is None:
        return ""
    units = task.num_units
    rates = units / timing.high_seconds, units / timing.step_seconds, units / timing.low_seconds
    rows = [("step", step_interval(timing)), (f"{task.unit}/s", interval(rates, ",.0f"))]
    if plan.mfu:
        rows.append(("MFU", f"{interval(plan.mfu, '.0%')}, counting full attention"))
    rows += [
        ("all computation", f"{timing.compute_seconds * timing.factor:.3g} s"),
        ("all transfers", f"{timing.wire_seconds * timing.factor:.3g} s"),
    ]
    if plan.recomputed_seconds:
        rows.append(("recomputed", f"{1e3 * plan.recomputed_seconds:,.3g} ms, the forward pass repeated"))
    if plan.compiled.assembly.placed.program is not None:
        idle = idle_share(plan.compiled.assembly)
        rows.append(("bubble", f"{idle:.1%} of a stage's clock ticks are idle; included in the step"))
    how = f"calibrated: measured / uncalibrated is {timing.factor:.2f}" if timing.factor != 1 else "no step measured"
    marked = [(name, value, "modelled") for name, value in rows]
    ends = plan.assumptions.interval_line(accelerator, is_calibrated=timing.factor != 1)
    of_model = plan.assumptions.lines(accelerator, plan.cluster.num_slices)
    lines = [f"assumed: {line}" for line in [*of_model, ends, how]] + link_lines(timing.links)
    return "\n".join([align(marked, ("time", "a step", "")), *(f"  {line}" for line in lines)])


def kernels(plan: Plan) -> str:
    """Returns the largest parts of the step's kernels as a table; "" if the time is not modelled."""
    total = sum(row.seconds for row in plan.kernels)
    rows = [
        (
            row.part,
            f"{row.count:,.0f}",
            f"{1e3 * row.seconds:,.3g} ms",
            f"{1e3 * row.recomputed_seconds:,.3g} ms" if row.recomputed_seconds else "-",
            f"{row.moved_bytes / 1e9:,.3g} GB",
            f"{row.minimum_bytes / 1e9:,.3g} GB",
        )
        for row in plan.kernels
        if row.seconds > SMALL_PART * total
    ]
    header = ("kernels of", "a step", "time, modelled", "recomputed", "moved", "each array once")
    return align(rows, header, "<>>>>>") if rows else ""


def _options(plan: Plan) -> str:
    rows = [
        (option.name, str(option.value), option.reason) for option in plan.compiled.assembly.steps.compiling.options
    ]
    why = "compiled a second time: without a device for autotuning, the compiler found no tiles for a Triton product"
    rows += [(name, str(value), why) for name, value in plan.compiled.added_options.items()]
    if not rows:
        return ""
    return align(rows, ("compiler option", "value", "reason"))


def _findings(plan: Plan) -> str:
    found = findings(plan)
    if not found:
        return "findings     none"
    return "\n".join(["findings", *(f"  - {finding.line()}" for finding in found)])


def to_json(plan: Plan) -> JsonObject:
    """Returns a plan as a JSON object; numbers are in bytes, seconds and FLOPs, and null means unknown."""
    memory, stats, timing = plan.memory, plan.memory.compiler, plan.timing
    assembly = plan.compiled.assembly
    return {
        "cluster": plan.cluster.text,
        "num_devices": assembly.mesh.size,
        "mesh": dict(assembly.mesh.shape),
        "fits": memory.fits,
        "memory": {
            "arguments_bytes": stats and stats.arguments_bytes,
            "arguments_expected_bytes": memory.arguments_expected_bytes,
            "temporary_bytes": stats and stats.temporary_bytes,
            "output_bytes": stats and stats.output_bytes,
            "alias_bytes": stats and stats.alias_bytes,
            "peak_bytes": stats and stats.peak_bytes,
            "host_bytes": stats and stats.host_bytes,
            "device_bytes": memory.device_bytes,
            "capacity_bytes": memory.capacity_bytes,
            "margin_bytes": memory.margin_bytes,
            "uncertainty_bytes": memory.uncertainty_bytes,
            "parameters_bytes": memory.state.parameters,
            "gradients_bytes": memory.state.gradients,
            "optimizer_bytes": memory.state.moments,
            "extra_bytes": memory.state.extra,
            "activations_bytes": memory.activations_bytes,
            "batch_bytes": memory.batch_bytes,
            "unread": list(memory.unread),
            "longest_tokens": longest(assembly.config, memory),
            "largest": [dataclasses.asdict(buffer) for buffer in memory.buffers],
        },
        "collectives": _traffic_json(plan.traffic, timing),
        "other_programs": [_other_json(program) for program in plan.others],
        "wire_bytes_minimum": dict(plan.minimum),
        "wire_bytes_idle_rows": dict(plan.idle_bytes),
        "wire_bytes_executor": plan.executor_bytes,
        "layer_gradients": plan.layer_gradients and dataclasses.asdict(plan.layer_gradients),
        "flops": {
            "compiled": plan.work and plan.work.total,
            "compiled_full_attention": plan.work and plan.work.full,
            "traced": plan.compiled.traced_flops,
            "model_causal": plan.model_flops and plan.model_flops[0],
            "model_full": plan.model_flops and plan.model_flops[1],
        },
        "modelled": {
            "step_seconds_low": timing and timing.low_seconds,
            "step_seconds": timing and timing.step_seconds,
            "step_seconds_high": timing and timing.high_seconds,
            **dict(zip(("mfu_low", "mfu", "mfu_high"), plan.mfu or (None,) * 3, strict=True)),
            "calibration_factor": timing and timing.factor,
            "assumptions": timing and dataclasses.asdict(plan.assumptions),
            "links": timing and _links_json(timing),
            "kernels": [dataclasses.asdict(row) for row in plan.kernels],
        },
        "compiler_options": dict(plan.compiled.options),
        "compiler_options_added": dict(plan.compiled.added_options),
        "attention": plan.compiled.attention,
        "compile_seconds": plan.compiled.seconds,
        "findings": [finding._asdict() for finding in findings(plan)],
    }


def _links_json(timing: Timing) -> list[JsonObject]:
    return [
        {"axis": axes, "kind": kind, "link": link and dataclasses.asdict(link)}
        for (axes, kind), link in timing.links.items()
    ]


def _traffic_json(traffic: Sequence[collectives.Traffic], timing: Timing | None) -> list[JsonObject]:
    sending = timing.sending if timing else {}
    unknown = dict.fromkeys(Sending._fields)
    return [
        dataclasses.asdict(row) | (sending[row.axis, row.kind]._asdict() if sending else unknown) for row in traffic
    ]


def _other_json(program: OtherProgram) -> JsonObject:
    timing = program.timing
    return {
        "name": program.name,
        "every": program.every,
        "collectives": _traffic_json(program.traffic, timing),
        "wire_bytes_minimum": program.minimum_bytes,
        "seconds_low": timing and timing.low_seconds,
        "seconds": timing and timing.step_seconds,
        "seconds_high": timing and timing.high_seconds,
    }
