"""Compares the planner's time with published training runs, and prints the table of docs/results/plans.md.

    scripts/bench published_runs                                        # from stored figures, no compiler
    .venv-plan/bin/python -m scripts.benchmarks.published_runs NAME...  # compiles these runs again and stores them

`published_runs.json` contains the inputs of the planner's time for each run: the dims of all matrix products, the bytes
that operations move, the FLOPs of attention kernels, the number of kernels, transfers by axis, and the seconds that
computation waits for them.
"""

import argparse
import collections
import dataclasses
import functools
import json
import math
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from meshtrain.cli.tables import align
from meshtrain.config.resolve import parse
from meshtrain.hardware.accelerators import ACCELERATORS, Accelerator
from meshtrain.plan import planner, scheduled_hlo
from meshtrain.plan.cluster import clusters
from meshtrain.plan.cluster import compile as compiling
from meshtrain.plan.cluster.compile import Compiler
from meshtrain.plan.cost.lower_bound import model_flops
from meshtrain.plan.hlo.collectives import collectives
from meshtrain.plan.hlo.flops import attention_flops, attention_kernel
from meshtrain.plan.hlo.memory_traffic import bytes_moved
from meshtrain.plan.hlo.parse import FUSIONS, Program
from meshtrain.plan.hlo.products import Product, grouped_kernel, product_of
from meshtrain.plan.timing.streams import FREE, Assumptions, Hidden, Streams, shape_share, transfer_seconds

STORED = pathlib.Path(__file__).with_suffix(".json")
ASSUMED = Assumptions()
of_shape = functools.cache(shape_share)  # a fit uses the same shapes again
HEADER = (
    "run", "products", "published, s", "MFU", "model", "MFU", "error", "low", "high", "",
    "left out: share", "error", "low", "high", "",
)  # fmt: skip
SHARES = [number / 200 for number in range(80, 201)]  # tried by a fit: 0.4 to 1
_LLAMA = (
    "--config=configs/llama3_8b.py --config.mesh.data=1 --config.accumulation_steps=1 --config.batch_size=16 "
    "--config.remat.policy=dots"
)
_GPT = "--config.mesh.data=1 --config.model.vocab_size=51200"
_175B = (
    f"--config=configs/gpt3_175b.py {_GPT} --config.pipeline.num_chunks=3 --config.pipeline.num_microbatches=64 "
    "--config.batch_size=64"
)
_405B = (
    "--config=configs/llama3_405b.py --config.mesh.pipeline=16 --config.pipeline.num_chunks=8 "
    "--config.model.vocab_multiple=128"
)
_PIPELINE = "--config.accumulation_steps=1 --config.zero.level=1 --config.pipeline.schedule=interleaved_1f1b"
_QWEN = (
    f"--config=configs/qwen3_30b_a3b.py {_PIPELINE} --config.mesh.data=1 --config.mesh.fsdp=1 --config.mesh.pipeline=2 "
    "--config.mesh.expert=8 --config.pipeline.num_chunks=24 --config.pipeline.num_microbatches=32 "
    "--config.batch_size=512 --config.remat.policy=selective"
)
_LLAMA_3 = "Llama 3 report, table 4"
_BRIDGE = "Megatron-Bridge, performance summary"
_ROWS = "rows in lock step; attention there was not fused"


@dataclasses.dataclass(frozen=True)
class Run:
    """A published run.

    Attributes:
      where: the publication.
      measured: seconds of a step; values from 1e12 on are FLOP/s of a device, from the model's FLOPs with full
        attention.
      cluster: the name of the cluster for `plan`.
      arguments: arguments of `plan` for our most similar configuration.
      differs: differences of program or card; an empty text if both match.
      is_calibrating: whether the card's share may be fitted to this run.
      is_fp8: whether the published run's products had 8 bits; ours have 16.
    """

    where: str
    measured: float
    cluster: str
    arguments: str
    differs: str = ""
    is_calibrating: bool = True
    is_fp8: bool = False

    @property
    def card(self) -> Accelerator:
        """The accelerator of the cluster."""
        name = self.cluster.partition(":")[0]
        return next(one for one in ACCELERATORS if one.name == {"a100": "a100-80"}.get(name, name))

    def seconds(self, stored: Any) -> float:
        """Returns the measured seconds of a step; `stored`: its `figures`."""
        return self.measured if self.measured < 1e12 else float(stored["model_flops"]) / self.measured


