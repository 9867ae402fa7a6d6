"""How the GPU compiler reads weights and adds gradients: `scripts/test --plan` runs this."""

import collections
import functools
import re

import jax
import pytest

from meshtrain.config.resolve import resolve
from meshtrain.pipeline import stages as ring
from meshtrain.plan.cluster.clusters import open_cluster
from meshtrain.plan.cluster.compile import compile_step
from meshtrain.plan.hlo import parse
from meshtrain.sharding.rules import AXES

pytestmark = pytest.mark.gpu_compiler

# One layer a chunk. No activation has the size of a weight.
CONFIG = {
    "batch_size": 8,
    "sequence_length": 384,
    "model": {
        "num_layers": 8,
        "embed_dim": 512,
        "mlp_dim": 2048,
        "num_heads": 8,
        "num_kv_heads": 8,
        "vocab_size": 512,
        "within_documents": False,
    },
    "mesh": {"pipeline": 4, "tensor": 2},
    "precision": {"policy": "bfloat16"},
    "remat": {"policy": "selective"},
    "pipeline": {"schedule": "interleaved_1f1b", "num_microbatches": 8, "num_chunks": 2},
    "data": {"source": "synthetic"},
}
SHAPE = dict.fromkeys(AXES, 1) | {"pipeline": 4, "tensor": 2}


@functools.cache
def compiled():
    """Returns the abstract weights of the layers, and the program that was read."""
    step = compile_step(resolve(CONFIG, reads_data=False), SHAPE, open_cluster("h100:1x8"))
    return step.assembly, parse.read(step.text)


def matrices_of(assembly):
    """Returns how many matrices with these dims one layer has on a device."""
    leaves = jax.tree.leaves(assembly.state.params["layers"])
    return collections.Counter(leaf.sharding.shard_shape(leaf.shape)[2:] for leaf in leaves if leaf.ndim > 3)


def arrays(line, dtype):
    """Yields the dims of each array of a result, without those of size 1."""
    for text in re.findall(rf"{dtype}\[([\d,]+)\]", line.shape):
        yield tuple(size for size in map(int, text.split(",")) if size > 1)


def kernels_in_loops(assembly, program):
    """Returns the matrices of one layer of a stage, and (number of layers, matrix) of each float32 result in a loop."""
    matrices = set(matrices_of(assembly))
    fused = {line.attribute("calls") for line, _, _ in program.instructions("fusion")}
    found = []
    for line, where, runs in program.instructions("fusion", "copy", "convert", "add", "custom-call", "dynamic-slice"):
        if runs > 1 and where not in fused:
            for dims in arrays(line, "f32"):
                found += [(1, dims)] if dims in matrices else []
                found += [(dims[0], dims[1:])] if dims[1:] in matrices else []
    return matrices, found


def copies(program):
    """Returns how often a kernel that is no product writes a 16-bit array with these dims."""
    fused = {line.attribute("calls") for line, _, _ in program.instructions("fusion")}
    found = collections.Counter()
    for line, where, runs in program.instructions("fusion", "copy", "transpose", "convert", "dynamic-slice"):
        inside = program.computations[line.attribute("calls")] if line.opcode == "fusion" else []
        if where not in fused and not any(each.opcode in ("dot", "custom-call") for each in inside):
            for dims in arrays(line, "bf16"):
                found[dims] += runs
    return found


def test_a_weight_is_copied_at_most_once_for_each_product():
    """A product needs its weight as an array of its own; see docs/design/pipeline.md."""
    assembly, program = compiled()
    num_rows, found = assembly.placed.program.cells.active.shape[0], copies(program)
    for dims, number in matrices_of(assembly).items():
        assert 0 < found[dims] <= number * num_rows, dims


def test_one_kernel_adds_a_gradient_and_no_float32_gradient_of_a_layer_stands_beside_it():
    matrices, found = kernels_in_loops(*compiled())
    assert {dims for num_layers, dims in found if num_layers == 2} == matrices, "the sums are added up in loops"
    assert not [dims for num_layers, dims in found if num_layers == 1]


def test_a_gradient_beside_its_accumulator_is_noticed(monkeypatch):
    """Where the slice that is added has another shape than the one that is written."""

    def in_two_kernels(total, part, place, active):
        add = lambda total, part: total.at[place].set(ring.take(total, place) + active * part)  # noqa: E731
        return jax.tree.map(add, total, part)

    monkeypatch.setattr(ring, "add_at", in_two_kernels)
    _, found = kernels_in_loops(*compiled.__wrapped__())
    assert [dims for num_layers, dims in found if num_layers == 1]
