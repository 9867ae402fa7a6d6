"""What explain says of the products of experts is what the traced step has."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax.core import meta

from meshtrain.config.blocks import LOOP, exchanged, of_experts
from meshtrain.config.config import Config
from meshtrain.layout.axes import AXES
from meshtrain.layout.placement import Placement
from meshtrain.models.decoder import DecoderOptions
from meshtrain.models.decoder_task import decoder
from meshtrain.models.task import SEQUENCE_INDEX
from meshtrain.step.precision import PrecisionOptions

ONE = dict.fromkeys(AXES, 1)
MODEL = DecoderOptions(1, 128, 64, 2, 2, vocab_size=16, num_experts=4, expert_dim=128, attention="xla")


@pytest.mark.parametrize(
    ("platform", "width", "name"),
    [("cuda", 48, "Pallas"), ("cuda", 24, LOOP), ("tpu", 128, "megablox"), ("tpu", 96, LOOP), ("cpu", 128, LOOP)],
)
def test_the_kernel_is_that_of_the_traced_step(monkeypatch, platform, width, name):
    model = dataclasses.replace(MODEL, expert_dim=width)
    config = Config(batch_size=2, sequence_length=64, model=model, precision=PrecisionOptions("bfloat16"))
    assert of_experts(config, platform, ONE)[0] == name
    monkeypatch.setattr(Placement, "platform", platform)
    task = decoder(model, batch_size=2, sequence_length=64, dtype=jnp.bfloat16)
    params = meta.unbox(jax.eval_shape(task.init, jax.random.key(0)))
    batch = {**task.batch, SEQUENCE_INDEX: jax.ShapeDtypeStruct((2,), jnp.int32)}
    traced = str(jax.make_jaxpr(task.logits)(params, batch))
    kernels = {"Pallas": "times_of_blocks", "megablox": "gmm"}
    assert [kernel in traced for kernel in kernels.values()] == [name == one for one in kernels]


def test_the_width_is_that_of_one_device():
    wide = Config(batch_size=8, sequence_length=64, model=dataclasses.replace(MODEL, expert_dim=64))
    assert of_experts(wide, "cuda", ONE | {"tensor": 4, "expert": 2})[0] == "Pallas"
    name, why = of_experts(wide, "gpu", ONE | {"tensor": 8})
    assert (name, why.split(",")[0]) == (LOOP, "the kernels take widths on a device that are multiples of 16")
    assert of_experts(wide, "cpu", ONE) == (LOOP, "there is no kernel for cpu")
    dense = dataclasses.replace(wide, model=dataclasses.replace(MODEL, num_experts=0))
    assert of_experts(dense, "cuda", ONE) is None


def test_tokens_are_gathered_between_devices_and_not_inside_one():
    config = Config(batch_size=8, sequence_length=64, model=MODEL)
    split = ONE | {"expert": 2}
    assert exchanged(config, split) == "tokens gathered over expert, results reduce-scattered"
    assert exchanged(config, ONE) is None
    assert exchanged(dataclasses.replace(config, model=dataclasses.replace(MODEL, num_experts=0)), split) is None