RUNS = {
    "llama2_7b": Run(
        "JAX-Toolbox, MaxText", 0.721, "h100:1x8",
        f"{_LLAMA} --config.model.mlp_dim=11008 --config.model.num_kv_heads=32 --config.model.vocab_size=32000 "
        "--config.sequence_length=4096",
    ),
    "llama3_8b": Run(
        "torchtitan", 2.457, "h100:1x8", f"{_LLAMA} --config.sequence_length=8192",
        "cards of 500 W with HBM2e, other recomputation", is_calibrating=False,
    ),
    "gpt_22b": Run(
        "Korthikanti et al. 2022, full", 1.42, "a100:1x8",
        f"--config=configs/gpt3_175b.py {_GPT} --config.mesh.pipeline=1 --config.pipeline.schedule=1f1b "
        "--config.pipeline.num_chunks=1 --config.pipeline.num_microbatches=1 --config.model.num_layers=48 "
        "--config.model.embed_dim=6144 --config.model.mlp_dim=24576 --config.model.num_heads=64 "
        "--config.model.num_kv_heads=64 --config.batch_size=4 --config.layout.sequence_parallel=False "
        "--config.remat.policy=full --config.model.attention=xla",
    ),
    "gpt_175b_full": Run(
        "Korthikanti et al. 2022, full", 18.13, "a100:8x8",
        f"{_175B} --config.layout.sequence_parallel=False --config.remat.policy=full",
        _ROWS,
    ),
    "gpt_175b_selective": Run(
        "Korthikanti et al. 2022, selective", 13.75, "a100:8x8", _175B,
        _ROWS,
    ),
    "gpt_530b_selective": Run(
        "Korthikanti et al. 2022, selective", 37.83, "a100:35x8",
        f"--config=configs/mtnlg_530b.py {_GPT} --config.pipeline.num_chunks=3 --config.pipeline.num_microbatches=280 "
        "--config.batch_size=280 --config.remat.policy=selective",
        _ROWS,
    ),
    "llama3_405b_8k": Run(
        _LLAMA_3, 430e12, "h100:1024x8",
        f"{_405B} --config.mesh.data=64 --config.pipeline.num_microbatches=32 --config.batch_size=2048",
        "weights over data there; rows in lock step",
    ),
    "llama3_405b_16k": Run(
        _LLAMA_3, 400e12, "h100:2048x8",
        f"{_405B} --config.mesh.data=128 --config.pipeline.num_microbatches=16 --config.batch_size=2048",
        "weights over data there; rows in lock step",
    ),
    "llama3_405b_131k": Run(
        _LLAMA_3, 380e12, "h100:2048x8",
        f"{_405B} --config.mesh.data=8 --config.mesh.context=16 --config.pipeline.num_microbatches=16 "
        "--config.batch_size=128 --config.sequence_length=131072",
        "weights over data there; rows in lock step",
    ),
    "mixtral_8x7b": Run(
        "Megatron-Core 0.9, README", 468e12, "h100:8x8",
        f"--config=configs/mixtral_8x7b.py {_PIPELINE} --config.mesh.data=2 --config.mesh.fsdp=1 "
        "--config.mesh.pipeline=4 --config.mesh.expert=8 --config.pipeline.num_chunks=8 "
        "--config.pipeline.num_microbatches=16 --config.batch_size=256 --config.remat.policy=selective",
        "tokens gathered, 4 times the bytes of the exchange there; rows in lock step", is_calibrating=False,
    ),
    "qwen3_30b_25.09": Run(
        f"{_BRIDGE} 25.09", 512 * 4096 / (16 * 10_494), "h100:2x8", _QWEN,
        "choices beyond a capacity dropped there", is_calibrating=False, is_fp8=True,
    ),
    "qwen3_30b_25.11": Run(
        f"{_BRIDGE} 25.11", 512 * 4096 / (16 * 5_275), "h100:2x8", _QWEN,
        "none dropped there: only the GPU knows the sizes, and the host waits for them",
        is_calibrating=False, is_fp8=True,
    ),
}  # fmt: skip


