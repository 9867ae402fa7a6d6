"""Compiles the train step for a cluster that need not exist, and reports its memory, traffic and modelled time.

python -m meshtrain plan --config=configs/llama3_8b.py --cluster=h100:8x8 [--json=FILE] [--html=FILE]
python -m meshtrain plan --config=configs/llama3_8b.py --cluster=h100:8x8 --search[=mesh] [--search-compiles=N]
python -m meshtrain plan --config=configs/llama3_8b.py --cluster=h100:8x8 --scaling=8,16,...,4096 [--chart=FILE.png]
"""

import argparse
import functools
import json
import sys
from collections.abc import Callable, Sequence

import jax

from meshtrain.cli import flags
from meshtrain.config.config import Config, built, configure, file_content
from meshtrain.errors import UserError, refusals, run
from meshtrain.files import target_problems
from meshtrain.hardware.links import read, refuse_other_platform
from meshtrain.observe.charts import picture
from meshtrain.observe.progress import phase
from meshtrain.plan import html_page, planner, scheduled_dump, text_report
from meshtrain.plan.scaling import cluster_sizes, scaling, scaling_report
from meshtrain.plan.search import changes, ranking
from meshtrain.plan.target import clusters
from meshtrain.plan.target.compile_thread import waiting_for
from meshtrain.plan.timing import streams
from meshtrain.plan.timing.streams import Assumptions
from meshtrain.sharding.mesh import mesh_shape
from meshtrain.sharding.rules import AXES

ENDINGS = {"json": (), "html": (".html", ".htm"), "chart": (".png", ".svg")}


def arguments() -> argparse.ArgumentParser:
    """Returns the parser of the arguments that only `plan` has."""
    extra = argparse.ArgumentParser(
        prog="python -m meshtrain plan",
        description="Compiles the train step for a cluster that need not exist; reports memory, traffic and time.",
        add_help=False,
    )
    whole = f"{scaling.MOST_WHOLE} if compiled whole"

    def add(name: str, metavar: str, text: str) -> None:
        extra.add_argument(f"--{name}", metavar=metavar, default="", help=text)

    add("cluster", "NAME", "h100:8x8 (hosts x GPUs), v5e:16x16, 2xv5e:16x16 (slices), cpu:8, ...")
    add("json", "FILE", "also write the report for programs")
    add("html", "FILE", "also write the report as one page with charts")
    add("calibrate", "FILE", "metrics.jsonl of a measured run, or its seconds a step; scales times")
    add("links", "FILE", "latency and bandwidth that bench-collectives has measured on such a cluster (--json)")
    ways = "rank meshes, schedules, ... instead; mesh: only meshes"
    extra.add_argument("--search", nargs="?", const="all", default="", choices=("all", "mesh"), help=ways)
    add("search-compiles", "N", f"compile at most N candidates for --search ({ranking.COMPILED})")
    add("scaling", "SIZES", "speedup and efficiency on these numbers of devices instead, such as 8,16,...,4096")
    add("programs", "N", f"compile at most N for --scaling ({scaling.MOST_PROGRAMS}; {whole})")
    add("chart", "FILE", "also draw --scaling, as .png or .svg")
    return extra


def main(argv: Sequence[str]) -> int:
    """Plans a step, or searches meshes, or reports scaling; prints the report and returns 0.

    Raises:
      UserError: the arguments or the configuration are invalid, or do not fit the cluster.
    """
    given = flags.arguments(argv, arguments())
    if given.search:
        # The search replaces the mesh, so it need not fit the cluster.
        given.overrides |= {f"mesh.{axis}": "1" for axis in AXES}
    config = configure(given, [*problems(given), *wrong_size(given)], reads_data=False)
    measured = streams.measured_seconds(given.calibrate)
    links = read(given.links) if given.links else None
    # A cached program has no compiler warnings, which the report needs.
    jax.config.update("jax_enable_compilation_cache", False)
    compiled_by = None if given.search or given.scaling else scheduled_dump.started(config, given.cluster)
    elsewhere = scheduled_dump.server(config, given.cluster) if given.search or given.scaling else None
    cluster = clusters.open_cluster(given.cluster)
    if links:
        refuse_other_platform(given.links, links, cluster.devices[0].device_kind)
    assumptions = Assumptions(links=links)
    if given.search:
        return searched(config, cluster, given, assumptions, elsewhere)
    if given.scaling:
        return scaled(config, cluster, given, assumptions, elsewhere)
    shape = planner.shape_on(config, cluster)
    with phase("compile") as say:
        what = f"compiling for {given.cluster}"
        made = waiting_for(what, lambda: planner.plan(config, shape, cluster, assumptions, measured, compiled_by))
        say(given.cluster)
    print(f"\n{text_report.text(made)}")
    if made.memory.fits is False:
        print(f"\n{changes.text(made)}", flush=True)
    write(given, text_report.to_json(made), lambda: html_page.plan_page(made))
    return 0


