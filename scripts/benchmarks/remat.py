"""Prints memory and work of each remat policy, by the GPU compiler, without a GPU (docs/results/plans.md).

The configuration is configs/llama3_8b.py on one machine of eight H100s, fsdp 8, one microbatch with one sequence per
device. Temporaries are the compiler's account of all memory except training state. FLOPs count the matrix products of
the compiled program, multiplied by the iterations of their loops.

Extras: plan-gpu
"""

import argparse
import dataclasses
import runpy
from pathlib import Path

from meshtrain.config.mesh_checks import check
from meshtrain.config.resolve import resolve
from meshtrain.config.schema import Config
from meshtrain.errors import UserError, run
from meshtrain.models.remat import RematOptions
from meshtrain.plan.cluster.clusters import Cluster, open_cluster
from meshtrain.plan.cluster.compile import compile_step
from meshtrain.plan.hlo import flops, parse
from meshtrain.sharding.mesh import MeshOptions
from meshtrain.sharding.rules import AXES

CLUSTER, NUM_DEVICES, SEQUENCE_LENGTH = "h100:1x8", 8, 4096
ROOT = Path(__file__).parents[2]
ROWS = [
    RematOptions("none"),
    RematOptions("dots", every=2),
    RematOptions("dots"),
    RematOptions("save_attention", every=2),
    RematOptions("save_attention"),
    RematOptions("full", every=4),
    RematOptions("full", every=2),
    RematOptions("full"),
]


def configuration() -> Config:
    """Returns the configuration llama3_8b for one machine, with one sequence per device."""
    given = runpy.run_path(str(ROOT / "configs" / "llama3_8b.py"))["get_config"]()
    config = resolve(given, reads_data=False)
    mesh = MeshOptions(data=1, fsdp=NUM_DEVICES, tensor=1, pipeline=1)
    return dataclasses.replace(
        config, mesh=mesh, batch_size=NUM_DEVICES, sequence_length=SEQUENCE_LENGTH, accumulation_steps=1
    )


def row(config: Config, options: RematOptions, cluster: Cluster, least: float | None) -> tuple[str, float]:
    """Returns a line of the table, and its work in FLOPs; `least` is the first line's work, None for the first line."""
    config = dataclasses.replace(config, remat=options)
    shape = dict.fromkeys(AXES, 1) | {"fsdp": NUM_DEVICES}
    if problems := check(config, shape):
        raise UserError(*problems)
    compiled = compile_step(config, shape, cluster)
    assert compiled.text is not None, compiled.refusal
    assert compiled.statistics is not None, compiled.refusal
    work = flops.matmul_flops(parse.read(compiled.text)).total
    temporary = compiled.statistics.temporary_bytes
    share = f"{work / least - 1:+.0%}" if least else ""
    which = "each layer" if options.every == 1 else f"one layer of {options.every}"
    which = "" if options.policy == "none" else which
    return f"| `{options.policy}` | {which} | {temporary / 2**30:.1f} GiB | {work / 1e12:.0f} TFLOP | {share} |", work


def main() -> int:
    """Prints the table."""
    argparse.ArgumentParser(prog="scripts/bench remat", description=(__doc__ or "").partition("\n")[0]).parse_args()
    cluster, config, least = open_cluster(CLUSTER), configuration(), None
    print("| `remat.policy` | computed again in | temporaries of a device | products of a device | more than `none` |")
    print("| --- | --- | --- | --- | --- |")
    for options in ROWS:
        line, work = row(config, options, cluster, least)
        print(line, flush=True)
        least = least or work
    return 0


if __name__ == "__main__":
    run(main)