def figures(
    program: Program, card: Accelerator, mesh: Mapping[str, int], transfers: Mapping[str, float], flops: float = 0.0
) -> Any:
    """Returns the inputs of a program's modelled time, for JSON; see `seconds`.

    Args:
      program: scheduled program; the inputs of its products have 16 bits.
      card: the card that it was compiled for.
      mesh: the size of each axis.
      transfers: name -> seconds of each collective.
      flops: the model's FLOPs in a step on one device, with full attention.
    """
    walks = {hidden: Streams(program, card, transfers, ASSUMED, hidden) for hidden in Hidden}
    steps = {hidden: walk.step() for hidden, walk in walks.items()}
    products, grouped, attention = (collections.Counter[Any]() for _ in range(3))
    other = num_kernels = 0
    for name in walks[Hidden.SCHEDULED].seconds:
        body, runs = program.computations[name], program.num_runs[name]
        shapes = {line.name: line.shape for line in body}
        for line in body:
            is_called = line.opcode in ("while", "call", "conditional", "async-start")
            if is_called or line.opcode in FREE or line.opcode.endswith("-done") or line.name in transfers:
                continue
            inside, within = [line], shapes
            if line.opcode in FUSIONS and (called := line.attribute("calls")):
                inside = program.computations[called]
                within = {one.name: one.shape for one in inside}
            moved = int(bytes_moved(line, inside, shapes, program.shares))
            kernels = [(each, kernel) for each in inside if (kernel := attention_kernel(each))]
            found = [one for each in inside if (one := product_of(each, within, program.shares))]
            num_kernels += runs
            if found:
                kind = grouped if grouped_kernel(line) else products
                kind[tuple(dataclasses.astuple(one) for one in found), moved] += runs
            elif kernels:
                by = "triton" if kernels[0][1].by == "triton" else "library"
                attention[by, int(attention_flops(kernels[0][0], within)[0]), moved] += runs
            else:
                other += runs * moved
    sent = collections.Counter[str]()
    for each in collectives(program, mesh):
        sent[each.axes] += int(each.wire_bytes * each.count)
    return {
        "products": [[list(map(list, dims)), moved, runs] for (dims, moved), runs in sorted(products.items())],
        "grouped": [[list(map(list, dims)), moved, runs] for (dims, moved), runs in sorted(grouped.items())],
        "attention": [[*key, runs] for key, runs in sorted(attention.items())],
        "other_bytes": other,
        "num_kernels": num_kernels,
        "sent_bytes": dict(sorted(sent.items())),
        "waiting_seconds": {hidden.value: total - computed for hidden, (total, computed, _) in steps.items()},
        "modelled_seconds": steps[Hidden.SCHEDULED][0],
        "with_share": card.product_share,
        "model_flops": flops,
    }


def seconds(
    stored: Any, card: Accelerator, share: float, assumed: Assumptions = ASSUMED, hidden: Hidden = Hidden.SCHEDULED
) -> float:
    """Returns the modelled seconds of a step from stored figures.

    The waiting time for transfers does not change with the share, although faster products would hide a little less.

    Args:
      stored: result of `figures`.
      card: the card that the program was compiled for.
      share: share of the card's peak that large products reach.
      assumed: assumptions of the time model.
      hidden: which asynchronous transfers are overlapped with computation.
    """
    peak, speed = card.bfloat16_flops_per_second, card.memory_bytes_per_second * assumed.memory_efficiency
    of_kernel = {"triton": assumed.triton_efficiency, "library": assumed.attention_efficiency}
    found = stored["waiting_seconds"][hidden.value] + stored["other_bytes"] / speed
    found += stored["num_kernels"] * assumed.launch_seconds
    for kind, efficiency in (("products", 1.0), ("grouped", assumed.grouped_efficiency)):
        for dims, moved, runs in stored[kind]:
            each = [Product(*one) for one in dims]
            busy = sum(one.flops / of_shape(one, card.num_units) for one in each)
            found += runs * max(busy / (peak * share * efficiency), moved / speed)
    for kind, flops, moved, runs in stored["attention"]:
        found += runs * max(flops / (peak * of_kernel[kind]), moved / speed)
    return float(found)


def ends(stored: Any, card: Accelerator, share: float) -> tuple[float, float]:
    """Returns the ends of the interval around `seconds`, with the same arguments."""
    fast, slow = ASSUMED.at_the_fast_end, ASSUMED.at_the_slow_end
    return (
        seconds(stored, card, share + ASSUMED.product_faster, fast, Hidden.ALL),
        seconds(stored, card, share - ASSUMED.product_slower, slow, Hidden.NONE),
    )


def fitted(names: Sequence[str], stored: Mapping[str, Any]) -> float | None:
    """Returns the share of a card's peak with the least squared log errors on these runs; None without runs."""

    def error(share: float) -> float:
        modelled = {name: seconds(stored[name], RUNS[name].card, share) for name in names}
        return sum(math.log(modelled[name] / RUNS[name].seconds(stored[name])) ** 2 for name in names)

    return min(SHARES, key=error) if names else None


