"""Draws a schedule, with stages as rows and time as columns, as text or as a picture.

Uses no JAX, and matplotlib only for the picture.
"""

import collections
from fractions import Fraction
from typing import TYPE_CHECKING

from meshtrain.errors import Problem, UserError
from meshtrain.pipeline.check import Costs, Span, bubbles, peak_in_flight, run_freely, run_in_step
from meshtrain.pipeline.schedules import Schedule, build, describe

if TYPE_CHECKING:  # imported where it is used, because it takes half a second
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_TEXT_COLUMNS = 200_000
# The character that fills an action's cell after the label, so that the action's duration is visible.
FILL = {"F": " ", "B": "-"}
WORDS = {"F": "forward", "B": "backward"}
# Colours that also differ in grayscale and for colour-blind readers.
COLOURS = {"F": "#8db8e3", "B": "#f2a65a"}


def caption(schedule: Schedule, costs: Costs) -> list[str]:
    """Returns a chart's caption as three lines: sizes and durations, bubble fractions, and memory.

    The memory line has the largest number of microbatches in flight on each stage. If stages have several chunks, it
    has the largest number of (microbatch, chunk) pairs.
    """
    chunks = f", {schedule.num_chunks} chunks a stage" if schedule.num_chunks > 1 else ""
    durations = f"forward {_number(costs.forward)}, backward {_number(costs.backward)}"
    if costs.transfer:
        durations += f", transfer {_number(costs.transfer)}"
    free, step = bubbles(schedule, costs)
    held = " ".join(str(peak) for peak in peak_in_flight(schedule))
    what = "microbatches" if schedule.num_chunks == 1 else "microbatches x chunks"
    return [
        f"{schedule.name}: {schedule.num_stages} stages, {schedule.num_microbatches} microbatches{chunks}; {durations}",
        f"bubble {free:.1%} if stages run freely, {step:.1%} if they run in lock step",
        f"memory: at most {held} {what} in flight (first to last stage)",
    ]


def as_text(schedule: Schedule, costs: Costs, *, in_step: bool = False, max_columns: int = 120) -> str:
    """Returns a chart as lines of text, each at most `max_columns` wide; long charts are split into several blocks.

    Args:
      schedule: the schedule, which has passed `check.prove`.
      costs: the durations of actions.
      in_step: whether all stages advance together, row by row; otherwise each action starts when its inputs are
        available.
      max_columns: the maximum number of characters in a line.

    Raises:
      UserError: the complete chart, not split into blocks, would have more than MAX_TEXT_COLUMNS columns.
    """
    spans = (run_in_step if in_step else run_freely)(schedule, costs)
    labels = [describe(span.action, schedule.num_chunks) for span in spans]
    shortest = min((span.end - span.start for span in spans if span.end > span.start), default=Fraction(1))
    scale = (max(len(label) for label in labels) + 1) / shortest
    makespan = max(span.end for span in spans)
    if makespan * scale > MAX_TEXT_COLUMNS:
        raise UserError(
            Problem(
                "costs",
                got=(
                    f"a chart of {float(makespan * scale):.3g} columns, because the shortest action lasts only "
                    f"{float(shortest):g}"
                ),
                condition="as text",
                allowed=f"{MAX_TEXT_COLUMNS} columns",
                nearest="--json, or closer costs",
            )
        )
    lines = [[" "] * round(makespan * scale) for _ in range(schedule.num_stages)]
    for span, label in zip(spans, labels, strict=True):
        start, end = round(span.start * scale), round(span.end * scale)
        lines[span.stage][start:end] = f"{label:{FILL[span.action.kind]}<{end - start - 1}} "
    head = max(len("stage 0"), len(f"stage {schedule.num_stages - 1}"))
    width = max(max_columns - head - 2, 1)
    blocks = []
    for start in range(0, len(lines[0]), width):
        block = [f"{'time':<{head}}  {_ruler(makespan, scale)[start : start + width]}"]
        block += [f"{f'stage {s}':<{head}}  {''.join(line[start : start + width])}" for s, line in enumerate(lines)]
        blocks.append("\n".join(line.rstrip() for line in block))
    return "\n\n".join(blocks) + "\n\n" + "\n".join(caption(schedule, costs)) + "\n"


def _number(value: Fraction) -> str:
    return f"{float(value):g}"


