"""Ranks configurations for a cluster: estimates select the candidates, and the best candidates are compiled."""

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping

from meshtrain.cli.tables import align, format_bytes
from meshtrain.config.schema import Config
from meshtrain.config.smaller import arguments, with_change
from meshtrain.errors import Problem, UserError
from meshtrain.files import JsonObject
from meshtrain.hardware.accelerators import usable_bytes
from meshtrain.plan import planner
from meshtrain.plan.cluster.clusters import Cluster
from meshtrain.plan.cluster.compile import Compiled, compile_step
from meshtrain.plan.cluster.compile_thread import waiting_for
from meshtrain.plan.findings import microbatch_reason
from meshtrain.plan.planner import Plan
from meshtrain.plan.search.candidates import Candidate, candidates
from meshtrain.plan.text_report import UNKNOWN, VERDICTS, interval, step_interval
from meshtrain.plan.text_report import to_json as plan_json
from meshtrain.plan.timing.streams import Assumptions
from meshtrain.sharding.rules import sizes_text

COMPILED = 12  # default of --search-compiles; a number, not a time, so that every machine gets the same result
MOST_COMPILED = 1000  # maximum of --search-compiles
MOST_OF_A_MESH = 2  # candidates of one mesh that are compiled before a third
SURE = 0.75  # an estimate below this share of the capacity surely fits: estimates may be too low


@dataclasses.dataclass(frozen=True)
class Found:
    """The result of a search for the fastest configuration.

    Attributes:
      cluster: the target cluster.
      ranked: (candidate, plan) for each compiled candidate, best first: plans that fit in memory, then plans whose fit
        is unknown, then plans that do not fit; each of the three by modelled seconds of a step.
      num_candidates: number of legal candidates that may fit, compiled or not.
      refused: (candidate, error) for candidates that could not be assembled; they use up part of the maximum number of
        compiled candidates.
    """

    cluster: Cluster
    ranked: tuple[tuple[Candidate, Plan], ...]
    num_candidates: int
    refused: tuple[tuple[Candidate, str], ...]


def search(
    config: Config,
    cluster: Cluster,
    assumptions: Assumptions,
    *,
    only_mesh: bool,
    most: int = COMPILED,
    compiled_by: Callable[[Config, Mapping[str, int], Cluster], Compiled] = compile_step,
) -> Found:
    """Compiles the candidates with the best estimates, and returns them ranked by memory and modelled step time.

    Plans that fit in the devices' memory rank first, and among them the plan with the shortest modelled step. If all
    plans before the last one are too large, the last compiled candidate is the one with the lowest estimate of memory.

    Args:
      config: the configuration to vary; its mesh is ignored.
      cluster: the target cluster.
      assumptions: the assumptions of the time model.
      only_mesh: whether only the mesh varies, and microbatches, schedules, remat policies and the ZeRO level stay as
        configured.
      most: maximum number of compiled candidates.
      compiled_by: function (configuration, mesh axis -> size, cluster) -> `Compiled` that compiles the training step.

    Returns:
      A `Found` with the ranked candidates, and with the candidates that could not be assembled.

    Raises:
      UserError: each mesh on this cluster is illegal or surely too large for the devices' memory.
    """
    found = candidates(config, cluster, only_mesh=only_mesh)
    if not found:
        raise UserError(
            Problem(
                "--search",
                got=cluster.text,
                allowed="a cluster on which some mesh is legal and may fit",
                nearest="more devices, or another batch_size or accumulation_steps",
            )
        )
    plans, refused = list[tuple[Candidate, Plan]](), list[tuple[Candidate, str]]()
    chosen = chosen_of(found, most, cluster)
    for number, one in enumerate(chosen, 1):
        tried = chosen[: number - 1]
        if tried and number == len(chosen) and all(plan.memory.fits is False for _, plan in plans):
            one = min((other for other in found if other not in tried), key=lambda other: other.guessed_bytes)
        what = f"{number} of {len(chosen)}: {describe(one)}"
        try:
            changed = with_change(config, one.change)
            work = functools.partial(planner.plan, changed, one.shape, cluster, assumptions, None, compiled_by)
            plans.append((one, waiting_for(what, work)))
        except UserError as error:
            refused.append((one, str(error)))
    ranked = sorted(plans, key=lambda pair: _rank(pair[1]))
    return Found(cluster, tuple(ranked), len(found), tuple(refused))