def left_out_share(name: str, stored: Mapping[str, Any]) -> float:
    """Returns the share fitted to the other runs on a run's card; without other runs, the card's own share."""
    run = RUNS[name]
    others = [one for one, other in RUNS.items() if one != name and other.card is run.card and other.is_calibrating]
    return fitted(others, stored) or run.card.product_share


def compiled(by: Compiler, name: str) -> Any:
    """Compiles a run and returns its figures."""
    run = RUNS[name]
    config, _ = parse(run.arguments.split(), reads_data=False)
    cluster = clusters.open_cluster(run.cluster)
    made = compiling.compile_step(config, planner.shape_on(config, cluster), cluster, by)
    program, flops = compiling.program_of(made), model_flops(made.assembly)
    assert program
    assert flops
    mesh = made.assembly.mesh
    each = transfer_seconds(collectives(program, dict(mesh.shape)), mesh, cluster, ASSUMED)
    return figures(program, run.card, dict(mesh.shape), {name: sum(parts) for name, parts in each.items()}, flops[1])


def compile_again(names: Sequence[str], stored: dict[str, Any]) -> None:
    """Compiles the runs of these names to their schedules, and stores their figures."""
    first, _ = parse(RUNS[names[0]].arguments.split(), reads_data=False)
    elsewhere = scheduled_hlo.server(first, RUNS[names[0]].cluster)
    for name in names:
        made, run = (elsewhere and elsewhere(compiled, name)) or compiled(compiling.with_tiles, name), RUNS[name]
        same = [one for one, other in RUNS.items() if (other.cluster, other.arguments) == (run.cluster, run.arguments)]
        stored |= dict.fromkeys(same, made)
        STORED.write_text(json.dumps(stored, separators=(",", ":")) + "\n", encoding="utf-8")


class Compared(NamedTuple):
    """A modelled step and the published step: seconds, error, interval, and whether the published time is inside."""

    seconds: float
    error: float
    low: float
    high: float
    is_inside: bool

    def cells(self) -> tuple[str, ...]:
        """Returns the table cells: the error, the ends of the interval, and whether the run is between them."""
        return f"{self.error:+.1%}", f"{self.low:.3g}", f"{self.high:.3g}", "in" if self.is_inside else "out"


def compared(name: str, stored: Mapping[str, Any], share: float) -> Compared:
    """Returns the comparison of a run with its model at this share of the peak."""
    run, of_run = RUNS[name], stored[name]
    measured, modelled = run.seconds(of_run), seconds(of_run, run.card, share)
    low, high = ends(of_run, run.card, share)
    return Compared(modelled, modelled / measured - 1, low, high, low <= measured <= high)


def table(stored: Mapping[str, Any]) -> str:
    """Returns the table, the differences between runs and programs, and the largest of both errors."""
    rows, errors, differs = [], dict[str, dict[str, float]](error={}, error_left_out={}), dict[str, list[str]]()
    for name, run in RUNS.items():
        share, mfu = left_out_share(name, stored), stored[name]["model_flops"] / run.card.bfloat16_flops_per_second
        own, other = (compared(name, stored, one) for one in (run.card.product_share, share))
        measured = run.seconds(stored[name])
        for found, one in zip(errors.values(), (own, other), strict=True):
            found[name] = one.error
        rows.append((
            name, "8-bit" if run.is_fp8 else "16-bit", f"{measured:.3g}", f"{mfu / measured:.1%}",
            f"{own.seconds:.3g}", f"{mfu / own.seconds:.1%}", *own.cells(), f"{share:.3f}", *other.cells(),
        ))  # fmt: skip
        differs.setdefault(run.differs or "nothing", []).append(name)
    lines = [align(rows, HEADER, "<<>>>>>>><>>>><"), "", "what differs"]
    lines += [f"  {', '.join(names)}: {what}" for what, names in differs.items()]
    for what, found in errors.items():
        worst = max(found, key=lambda name: abs(found[name]))
        lines.append(f"worst {what.replace('_', ' ')}: {found[worst]:+.1%}, {worst}, because of the differences")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Compiles the named runs, if any, and prints the table."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench published_runs", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("names", metavar="NAME", nargs="*", help="a run to compile again")
    names = parser.parse_args(argv).names
    if unknown := [name for name in names if name not in RUNS]:
        parser.error(f"NAME: got {unknown[0]!r}; allowed: {', '.join(RUNS)}")
    stored = json.loads(STORED.read_text(encoding="utf-8")) if STORED.exists() else {}
    if names:
        compile_again(names, stored)
    print(table(stored))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
