"""Plans the large configurations and prints a line of Markdown for each: the table in README and docs/results/plans.md.

The last column uses an older time model for the same programs, so that old and new tables can be compared.

Extras: plan-gpu
"""

import argparse
import dataclasses
import functools
import sys
from collections.abc import Sequence

import jax

from meshtrain.cli.tables import format_bytes
from meshtrain.config.resolve import parse
from meshtrain.errors import run
from meshtrain.plan import planner, scheduled_hlo, text_report
from meshtrain.plan.cluster import clusters
from meshtrain.plan.cluster.compile import Compiler, compile_step, program_of, with_tiles
from meshtrain.plan.cluster.compile_thread import waiting_for
from meshtrain.plan.timing.streams import Assumptions, timing
from meshtrain.sharding.rules import sizes_text

LARGE = (
    "llama3_8b=h100:8x8",
    "llama3_8b_long=h100:8x8",
    "llama3_70b=a100:256x8",
    "mixtral_8x7b=h100:8x8",
    "qwen3_30b_a3b=h100:8x8",
    "qwen3_235b_a22b=h100:64x8",
    "gpt3_175b=a100:512x8",
    "llama3_405b=h100:896x8",
    "mtnlg_530b=a100:560x8",
)
HEADER = (
    "| configuration | cluster | mesh | state | peak | usable | sent / minimum | step, modelled | MFU, modelled "
    "| middle by the clock of db9c3b5 |",
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
)
BEFORE = Assumptions(
    attention_efficiency=0.6, triton_efficiency=0.3, memory_efficiency=0.8, fast_memory_efficiency=0.8,
    launch_seconds=0.0, slow_launch_seconds=0.0, slow_grouped_efficiency=1.0,
)  # fmt: skip


def line(by: Compiler, name: str, cluster: str) -> str:
    """Returns the row of a configuration."""
    config, _ = parse([f"--config=configs/{name}.py"], reads_data=False)
    target = clusters.open_cluster(cluster)
    shape = planner.shape_on(config, target)
    plan = planner.plan(config, shape, target, Assumptions(), None, functools.partial(compile_step, by=by))
    memory, now, mfu, program = plan.memory, plan.timing, plan.mfu, program_of(plan.compiled)
    stats = memory.compiler
    assert stats
    assert now
    assert mfu
    assert program
    then = dataclasses.replace(plan, timing=timing(plan.compiled.assembly.mesh, target, program, BEFORE))
    assert then.timing
    assert then.mfu
    # The pipeline uses the executor's own formula, because idle ticks send too, and the vocabulary is split over
    # stages.
    least = dict(plan.minimum) | ({"pipeline": plan.executor_bytes} if plan.executor_bytes else {})
    ratios = {axis: text_report.sent_along(plan, axis) / bound for axis, bound in least.items() if bound}
    ratios |= text_report.working_ratios(plan)
    cells = (
        f"`{name}`",
        f"`{cluster}`",
        sizes_text(shape),
        format_bytes(stats.arguments_bytes),
        format_bytes(stats.peak_bytes),
        f"{format_bytes(memory.capacity_bytes or 0)}: {text_report.VERDICTS[memory.fits]}",
        ", ".join(f"{axis} {ratio:.2f}" for axis, ratio in ratios.items()),
        text_report.step_interval(now),
        text_report.interval(mfu, ".0%"),
        f"{then.timing.step_seconds:.3g} s, {then.mfu[1]:.1%}",
    )
    return f"| {' | '.join(cells)} |"


def main(argv: Sequence[str]) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="scripts/bench plan", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "plans", metavar="CONFIG=CLUSTER", nargs="*", default=LARGE, help="default: the configurations of the table"
    )
    plans = parser.parse_args(argv).plans
    jax.config.update("jax_enable_compilation_cache", False)
    print(*HEADER, sep="\n")
    first, _, cluster = plans[0].partition("=")
    elsewhere = scheduled_hlo.server(parse([f"--config=configs/{first}.py"], reads_data=False)[0], cluster)
    for words in plans:
        name, _, cluster = words.partition("=")
        row = waiting_for(name, functools.partial(elsewhere, line, name, cluster)) if elsewhere else None
        print(row or line(with_tiles, name, cluster), flush=True)
    return 0


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))
