"""What explain says of the products of experts is what the traced step has."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax.core import meta

from meshtrain.models.cost import LOOP, Kernel
from meshtrain.models.decoder_options import MoeOptions
from meshtrain.models.task import SEQUENCE_INDEX
from meshtrain.models.transformer.decoder import DecoderOptions
from meshtrain.models.transformer.decoder_cost import kernels
from meshtrain.models.transformer.task import decoder
from meshtrain.sharding.placement import Placement
from meshtrain.sharding.rules import AXES

ONE = dict.fromkeys(AXES, 1)
MODEL = DecoderOptions(1, 128, 64, 2, 2, vocab_size=16, moe=MoeOptions(num_experts=4, expert_dim=128), attention="xla")


def by(model, platform, **sizes):
    """What computes the products of the experts, of 128 tokens on a device."""
    return kernels(model, 64, jnp.bfloat16, platform, ONE | sizes, 128)[1]


@pytest.mark.parametrize(
    ("platform", "width", "name"),
    [
        ("cuda", 48, "products by Pallas"),
        ("cuda", 24, LOOP),
        ("tpu", 128, "products by megablox"),
        ("tpu", 96, LOOP),
        ("cpu", 128, LOOP),
    ],
)
def test_the_kernel_is_that_of_the_traced_step(monkeypatch, platform, width, name):
    model = dataclasses.replace(MODEL, moe=dataclasses.replace(MODEL.moe, expert_dim=width))
    assert by(model, platform).by == name
    monkeypatch.setattr(Placement, "platform", platform)
    task = decoder(model, batch_size=2, sequence_length=64, dtype=jnp.bfloat16)
    params = meta.unbox(jax.eval_shape(task.init, jax.random.key(0)))
    batch = {**task.batch, SEQUENCE_INDEX: jax.ShapeDtypeStruct((2,), jnp.int32)}
    traced = str(jax.make_jaxpr(task.logits)(params, batch))
    scopes = {"products by Pallas": "times_of_blocks", "products by megablox": "gmm"}
    assert [scope in traced for scope in scopes.values()] == [name == one for one in scopes]


def test_the_width_is_that_of_one_device():
    wide = dataclasses.replace(MODEL, moe=dataclasses.replace(MODEL.moe, expert_dim=64))
    assert by(wide, "cuda", tensor=4, expert=2).by == "products by Pallas"
    found = by(wide, "gpu", tensor=8)
    why = "the kernels need widths per device that are multiples of 16"
    assert (found.by, found.why.split(",")[0]) == (LOOP, why)
    assert by(wide, "cpu") == Kernel("experts", LOOP, "there is no kernel for cpu")
    dense = dataclasses.replace(MODEL, moe=dataclasses.replace(MODEL.moe, num_experts=0))
    assert [kernel.part for kernel in kernels(dense, 64, jnp.bfloat16, "cuda", ONE, 128)] == ["attention"]


def test_tokens_are_gathered_between_devices_and_not_inside_one():
    assert by(MODEL, "cpu", expert=2).exchange == "tokens gathered over expert, results reduce-scattered"
    assert by(MODEL, "cpu").exchange == ""
