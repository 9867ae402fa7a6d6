"""Compares the planner's time with six published training runs: prints the table of docs/results/plans.md.

    scripts/bench published_runs                                        # from stored figures, no compiler
    .venv-plan/bin/python -m scripts.benchmarks.published_runs NAME...  # compiles these runs again and stores them

`published_runs.json` has, for each run, what the planner's time is made of: the dims of all matrix products, the bytes
that operations move, the FLOPs of attention kernels, transfers by axis, and the seconds that computing waits for them.
"""

import argparse
import collections
import dataclasses
import json
import math
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from meshtrain.cli.tables import aligned
from meshtrain.config.config import parse
from meshtrain.launch.hardware import ACCELERATORS, Accelerator
from meshtrain.plan import planner
from meshtrain.plan.hlo.collectives import collectives
from meshtrain.plan.hlo.flops import attention_flops, attention_kernel
from meshtrain.plan.hlo.memory_traffic import moved_bytes
from meshtrain.plan.hlo.parse import Program
from meshtrain.plan.hlo.products import Product, product_of
from meshtrain.plan.target import clusters
from meshtrain.plan.target import compile as compiling
from meshtrain.plan.timing.streams import FREE, Assumptions, Streams, shape_share, transfer_seconds

STORED = pathlib.Path(__file__).with_suffix(".json")
SHARES = [number / 200 for number in range(80, 201)]  # that a fit tries: 0.4 to 1
_LLAMA = (
    "--config=configs/llama3_8b.py --config.mesh.data=1 --config.accumulation_steps=1 --config.batch_size=16 "
    "--config.remat.policy=dots"
)
_GPT = "--config.mesh.data=1 --config.model.vocab_size=51200"
_175B = (
    f"--config=configs/gpt3_175b.py {_GPT} --config.pipeline.num_chunks=3 --config.pipeline.num_microbatches=64 "
    "--config.batch_size=64"
)


@dataclasses.dataclass(frozen=True)
class Run:
    """A published run.

    Attributes:
      where: it was published.
      measured_seconds: of a step.
      cluster: as `plan` names it.
      arguments: of `plan`: our configuration nearest to it.
      differs: what program or card have otherwise; an empty text where both match.
      is_calibrating: whether the card's share may be fitted to it.
    """

    where: str
    measured_seconds: float
    cluster: str
    arguments: str
    differs: str = ""
    is_calibrating: bool = True

    @property
    def card(self) -> Accelerator:
        """The accelerator of the cluster."""
        name = self.cluster.partition(":")[0]
        return next(one for one in ACCELERATORS if one.name == {"a100": "a100-80"}.get(name, name))


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
        "rows in lock step; attention there was not fused",
    ),
    "gpt_175b_selective": Run(
        "Korthikanti et al. 2022, selective", 13.75, "a100:8x8", _175B,
        "rows in lock step; attention there was not fused",
    ),
    "gpt_530b_selective": Run(
        "Korthikanti et al. 2022, selective", 37.83, "a100:35x8",
        f"--config=configs/mtnlg_530b.py {_GPT} --config.pipeline.num_chunks=3 --config.pipeline.num_microbatches=280 "
        "--config.batch_size=280 --config.remat.policy=selective",
        "rows in lock step; attention there was not fused",
    ),
}  # fmt: skip


def figures(program: Program, card: Accelerator, mesh: Mapping[str, int], transfers: Mapping[str, float]) -> Any:
    """Returns what the modelled time of a program is made of, for JSON; see `seconds`.

    Args:
      program: scheduled; its products are of inputs in 16 bits.
      card: that it was compiled for.
      mesh: the size of each axis.
      transfers: the seconds of each collective, by its name.
    """
    streams = Streams(program, card, transfers, Assumptions())
    total, computed, _ = streams.step()
    products, attention = collections.Counter[Any](), collections.Counter[Any]()
    other = 0.0
    for name in streams.seconds:
        body, runs = program.computations[name], program.num_runs[name]
        shapes = {line.name: line.shape for line in body}
        for line in body:
            is_called = line.opcode in ("while", "call", "conditional", "async-start")
            if is_called or line.opcode in FREE or line.opcode.endswith("-done") or line.name in transfers:
                continue
            inside, within = [line], shapes
            if line.opcode == "fusion" and (called := line.attribute("calls")):
                inside = program.computations[called]
                within = {one.name: one.shape for one in inside}
            moved = int(moved_bytes(line, inside, shapes))
            kernels = [(each, kernel) for each in inside if (kernel := attention_kernel(each))]
            found = [one for each in inside if (one := product_of(each, within, program.shares))]
            if found:
                products[tuple(dataclasses.astuple(one) for one in found), moved] += runs
            elif kernels:
                kind = "triton" if kernels[0][1].by == "triton" else "library"
                attention[kind, int(attention_flops(kernels[0][0], within)[0]), moved] += runs
            else:
                other += runs * moved
    sent = collections.Counter[str]()
    for each in collectives(program, mesh):
        sent[each.axes] += int(each.wire_bytes * each.count)
    return {
        "products": [[list(map(list, dims)), moved, runs] for (dims, moved), runs in sorted(products.items())],
        "attention": [[*key, runs] for key, runs in sorted(attention.items())],
        "other_bytes": int(other),
        "sent_bytes": dict(sorted(sent.items())),
        "waiting_seconds": total - computed,
        "modelled_seconds": total,
        "with_share": card.product_share,
    }


