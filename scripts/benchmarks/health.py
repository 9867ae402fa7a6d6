"""Measures the cost of `observe.layers=norms` in compiled steps: FLOPs, bytes of memory, bytes sent, and collectives.

A configuration is compiled for a cluster with and without it. The exit code is 1 if FLOPs or bytes grow by 0.5 % or
more.

Extras: plan-gpu plan-tpu
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence

import jax

from meshtrain.config.build import build, file_content
from meshtrain.config.resolve import resolve
from meshtrain.plan import planner
from meshtrain.plan.cluster import clusters
from meshtrain.plan.cluster.compile import compile_step, program_of
from meshtrain.plan.hlo.collectives import collectives
from meshtrain.plan.hlo.flops import matmul_flops
from meshtrain.plan.timing.streams import Assumptions, Streams

# The TPU's compiler takes minutes for unrolled layers.
CASES = ("h100:1x8", "h100:1x8,mesh.data=1,mesh.fsdp=8", "h100:1x8,remat.unroll=no", "v5p:2x2x2,remat.unroll=no")
STEPS = tuple(f"gpt2_124m={case}" for case in CASES)
MOST = 0.005
HEADER = ("| step | FLOPs | bytes of memory | bytes sent | collectives |", "|" + " --- |" * 5)


def weighed(name: str, cluster: str, overrides: dict[str, str]) -> tuple[float, float, float, int]:
    """Returns (FLOPs of products, bytes read and written, bytes sent, collectives) of a device in a step."""
    target = clusters.open_cluster(cluster)
    assert target.accelerator is not None
    config = resolve(build(file_content(name), overrides)[0])
    step = compile_step(config, planner.shape_on(config, target), target)
    program = program_of(step)
    assert program is not None
    sent = collectives(program, dict(step.assembly.mesh.shape))
    # If memory moves 1 byte per second and computation and transfers take no time, seconds equal bytes.
    free = dataclasses.replace(
        target.accelerator,
        bfloat16_flops_per_second=1e30,
        float32_flops_per_second=1e30,
        memory_bytes_per_second=1.0,
    )
    assumed = Assumptions(launch_seconds=0.0, memory_efficiency=1.0)
    moved = Streams(program, free, {one.name: 0.0 for one in sent}, assumed).step()[0]
    return (
        matmul_flops(program).total,
        moved,
        sum(one.count * one.wire_bytes for one in sent),
        sum(one.count for one in sent),
    )


def main(argv: Sequence[str]) -> int:
    """Prints a row for each step, and returns 0 if no step grows too much."""
    parser = argparse.ArgumentParser(prog="scripts/bench health", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("steps", metavar="CONFIG=CLUSTER[,KEY=VALUE...]", nargs="*", default=STEPS)
    jax.config.update("jax_enable_compilation_cache", False)
    print(f"jax {jax.__version__}\n", *HEADER, sep="\n", flush=True)
    grown = 0
    for words in parser.parse_args(argv).steps:
        (name, cluster), *others = (word.split("=", 1) for word in words.split(","))
        without, found = (weighed(name, cluster, dict(others) | {"observe.layers": how}) for how in ("off", "norms"))
        shares = [after / before - 1 for before, after in zip(without[:2], found[:2], strict=True)]
        grown += max(shares) >= MOST
        cells = [f"{share:+.3%} of {before:.4g}" for share, before in zip(shares, without[:2], strict=True)]
        cells += [f"{found[2] - without[2]:+,.0f} of {without[2]:,.0f}", f"{found[3] - without[3]:+} of {without[3]}"]
        print(f"| `{words}` | {' | '.join(cells)} |", flush=True)
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
