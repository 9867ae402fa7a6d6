"""Prints products, temporaries and attention kernels of the compiled step for remat policies on several meshes.

Each step is compiled with JAX's flag `jax_remat3` off and on; both must give the same figures, because the model
decides which values are saved, not `jax.checkpoint`. Products are FLOPs per device of all matrix products, multiplied
by the iterations of their loops. Temporaries are the compiler's account of all memory except training state. Kernels
are (forward, backward) calls of cuDNN's attention in the text of the program. Rows for CPUs need no extra; rows for
`h100` use the GPU compiler without a GPU.

Extras: plan-gpu
"""

import argparse
import dataclasses
import re

import jax

import meshtrain
from meshtrain.config.schema import Config
from meshtrain.errors import run
from meshtrain.models.decoder_options import MoeOptions
from meshtrain.models.remat import RematOptions
from meshtrain.models.transformer.decoder import DecoderOptions
from meshtrain.optim.optimizers import OptimizerOptions
from meshtrain.plan.cluster.clusters import open_cluster
from meshtrain.plan.cluster.compile import compile_step, program_of
from meshtrain.plan.hlo.flops import matmul_flops
from meshtrain.sharding.param_sharding import ZeroOptions
from meshtrain.sharding.rules import AXES
from meshtrain.step.precision import PrecisionOptions

SMALL = DecoderOptions(num_layers=2, embed_dim=64, mlp_dim=256, num_heads=4, num_kv_heads=4, vocab_size=256)
MODELS = {
    "plain": SMALL,
    "blockwise": dataclasses.replace(SMALL, attention="blockwise"),
    "windows": dataclasses.replace(SMALL, attention="blockwise", window=16, global_every=2),
    "experts": dataclasses.replace(SMALL, moe=MoeOptions(num_experts=4, experts_per_token=2, expert_dim=64)),
    "cudnn": dataclasses.replace(SMALL, attention="cudnn", within_documents=False, embed_dim=256),
    "cudnn-windows": dataclasses.replace(
        SMALL, attention="cudnn", within_documents=False, embed_dim=256, window=16, global_every=2
    ),
}
CLUSTERS = {"cudnn": "h100:1x2", "cudnn-windows": "h100:1x2"}
FSDP, PIPELINES, EXPERTS = {"fsdp": 2}, {"pipeline": 2, "fsdp": 2}, {"expert": 2, "fsdp": 2}
FLAGS = {"off": (False,), "on": (True,), "both": (False, True)}
POLICIES = ("none", "selective", "dots", "save_attention", "full", "offload")
# (model, mesh, remat options, strategy of ZeRO)
ROWS: list[tuple[str, dict[str, int], RematOptions, str]] = [
    *[("plain", FSDP, RematOptions(policy), "") for policy in POLICIES],
    ("plain", FSDP, RematOptions("full", every=2), ""),
    ("plain", FSDP, RematOptions("none", unroll=True), ""),
    *[("plain", FSDP, RematOptions(policy), "shard_grad_op") for policy in ("none", "full")],
    ("plain", {}, RematOptions("selective"), ""),
    *[("plain", PIPELINES, RematOptions(policy), "") for policy in ("none", "selective")],
    *[("blockwise", FSDP, RematOptions(policy), "") for policy in ("none", "save_attention")],
    *[("windows", FSDP, RematOptions(policy), "") for policy in ("none", "save_attention")],
    *[("experts", EXPERTS, RematOptions(policy), "") for policy in ("none", "selective", "dots", "full")],
    *[("cudnn", FSDP, RematOptions(policy), "") for policy in ("none", "selective", "save_attention", "full")],
    *[("cudnn-windows", FSDP, RematOptions(policy), "") for policy in ("none", "save_attention")],
]


def figures(model: str, mesh: dict[str, int], remat: RematOptions, strategy: str) -> str:
    """Returns products (MFLOP per device), temporaries (MB per device) and attention kernels of one compiled step.

    Args:
      model: a key of `MODELS`.
      mesh: mesh axis -> size; other axes have size 1.
      remat: the values that the backward pass recomputes.
      strategy: the option `zero.strategy`; empty: none.
    """
    shape = dict.fromkeys(AXES, 1) | mesh
    is_pipeline = shape["pipeline"] > 1
    config = Config(
        precision=PrecisionOptions("bfloat16" if model in CLUSTERS else "float32"),
        batch_size=16 if is_pipeline else 4,
        sequence_length=64,
        accumulation_steps=2 if is_pipeline else 1,
        model=MODELS[model],
        optimizer=OptimizerOptions(name="sgd"),
        remat=remat,
        zero=ZeroOptions(strategy=strategy) if strategy else ZeroOptions(),
    )
    num_devices = 2 ** sum(size > 1 for size in shape.values())
    compiled = compile_step(config, shape, open_cluster(CLUSTERS.get(model, f"cpu:{num_devices}")))
    program = program_of(compiled)
    assert program is not None, compiled.refusal
    assert compiled.text is not None, compiled.refusal
    assert compiled.statistics is not None, compiled.refusal
    work = matmul_flops(program).full
    kernels = [
        len(re.findall(pattern, compiled.text)) for pattern in ('cudnn.fmhaSoftmax"', "cudnn.fmhaSoftmaxBackward")
    ]
    calls = f", {tuple(kernels)}" if model in CLUSTERS else ""
    return f"{work / 1e6:.2f}, {compiled.statistics.temporary_bytes / 1e6:.3f}{calls}"


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench remat_programs", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--only", default="", help="only rows whose first column starts with this text")
    parser.add_argument("--cluster", action="store_true", help="also rows for the GPU compiler")
    parser.add_argument("--flags", default="both", choices=FLAGS, help="values of jax_remat3")
    args = parser.parse_args()
    meshtrain.simulate(8)
    print(f"jax {jax.__version__}: products in MFLOP and temporaries in MB, a device")
    print("| model, mesh, policy |" + "".join(f" flag {'on' if flag else 'off'} |" for flag in FLAGS[args.flags]))
    print("| --- |" + " --- |" * len(FLAGS[args.flags]))
    for model, mesh, remat, strategy in ROWS:
        axes = " x ".join(f"{axis} {size}" for axis, size in mesh.items()) or "one device"
        more = [f"every {remat.every}"] * (remat.every > 1) + ["unroll"] * remat.unroll + [strategy] * bool(strategy)
        name = ", ".join([model, axes, remat.policy, *more])
        if not name.startswith(args.only) or (model in CLUSTERS and not args.cluster):
            continue
        cells = []
        for flag in FLAGS[args.flags]:
            jax.config.update("jax_remat3", flag)
            jax.clear_caches()
            cells.append(figures(model, mesh, remat, strategy))
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    run(main)