def problems(given: argparse.Namespace) -> list[str]:
    """Returns an error line for each problem of plan's own arguments that is visible without a compiler."""
    if given.cluster:
        problems = refusals(clusters.parse, given.cluster)
    else:
        problems = [f"--cluster: got nothing; allowed: {clusters.ALLOWED}; nearest: --cluster=h100:8x8"]
    if given.links and given.cluster.startswith("cpu"):
        problems.append(
            f"--links: got '{given.links}' for {given.cluster}, whose time is not modelled; allowed: a cluster of GPUs "
            "or TPUs; nearest: leave it out"
        )
    elif given.links:
        problems += refusals(read, given.links)
    if given.search and given.calibrate:
        problems.append(
            "--calibrate: got it together with --search, which ranks by the bare model; allowed: one of them; nearest: "
            "leave it out"
        )
    problems += [*search_problems(given), *scaling_problems(given)]
    for name, example in (("json", "plan.json"), ("html", "plan.html"), ("chart", "scaling.png")):
        if path := getattr(given, name):
            problems += target_problems(f"--{name}", path, example, ENDINGS[name])
    return problems


def wrong_size(given: argparse.Namespace) -> list[str]:
    """Returns the error line for a mesh that does not fit the cluster, and replaces this mesh by a single device.

    Otherwise the check of the configuration would report sizes that do not divide over a mesh that is wrong anyway.
    """
    if given.scaling:  # which replaces the mesh
        return []
    try:
        named = clusters.parse(given.cluster)
        slice_size = named.num_devices // named.num_slices if named.num_slices > 1 else 0
        wanted = built(file_content(given.config), given.overrides)[0].mesh
    except UserError:
        return []  # reported with the others
    problems = refusals(lambda: mesh_shape(wanted, named.num_devices, simulated=False, slice_size=slice_size))
    if problems:
        given.overrides |= {f"mesh.{axis}": "1" for axis in AXES}
    return problems


def scaling_problems(given: argparse.Namespace) -> list[str]:
    """Returns an error line for each problem of `--scaling` and of the arguments that belong to it."""
    if not given.scaling:
        return [
            f"--{name}: got '{value}' without --scaling; allowed: both; nearest: {cluster_sizes.EXAMPLE}"
            for name in ("programs", "chart")
            if (value := getattr(given, name))
        ]
    problems = refusals(cluster_sizes.read_sizes, given.scaling)
    for name in ("search", "calibrate"):
        if getattr(given, name):
            problems.append(f"--{name}: got it together with --scaling; allowed: one of them; nearest: leave it out")
    return problems + count_problems("--programs", given.programs, scaling.MOST_PROGRAMS)


def search_problems(given: argparse.Namespace) -> list[str]:
    """Returns an error line if `--search-compiles` is invalid."""
    if given.search_compiles and not given.search:
        return [
            f"--search-compiles: got '{given.search_compiles}' without --search; allowed: both; "
            f"nearest: --search --search-compiles={ranking.COMPILED}"
        ]
    return count_problems("--search-compiles", given.search_compiles, ranking.MOST_COMPILED)


def count_problems(name: str, text: str, most: int) -> list[str]:
    """Returns an error line if a text is neither empty nor a number from 1 to `most`."""
    # The length is checked first: Python does not convert numbers with thousands of digits.
    if not text or (text.isdecimal() and len(text) <= len(str(most)) and 1 <= int(text) <= most):
        return []
    return [f"{name}: got '{text}'; allowed: 1 to {most}; nearest: {most if text.strip('0').isdecimal() else 1}"]


def scaled(
    config: Config,
    cluster: clusters.Cluster,
    given: argparse.Namespace,
    assumptions: Assumptions,
    elsewhere: scheduled_dump.Work | None,
) -> int:
    """Plans the configuration on several numbers of devices, and prints the tables; for `elsewhere` see `planned`."""
    programs = int(given.programs or (scaling.MOST_PROGRAMS if elsewhere else scaling.MOST_WHOLE))
    plan_point = functools.partial(scaling.planned, elsewhere=elsewhere)
    wanted = cluster_sizes.read_sizes(given.scaling)
    found = scaling.scaling(config, cluster, wanted, assumptions, programs=programs, plan_point=plan_point)
    print(f"\n{scaling_report.text(found)}")
    write(given, scaling_report.to_json(found), lambda: html_page.scaling_page(found))
    if given.chart:
        chart = picture(html_page.scaling_panels(found), html_page.NOTE, given.chart[-3:].lower())
        flags.write("--chart", given.chart, chart)
        print(f"written      {given.chart}")
    return 0


def searched(
    config: Config,
    cluster: clusters.Cluster,
    given: argparse.Namespace,
    assumptions: Assumptions,
    elsewhere: scheduled_dump.Work | None,
) -> int:
    """Ranks configurations for a cluster; prints the table and the arguments of the best configuration.

    Args:
      config: its mesh is ignored.
      cluster: the target.
      given: the arguments of `plan`.
      assumptions: of the model of time.
      elsewhere: see `scheduled_dump.compiled_by`.
    """
    ranked = ranking.search(
        config,
        cluster,
        assumptions,
        only_mesh=given.search == "mesh",
        most=int(given.search_compiles or ranking.COMPILED),
        compiled_by=scheduled_dump.compiled_by(elsewhere),
    )
    print(f"\n{ranking.text(ranked)}")
    write(given, ranking.to_json(ranked), lambda: html_page.search_page(ranked))
    return 0


def write(given: argparse.Namespace, content: object, make_page: Callable[[], str]) -> None:
    """Writes the files of `--json` and `--html`; each file appears complete or not at all."""
    if given.json:
        flags.write("--json", given.json, json.dumps(content, indent=2) + "\n")
        print(f"written      {given.json}")
    if given.html:
        flags.write("--html", given.html, make_page())
        print(f"written      {given.html}")


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))
