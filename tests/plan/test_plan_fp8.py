"""What the compiler of an H100 makes of products of 8-bit floats: both operands have 8 bits, forward and backward."""

import collections

import jax
import pytest

from meshtrain.plan.cluster.compile import program_of
from meshtrain.plan.hlo.products import product_flops
from meshtrain.plan.hlo.shapes import dtypes
from meshtrain.step.precision import PrecisionOptions
from tests.plan.conftest import config as small
from tests.plan.conftest import planned

pytestmark = [pytest.mark.gpu_compiler, pytest.mark.slow]


def test_each_product_of_each_layer_multiplies_two_8_bit_floats():
    config = small({"data": 2, "tensor": 2}, precision=PrecisionOptions("fp8"))
    plan = planned("h100:1x4", config)
    program, flops = program_of(plan.compiled), collections.Counter[tuple[str, ...]]()
    for name, body in program.computations.items():
        shapes = {line.name: line.shape for line in body}
        for line in body:
            if line.opcode == "dot":
                pair = tuple(dtypes(shapes[operand])[0] for operand in line.operands[:2])
                flops[pair] += program.num_runs[name] * product_flops(line, shapes, {})
    layers = plan.compiled.assembly.state.params["layers"]
    matrices = sum(leaf.size for part in ("attention", "mlp") for leaf in jax.tree.leaves(layers[part]))
    of_device = 2 * matrices * config.batch_size * config.sequence_length / 4
    forward, backward = flops["f8e4m3fn", "f8e4m3fn"], flops["f8e5m2", "f8e4m3fn"] + flops["f8e4m3fn", "f8e5m2"]
    assert forward == pytest.approx(of_device, rel=1e-6)
    assert backward == pytest.approx(2 * of_device, rel=1e-6)
    assert not [pair for pair in flops if sum("f8" in dtype for dtype in pair) == 1]