def seconds(stored: Any, card: Accelerator, share: float) -> float:
    """Returns the modelled seconds of a step from stored figures.

    Waiting for transfers is kept as it was at the stored share: faster products would hide a little less.

    Args:
      stored: of `figures`.
      card: that the program was compiled for.
      share: of its peak, that large products reach.
    """
    assumed, peak = Assumptions(), card.bfloat16_flops_per_second
    speed = card.memory_bytes_per_second * assumed.memory_efficiency
    of_kernel = {"triton": assumed.triton_efficiency, "library": assumed.attention_efficiency}
    found = stored["waiting_seconds"] + stored["other_bytes"] / speed
    for dims, moved, runs in stored["products"]:
        each = [Product(*one) for one in dims]
        busy = sum(2.0 * math.prod(dataclasses.astuple(one)) / shape_share(one, card.num_units) for one in each)
        found += runs * max(busy / (peak * share), moved / speed)
    for kind, flops, moved, runs in stored["attention"]:
        found += runs * max(flops / (peak * of_kernel[kind]), moved / speed)
    return float(found)


def fitted(names: Sequence[str], stored: Mapping[str, Any]) -> float | None:
    """Returns the share of a card's peak that fits these runs best, by squares of errors' logs; None without runs."""

    def error(share: float) -> float:
        modelled = {name: seconds(stored[name], RUNS[name].card, share) for name in names}
        return sum(math.log(modelled[name] / RUNS[name].measured_seconds) ** 2 for name in names)

    return min(SHARES, key=error) if names else None


def predicted(name: str, stored: Mapping[str, Any]) -> tuple[float, float]:
    """Returns (share, seconds) for a run: the share is fitted to the other runs on its card, else the card's own."""
    run = RUNS[name]
    others = [one for one, other in RUNS.items() if one != name and other.card is run.card and other.is_calibrating]
    share = (fitted(others, stored) if run.is_calibrating else None) or run.card.product_share
    return share, seconds(stored[name], run.card, share)


def compiled(run: Run) -> Any:
    """Compiles a run and returns its figures."""
    config, _ = parse(run.arguments.split(), reads_data=False)
    cluster = clusters.open_cluster(run.cluster)
    made = compiling.compile_step(config, planner.shape_on(config, cluster), cluster)
    program = compiling.program_of(made)
    assert program
    mesh = made.assembly.mesh
    found = collectives(program, dict(mesh.shape))
    each = transfer_seconds(found, mesh, cluster, Assumptions())
    return figures(program, run.card, dict(mesh.shape), {name: sum(parts) for name, parts in each.items()})


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
    for name in names:
        stored[name] = compiled(RUNS[name])
        STORED.write_text(json.dumps(stored, separators=(",", ":")) + "\n", encoding="utf-8")
    rows = []
    for name, run in RUNS.items():
        share, modelled = predicted(name, stored)
        own = seconds(stored[name], run.card, run.card.product_share)
        rows.append((
            name, run.where, f"{run.measured_seconds:.4g}", f"{own:.4g}", f"{own / run.measured_seconds - 1:+.1%}",
            f"{share:.3f}", f"{modelled:.4g}", f"{modelled / run.measured_seconds - 1:+.1%}", run.differs or "nothing",
        ))  # fmt: skip
    header = ("run", "published by", "s", "model", "error", "left out: share", "model", "error", "what differs")
    print(aligned(rows, header, "<<>>>>>><"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
