"""Compiles the train step for a cluster that need not exist, and reports its memory, traffic and modelled time.

python -m meshtrain plan --config=configs/llama3_8b.py --cluster=h100:8x8 [--json=FILE] [--html=FILE]
python -m meshtrain plan --config=configs/llama3_8b.py --cluster=h100:8x8 --search[=mesh] [--search-compiles=N]
python -m meshtrain plan --config=configs/llama3_8b.py --cluster=h100:8x8 --scaling=8,16,...,4096 [--chart=FILE.png]
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence

import jax

from meshtrain.cli import flags, output_files
from meshtrain.config.resolve import configure
from meshtrain.config.schema import Config
from meshtrain.errors import run
from meshtrain.hardware.links import read, refuse_other_platform
from meshtrain.observe.progress import phase
from meshtrain.plan import arguments, planner, scheduled_hlo, text_report
from meshtrain.plan.cluster import clusters
from meshtrain.plan.cluster.compile_thread import waiting_for
from meshtrain.plan.search import changes, faster, ranking
from meshtrain.plan.timing import streams
from meshtrain.plan.timing.streams import Assumptions
from meshtrain.sharding.rules import AXES
from meshtrain.user_functions import flag_module


def main(argv: Sequence[str]) -> int:
    """Runs `meshtrain plan`: prints the plan of a step, the ranking of a search, or scaling tables; returns 0.

    Args:
      argv: the command-line arguments, without the program's name.

    Raises:
      UserError: the arguments or the configuration are invalid, or do not fit the cluster.
    """
    given = flags.arguments(argv, arguments.parser())
    if given.search:
        # The search replaces the mesh, so it need not fit the cluster.
        given.overrides |= {f"mesh.{axis}": "1" for axis in AXES}
    config = configure(given, [*arguments.problems(given), *arguments.wrong_size(given)], reads_data=False)
    measured = streams.measured_seconds(given.calibrate)
    links = read(given.links) if given.links else None
    # A cached program has no compiler warnings, which the report needs.
    jax.config.update("jax_enable_compilation_cache", False)
    compiled_by = None if given.search or given.scaling else scheduled_hlo.start_compiling(config, given.cluster)
    elsewhere = scheduled_hlo.server(config, given.cluster) if given.search or given.scaling else None
    cluster = clusters.open_cluster(given.cluster)
    if links:
        refuse_other_platform(given.links, links, cluster.devices[0].device_kind)
    assumptions = Assumptions(links=links)
    if given.search:
        return run_search(config, cluster, given, assumptions, elsewhere)
    if given.scaling:
        return run_scaling(config, cluster, given, assumptions, elsewhere)
    shape = planner.shape_on(config, cluster)
    with phase("compile") as say:
        what = f"compiling for {given.cluster}"
        made = waiting_for(what, lambda: planner.plan(config, shape, cluster, assumptions, measured, compiled_by))
        say(given.cluster)
    if not given.calibrate:
        made = faster.with_faster(made)
    print(f"\n{text_report.text(made)}")
    if made.memory.fits is False:
        print(f"\n{changes.text(made)}", flush=True)
    write(given, text_report.to_json(made), lambda: flag_module("--html").plan_page(made))
    return 0


def run_scaling(
    config: Config,
    cluster: clusters.Cluster,
    given: argparse.Namespace,
    assumptions: Assumptions,
    elsewhere: scheduled_hlo.Work | None,
) -> int:
    """Plans the configuration on the numbers of devices in `--scaling`, prints the tables, writes the files; returns 0.

    Args:
      config: the configuration to scale; its mesh fits `cluster`.
      cluster: the cluster that the user named; clusters of other sizes have the same kind of devices and hosts.
      given: the parsed arguments of `plan`.
      assumptions: the assumptions of the time model.
      elsewhere: the function that `scheduled_hlo.server` returned; it compiles programs in other processes, only up to
        scheduling. None: programs are compiled completely, in this process.
    """
    command = flag_module("--scaling")
    programs = int(given.programs or (arguments.MOST_PROGRAMS if elsewhere else arguments.MOST_WHOLE))
    found = command.print_scaling(config, cluster, given.scaling, assumptions, programs=programs, elsewhere=elsewhere)
    write(given, command.json_content(found), lambda: command.scaling_page(found))
    if given.chart:
        output_files.write("--chart", given.chart, command.chart(found, given.chart[-3:].lower()))
        print(f"written      {given.chart}")
    return 0


def run_search(
    config: Config,
    cluster: clusters.Cluster,
    given: argparse.Namespace,
    assumptions: Assumptions,
    elsewhere: scheduled_hlo.Work | None,
) -> int:
    """Ranks configurations for a cluster; prints the table and the arguments of the best configuration; returns 0.

    Args:
      config: the configuration to vary; its mesh is ignored.
      cluster: the target cluster.
      given: the parsed arguments of `plan`.
      assumptions: the assumptions of the time model.
      elsewhere: the function that `scheduled_hlo.server` returned; it compiles programs in other processes, only up to
        scheduling. None: programs are compiled completely, in this process.
    """
    ranked = ranking.search(
        config,
        cluster,
        assumptions,
        only_mesh=given.search == "mesh",
        most=int(given.search_compiles or ranking.COMPILED),
        compiled_by=scheduled_hlo.compile_elsewhere(elsewhere),
    )
    print(f"\n{ranking.text(ranked)}")
    write(given, ranking.to_json(ranked), lambda: flag_module("--html").search_page(ranked))
    return 0


def write(given: argparse.Namespace, content: object, make_page: Callable[[], str]) -> None:
    """Writes the files that `--json` and `--html` name; each file appears complete or not at all.

    Args:
      given: the parsed arguments of `plan`; a flag without a value writes no file.
      content: the content of the JSON file.
      make_page: function that returns the HTML page; called only if `--html` is given.

    Raises:
      UserError: a file cannot be written.
    """
    if given.json:
        output_files.write("--json", given.json, json.dumps(content, indent=2) + "\n")
        print(f"written      {given.json}")
    if given.html:
        output_files.write("--html", given.html, make_page())
        print(f"written      {given.html}")


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))
