"""Defines the command-line arguments that only `plan` accepts, and finds errors in them before the compiler starts."""

import argparse

from meshtrain.config.build import build, file_content
from meshtrain.errors import Problem, UserError, refusals
from meshtrain.files import target_problems
from meshtrain.hardware.links import read
from meshtrain.plan.cluster import clusters
from meshtrain.plan.search import ranking
from meshtrain.sharding.mesh import mesh_shape
from meshtrain.sharding.rules import AXES
from meshtrain.user_functions import flag_module, flag_problems

ENDINGS = {"json": (), "html": (".html", ".htm"), "chart": (".png", ".svg")}
SCALING_EXAMPLE = "--scaling=8,16,...,4096"
MOST_PROGRAMS = 64  # maximum and default of --programs
MOST_WHOLE = 40  # default of --programs if programs are compiled completely, which takes twice as long


def parser() -> argparse.ArgumentParser:
    """Returns a parser of the arguments that only `plan` accepts; each value is a string, empty if not given."""
    extra = argparse.ArgumentParser(
        prog="python -m meshtrain plan",
        description="Compiles the train step for a cluster, which need not exist; reports memory, traffic and time.",
        add_help=False,
    )
    whole = f"{MOST_WHOLE} if compiled completely"

    def add(name: str, metavar: str, text: str) -> None:
        extra.add_argument(f"--{name}", metavar=metavar, default="", help=text)

    add("cluster", "NAME", "h100:8x8 (hosts x GPUs), v5e:16x16, 2xv5e:16x16 (slices), cpu:8, ...")
    add("json", "FILE", "also write the report for programs")
    add("html", "FILE", "also write the report as one page with charts")
    add("calibrate", "FILE", "metrics.jsonl of a measured run, or its seconds a step; scales modelled times")
    add("links", "FILE", "latency and bandwidth measured by bench-collectives (--json) on a similar cluster")
    ways = "rank meshes, schedules, ... instead; mesh: only meshes"
    extra.add_argument("--search", nargs="?", const="all", default="", choices=("all", "mesh"), help=ways)
    add("search-compiles", "N", f"compile at most N candidates for --search ({ranking.COMPILED})")
    add("scaling", "SIZES", "speedup and efficiency on these numbers of devices instead, such as 8,16,...,4096")
    add("programs", "N", f"compile at most N for --scaling ({MOST_PROGRAMS}; {whole})")
    add("chart", "FILE", "also draw --scaling, as .png or .svg")
    return extra


def problems(given: argparse.Namespace) -> list[Problem]:
    """Returns an error for each invalid argument of `plan` that can be detected without a compiler.

    Args:
      given: the parsed arguments of `plan`.
    """
    if given.cluster:
        problems = refusals(clusters.parse, given.cluster)
    else:
        problems = [Problem("--cluster", got="nothing", allowed=clusters.ALLOWED, nearest="--cluster=h100:8x8")]
    if given.links and given.cluster.startswith("cpu"):
        problems.append(
            Problem(
                "--links",
                got=f"'{given.links}' for {given.cluster}, for which no times are modelled",
                allowed="a cluster of GPUs or TPUs",
                nearest="leave it out",
            )
        )
    elif given.links:
        problems += refusals(read, given.links)
    if given.search and given.calibrate:
        problems.append(
            Problem(
                "--calibrate",
                got="both --calibrate and --search, which ranks by uncalibrated times",
                allowed="one of them",
                nearest="leave it out",
            )
        )
    problems += [*search_problems(given), *scaling_problems(given), *flag_problems("--html", given.html)]
    for name, example in (("json", "plan.json"), ("html", "plan.html"), ("chart", "scaling.png")):
        if path := getattr(given, name):
            problems += target_problems(f"--{name}", path, example, ENDINGS[name])
    return problems


def wrong_size(given: argparse.Namespace) -> list[Problem]:
    """Checks that the mesh fits the cluster; if it does not, replaces the mesh in `given` by a single device.

    Without the replacement, the later check of the configuration would also report every size that is not divisible by
    an axis of the wrong mesh.

    Args:
      given: the parsed arguments of `plan`; its `overrides` are changed if the mesh does not fit.

    Returns:
      The errors; [] if the mesh fits, or if `--scaling` is given, which replaces the mesh. Also [] if an argument
      cannot be parsed, because `problems` reports this error.
    """
    if given.scaling:  # which replaces the mesh
        return []
    try:
        named = clusters.parse(given.cluster)
        slice_size = named.num_devices // named.num_slices if named.num_slices > 1 else 0
        wanted = build(file_content(given.config), given.overrides)[0].mesh
    except UserError:
        return []  # `problems` reports it
    problems = refusals(lambda: mesh_shape(wanted, named.num_devices, simulated=False, slice_size=slice_size))
    if problems:
        given.overrides |= {f"mesh.{axis}": "1" for axis in AXES}
    return problems


def scaling_problems(given: argparse.Namespace) -> list[Problem]:
    """Returns an error for each invalid value of `--scaling` and `--programs`, and for wrong combinations of flags.

    `--programs` and `--chart` require `--scaling`; `--search` and `--calibrate` cannot be combined with it.

    Args:
      given: the parsed arguments of `plan`.
    """
    if not given.scaling:
        return [
            Problem(f"--{name}", got=f"'{value}' without --scaling", allowed="both", nearest=SCALING_EXAMPLE)
            for name in ("programs", "chart")
            if (value := getattr(given, name))
        ]
    if missing := flag_problems("--scaling", given.scaling):
        return missing
    problems: list[Problem] = flag_module("--scaling").problems(given.scaling)
    for name in ("search", "calibrate"):
        if getattr(given, name):
            problems.append(
                Problem(f"--{name}", got=f"both --{name} and --scaling", allowed="one of them", nearest="leave it out")
            )
    return problems + count_problems("--programs", given.programs, MOST_PROGRAMS)


def search_problems(given: argparse.Namespace) -> list[Problem]:
    """Returns an error if `--search-compiles` is not a valid count or is given without `--search`; otherwise [].

    Args:
      given: the parsed arguments of `plan`.
    """
    if given.search_compiles and not given.search:
        return [
            Problem(
                "--search-compiles",
                got=f"'{given.search_compiles}' without --search",
                allowed="both",
                nearest=f"--search --search-compiles={ranking.COMPILED}",
            )
        ]
    return count_problems("--search-compiles", given.search_compiles, ranking.MOST_COMPILED)


def count_problems(name: str, text: str, most: int) -> list[Problem]:
    """Returns an error if the value of a flag is neither empty nor an integer from 1 to `most`.

    Args:
      name: the flag, such as `--programs`.
      text: the value as the user wrote it.
      most: the maximum.
    """
    # The length is checked first: Python does not convert numbers with thousands of digits.
    if not text or (text.isdecimal() and len(text) <= len(str(most)) and 1 <= int(text) <= most):
        return []
    return [Problem(name, got=f"'{text}'", allowed=f"1 to {most}", nearest=most if text.strip("0").isdecimal() else 1)]