def _ruler(makespan: Fraction, scale: Fraction) -> str:
    """Returns the time axis of a text chart as one line, with numbers at intervals that are wide enough to print them.

    Args:
      makespan: the time at which the last action ends.
      scale: characters per unit of time.
    """
    distance = Fraction(1)
    while distance * scale < 12:
        distance *= 2
    columns, tick = [" "] * (round(makespan * scale) + 12), Fraction(0)
    while tick <= makespan:
        column, number = round(tick * scale), _number(tick)
        columns[column : column + len(number)] = number
        tick += distance
    return "".join(columns).rstrip()


def figure(schedule: Schedule, costs: Costs, *, in_step: bool = False) -> "Figure":
    """Returns a chart as a matplotlib figure.

    The time axis extends at least to the end of gpipe with the same stages, layers and microbatches, so that charts of
    different schedules have the same scale.

    Args:
      schedule: the schedule, which has passed `check.prove`.
      costs: the durations of actions.
      in_step: whether all stages advance together, row by row; otherwise each action starts when its inputs are
        available.
    """
    # Without pyplot, whose state is global to the process.
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    run, stages, num_chunks = run_in_step if in_step else run_freely, schedule.num_stages, schedule.num_chunks
    spans = run(schedule, costs)
    gpipe = build("gpipe", num_stages=stages, num_microbatches=schedule.num_microbatches)
    stage_costs = Costs(costs.forward * num_chunks, costs.backward * num_chunks, transfer=costs.transfer)
    own_end, gpipe_end = (float(max(span.end for span in timed)) for timed in (spans, run(gpipe, stage_costs)))
    end = max(own_end, gpipe_end)
    inches = min(max(end * 0.28 / float(min(stage_costs.forward, stage_costs.backward)), 8.0), 40.0)
    drawn = Figure(figsize=(inches, 0.42 * stages + 1.5), layout="constrained")
    axes = drawn.add_subplot()
    groups = collections.defaultdict[tuple[int, str, int], list[tuple[float, float]]](list)
    for span in spans:
        bar = (float(span.start), float(span.end - span.start))
        groups[span.stage, span.action.kind, span.action.chunk].append(bar)
    for (stage, kind, chunk), bars in groups.items():
        shade = _lighter(COLOURS[kind], chunk / max(num_chunks - 1, 1))
        axes.broken_barh(bars, (stage - 0.46, 0.92), facecolors=shade, edgecolors="white", linewidth=0.8)
    _write_numbers(axes, spans, inches * 72 / end)
    axes.set(xlim=(0, end), ylim=(stages - 0.5, -0.5), xlabel="time" + ", to the end of gpipe" * (own_end < gpipe_end))
    axes.set_yticks(range(stages), [f"stage {stage}" for stage in range(stages)])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    title, bubbles, memory = caption(schedule, costs)
    axes.set_title(title, loc="left", fontsize=10, pad=24)
    drawn.supxlabel(f"{bubbles}\n{memory}", x=0.01, ha="left", fontsize=9)
    handles = [Patch(color=colour, label=WORDS[kind]) for kind, colour in COLOURS.items()]
    if num_chunks > 1:
        handles.append(Patch(color=_lighter(COLOURS["F"], 1), label="lighter: later chunks"))
    axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1), ncols=len(handles), frameon=False, fontsize=9)
    return drawn


def _lighter(colour: str, share: float) -> tuple[float, float, float]:
    """Returns a lighter shade of a colour as (red, green, blue), each from 0 to 1.

    Bars of later chunks of a stage are drawn in lighter shades.

    Args:
      colour: the colour as `#rrggbb`.
      share: from 0 (the colour itself) to 1 (the lightest shade: 55 % white mixed into the colour).
    """
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (part + (1 - part) * 0.55 * share for part in parts)
    return red, green, blue


def _write_numbers(axes: "Axes", spans: list[Span], points: float) -> None:
    """Writes the number of the microbatch into each bar of the chart that is large enough for it.

    Args:
      axes: the chart, with time along x and stages along y.
      spans: the timeline, a span for each bar.
      points: the width of one unit of time in typographic points (1/72 inch).
    """
    digits = max(len(str(span.action.microbatch)) for span in spans)
    for span in spans:
        size = min(9.0, float(span.end - span.start) * points / (digits * 0.75))
        if size >= 4:
            place = (float(span.start + span.end) / 2, span.stage + 0.03)
            axes.text(*place, str(span.action.microbatch), ha="center", va="center", fontsize=size)