def diverse(found: list[Candidate]) -> list[Candidate]:
    """Orders candidates for compilation: the two fastest of each mesh first, then all other candidates.

    The candidates of both parts are ordered by their estimated time.

    Args:
      found: the candidates, fastest estimate first.
    """
    per_mesh = collections.Counter[tuple[int, ...]]()
    first, others = list[Candidate](), list[Candidate]()
    for one in found:
        key = tuple(one.shape.values())
        per_mesh[key] += 1
        (first if per_mesh[key] <= MOST_OF_A_MESH else others).append(one)
    return first + others


def chosen_of(found: list[Candidate], most: int, cluster: Cluster) -> list[Candidate]:
    """Returns the candidates to compile, at most `most`.

    If there are more candidates than `most`, half of the result consists of candidates that surely fit in memory. They
    come first. If there are none, the candidate with the lowest estimate of memory is used instead. The other half
    consists of the fastest other candidates.

    Args:
      found: the candidates, fastest estimate first; at least one.
      most: maximum number of candidates to compile.
      cluster: the target cluster; if its memory is unknown, the fastest estimates are chosen.
    """
    if cluster.accelerator is None or most >= len(found):
        return diverse(found)[:most]
    room = SURE * usable_bytes(cluster.accelerator)
    sure = [one for one in found if one.guessed_bytes <= room] or [min(found, key=lambda one: one.guessed_bytes)]
    sure = diverse(sure)[: (most + 1) // 2]
    return [*sure, *(one for one in diverse(found) if one not in sure)][:most]


def _rank(plan: Plan) -> tuple[int, float]:
    order = {True: 0, None: 1, False: 2}
    seconds = plan.timing.step_seconds if plan.timing else float("inf")
    return order[plan.memory.fits], seconds


def describe(one: Candidate) -> str:
    """Returns a candidate as short text: its mesh, number of microbatches, remat policy and pipeline schedule."""
    mesh = sizes_text(one.shape) or "one device"
    short = {"accumulation_steps": "accumulation", "pipeline.num_microbatches": "microbatches"}
    rest = [
        f"{short[key]} {value}" if key in short else "unrolled" if value is True else str(value)
        for key, value in one.change.items()
        if key in short or key in ("remat.policy", "remat.unroll", "pipeline.schedule")
    ]
    return ", ".join([mesh, *rest])


def _memory(plan: Plan) -> str:
    return VERDICTS[plan.memory.fits] if plan.memory.capacity_bytes is not None else UNKNOWN


def coverage(found: Found) -> str:
    """Returns text such as `compiled 12 of 90 candidates; --search-compiles=N compiles more`."""
    num_tried = len(found.ranked) + len(found.refused)
    more = "" if num_tried == found.num_candidates else "; --search-compiles=N compiles more"
    return f"compiled {len(found.ranked)} of {found.num_candidates} candidates{more}"


def text(found: Found) -> str:
    """Returns the result of a search as text: the ranked candidates, and the arguments of the best to copy."""
    rows = []
    for one, plan in found.ranked:
        stats, timing = plan.memory.compiler, plan.timing
        rows.append(
            (
                describe(one),
                _memory(plan),
                format_bytes(stats.peak_bytes) if stats else "-",
                step_interval(timing) if timing else "-",
                interval(plan.mfu, ".0%") if plan.mfu else "-",
            )
        )
    header = ("way", "memory", "peak", "step, modelled", "MFU, modelled")
    lines = [f"search       {found.cluster.text}: {coverage(found)}", "", align(rows, header, "<<>>>")]
    lines += [f"rejected     {describe(one)}: {why}" for one, why in found.refused]
    if not found.ranked or found.ranked[0][1].memory.fits is False:
        lines += ["", f"none of the {len(found.ranked)} compiled candidates fits"]
    else:
        best, plan = found.ranked[0]
        lines += ["", f"the first, memory {_memory(plan)}:", f"  {arguments(best.change)}"]
        lines += [f"  {finding.line()}" for finding in microbatch_reason(plan)]
    return "\n".join(lines)


def to_json(found: Found) -> JsonObject:
    """Returns the result of a search as a JSON object; each ranked entry has the fields of a plan and its arguments."""
    return {
        "cluster": found.cluster.text,
        "num_candidates": found.num_candidates,
        "ranked": [{"arguments": arguments(one.change), **plan_json(plan)} for one, plan in found.ranked],
        "refused": [{"arguments": arguments(one.change), "why": why} for one, why in found.refused],
    }
