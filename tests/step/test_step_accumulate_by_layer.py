"""Gradients of layers cross the data axis inside the backward loop: the same numbers, bytes and memory as behind it."""

import math

import jax
import numpy as np
import pytest

from meshtrain.assembly.assemble import assemble
from meshtrain.config.schema import Config
from meshtrain.models.remat import RematOptions
from meshtrain.models.transformer.decoder import DecoderOptions
from meshtrain.optim.optimizers import OptimizerOptions
from meshtrain.plan.cost import lower_bound
from meshtrain.plan.hlo import collectives, parse
from meshtrain.sharding import gradients
from meshtrain.sharding.param_sharding import ZeroOptions
from meshtrain.sharding.rules import AXES
from meshtrain.step.precision import PrecisionOptions

MODEL = DecoderOptions(
    num_layers=4, embed_dim=32, mlp_dim=64, num_heads=2, num_kv_heads=2, vocab_size=128, vocab_multiple=128
)
BFLOAT16 = PrecisionOptions("bfloat16", reduce_dtype="bfloat16")


def one_step(mesh, *, in_loops, **fields):
    """Returns (parameters after a step, bytes over data, those of loops, their formula, temporaries).

    The temporaries are without one layer's gradients in the loop, as they are sent and as they are received.
    """
    shape = dict.fromkeys(AXES, 1) | mesh
    config = Config(batch_size=24, sequence_length=8, model=MODEL, **fields)
    with pytest.MonkeyPatch.context() as patch:
        if not in_loops:
            patch.setattr(gradients.GradientSync, "reduces_in_loops", False)
        assembly = assemble(config, shape, jax.devices()[: math.prod(shape.values())])
        compiled = assembly.steps.train.lower(assembly.state, assembly.batch).compile()
        formula = lower_bound.layer_gradient_bytes(assembly)
    found = [one for one in collectives.collectives(parse.read(compiled.as_text()), shape) if one.axes == "data"]
    numbers, state = np.random.default_rng(0), assembly.steps.init(jax.random.key_data(jax.random.key(0)))
    batch = {
        name: jax.device_put(numbers.integers(0, 2, leaf.shape).astype(leaf.dtype), leaf.sharding)
        for name, leaf in assembly.batch.items()
    }
    state, _ = compiled(state, batch)
    sent, looped = (sum(one.count * one.wire_bytes for one in found if one.count > least) for least in (0, 1))
    temporaries = compiled.memory_analysis().temp_size_in_bytes
    return jax.device_get(state.params), sent, looped, formula, temporaries - 2 * assembly.steps.compiling.layer_bytes


@pytest.mark.parametrize(
    "mesh, fields",
    [
        ({"data": 4}, {"accumulation_steps": 3, "zero": ZeroOptions(level=1)}),
        ({"data": 2, "fsdp": 2}, {"remat": RematOptions("full", 2), "precision": BFLOAT16}),
        pytest.param(
            {"data": 2, "fsdp": 2, "tensor": 2},
            {"accumulation_steps": 3, "zero": ZeroOptions(level=1), "remat": RematOptions("dots")},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"data": 2},
            {"accumulation_steps": 3, "optimizer": OptimizerOptions(trainable="mlp/up")},
            marks=pytest.mark.slow,
        ),
    ],
    ids=("level one", "groups of layers in bfloat16", "with fsdp and tensor", "frozen weights"),
)
def test_numbers_bytes_and_memory_are_those_of_the_step_without(mesh, fields):
    inside, behind = (one_step(mesh, in_loops=in_loops, **fields) for in_loops in (True, False))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-7), inside[0], behind[0])
    assert inside[1] == behind[1]
    # Whatever dtype the CPU's compiler makes of bfloat16: all that layers send, and nothing else, moves into the loop.
    widened = 2 if "precision" in fields else 1
    assert inside[2] - behind[2] == pytest.approx(widened * inside[3]) != 0
    assert behind[3] == 0
    assert inside[4] <= 1.05 * behind[4]
