"""Weights that were gathered from their shards are not kept for the backward pass, unless that is asked for."""

import dataclasses

import jax
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr

from meshtrain.assembly.assemble import assemble
from meshtrain.config.schema import Config
from meshtrain.models.remat import RematOptions
from meshtrain.models.transformer.decoder import DecoderOptions
from meshtrain.sharding.param_sharding import ZeroOptions
from meshtrain.sharding.rules import AXES
from meshtrain.step.precision import PrecisionOptions

NUM_LAYERS, EMBED, MLP = 8, 128, 512
# Few tokens and wide weights: what is kept of activations is little beside one layer's weights.
CONFIG = Config(
    batch_size=8,
    sequence_length=8,
    model=DecoderOptions(
        num_layers=NUM_LAYERS, embed_dim=EMBED, mlp_dim=MLP, num_heads=8, num_kv_heads=8, vocab_size=128,
        vocab_multiple=128,
    ),
)  # fmt: skip
WEIGHTS_BYTES = 4 * NUM_LAYERS * (4 * EMBED * EMBED + 3 * EMBED * MLP)


def temporary_bytes(zero, policy, mesh):
    config = dataclasses.replace(CONFIG, zero=zero, remat=RematOptions(policy))
    assembly = assemble(config, dict.fromkeys(AXES, 1) | mesh, jax.devices())
    compiled = assembly.steps.train.lower(assembly.state, assembly.batch).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(
    "policy, mesh",
    [
        pytest.param("none", {"data": 8}, marks=pytest.mark.slow),
        pytest.param("dots", {"data": 8}, marks=pytest.mark.slow),
        ("none", {"fsdp": 8}),
    ],
)
def test_only_shard_grad_op_keeps_whole_weights(policy, mesh):
    """Beside the level that splits parameters: 3 over data, any over fsdp."""
    sharded = temporary_bytes(ZeroOptions(level=3 if "data" in mesh else 0), policy, mesh)
    kept = temporary_bytes(ZeroOptions(strategy="shard_grad_op"), policy, mesh)
    assert kept - sharded > 0.8 * WEIGHTS_BYTES


def scans(jaxpr):
    """All scans of a jaxpr, those inside of calls and of other loops included."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan":
            yield equation
        for value in equation.params.values():
            for part in value if isinstance(value, tuple | list) else (value,):
                if isinstance(part, ClosedJaxpr | Jaxpr):
                    yield from scans(part.jaxpr if isinstance(part, ClosedJaxpr) else part)


def test_the_forward_loop_hands_on_no_weight_in_the_compute_dtype():
    """XLA would run it twice, once to gather such an output early for the backward loop."""
    config = dataclasses.replace(CONFIG, precision=PrecisionOptions("bfloat16"), accumulation_steps=2, batch_size=16)
    assembly = assemble(config, dict.fromkeys(AXES, 1) | {"fsdp": 8}, jax.devices())
    jaxpr = assembly.steps.train.trace(assembly.state, assembly.batch).jaxpr.jaxpr
    forward = [scan for scan in scans(jaxpr) if scan.params["length"] == NUM_LAYERS and not scan.params["reverse"]]
    shapes = [var.aval.shape for scan in forward for var in scan.outvars]
    assert (NUM_LAYERS, 8, 8, MLP) in shapes, "the activations of the mlp are saved"
    assert not {(NUM_LAYERS, EMBED, MLP), (NUM_LAYERS, MLP, EMBED)} & set(shapes)
