"""How the GPU compiler gives experts' weights to their kernels: `scripts/test --plan` runs this."""

import pytest

from meshtrain.config.resolve import resolve
from meshtrain.plan.cluster.clusters import open_cluster
from meshtrain.plan.cluster.compile import compile_step, program_of
from meshtrain.plan.hlo import products
from meshtrain.plan.hlo.shapes import dims
from meshtrain.sharding.rules import AXES

pytestmark = pytest.mark.gpu_compiler

EXPERTS, EMBED, INNER = 4, 512, 256  # on a device
CONFIG = {
    "batch_size": 8,
    "sequence_length": 384,
    "model": {
        "num_layers": 8,
        "embed_dim": EMBED,
        "num_heads": 8,
        "num_kv_heads": 8,
        "vocab_size": 512,
        "within_documents": False,
        "moe": {"num_experts": 4 * EXPERTS, "experts_per_token": 2, "expert_dim": INNER},
    },
    "mesh": {"pipeline": 2, "expert": 4},
    "precision": {"policy": "bfloat16"},
    "remat": {"policy": "save_attention"},
    "pipeline": {"schedule": "interleaved_1f1b", "num_microbatches": 2, "num_chunks": 2},
    "data": {"source": "synthetic"},
}
SHAPE = dict.fromkeys(AXES, 1) | {"pipeline": 2, "expert": 4}
LAYERS = 4  # of a stage


def copies(program):
    """Returns the kernels in loops that write a 16-bit array of one layer's experts and are no product."""
    fused = {line.attribute("calls") for line, _, _ in program.instructions("fusion")}
    matrices = {(EXPERTS, EMBED, INNER), (EXPERTS, INNER, EMBED)}
    found = program.instructions("fusion", "copy", "transpose", "convert", "dynamic-slice")
    return [
        line.name
        for line, where, runs in found
        if runs > 1 and where not in fused and line.shape.startswith("bf16") and dims(line.shape)[-3:] in matrices
    ]


def test_kernels_read_experts_in_the_stack_of_all_layers_and_nothing_copies_them():
    program, read = program_of(compile_step(resolve(CONFIG, reads_data=False), SHAPE, open_cluster("h100:1x8"))), []
    for body in program.computations.values():
        shapes = {line.name: line.shape for line in body}
        calls = [line for line in body if products.grouped_kernel(line) == "times"]
        read += [dims(shapes[name])[:2] for line in calls for name in line.operands if len(dims(shapes[name])) == 4]
        assert all(any(len(dims(shapes[name])) == 4 for name in line.operands) for line in calls)
    assert set(read) == {(LAYERS, EXPERTS)}
    assert not copies(program)
