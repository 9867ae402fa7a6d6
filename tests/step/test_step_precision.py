"""Which dtype stands where: as it is kept, computed with, and told to the loss."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import meta

from meshtrain.config import Config, default, resolve, tasks
from meshtrain.data.sources import DataOptions
from meshtrain.errors import UserError
from meshtrain.models.task import SEQUENCE_INDEX
from meshtrain.models.transformer.decoder import DecoderOptions
from meshtrain.models.transformer.task import decoder
from meshtrain.sharding.rules import AXES
from meshtrain.step import precision
from meshtrain.step.precision import PrecisionOptions

MESHES = [{}, pytest.param({"data": 2, "pipeline": 2}, marks=pytest.mark.slow)]
SMALL = DecoderOptions(num_layers=1, embed_dim=8, mlp_dim=16, num_heads=2, num_kv_heads=2, vocab_size=10)


@pytest.mark.parametrize(
    "options, dtypes",
    [
        (PrecisionOptions(), ["float32", "float32", "float32", "float32"]),
        (PrecisionOptions("bfloat16"), ["float32", "bfloat16", "float32", "bfloat16"]),
        (PrecisionOptions("float16"), ["float32", "float16", "float32", "float16"]),
        (PrecisionOptions("float16", compute_dtype="bfloat16"), ["float32", "bfloat16", "float32", "float16"]),
        (PrecisionOptions("bfloat16", param_dtype="bfloat16"), ["bfloat16", "bfloat16", "float32", "bfloat16"]),
        (PrecisionOptions("bfloat16", reduce_dtype="bfloat16"), ["float32", "bfloat16", "bfloat16", "bfloat16"]),
        (PrecisionOptions("bfloat16", output_dtype="float32"), ["float32", "bfloat16", "float32", "float32"]),
    ],
)
def test_a_policy_and_what_is_said_by_name(options, dtypes):
    functions = (precision.param_dtype, precision.compute_dtype, precision.reduce_dtype, precision.output_dtype)
    assert [jnp.dtype(function(options)).name for function in functions] == dtypes
    assert precision.compute_name(options) == dtypes[1]


def assert_learns_narrow(narrow, wide):
    for step in narrow:
        assert {leaf.dtype.name for leaf in jax.tree.leaves(step.state.params)} == {"bfloat16"}
        assert {leaf.dtype.name for leaf in jax.tree.leaves(step.state.opt_state)} == {"float32", "int32"}
    for a, b in zip(narrow[1:], wide[1:], strict=True):
        np.testing.assert_allclose(a.metrics["loss"], b.metrics["loss"], rtol=1e-2)
        assert a.metrics["loss"] != b.metrics["loss"]
    assert narrow[8].metrics["loss"] < narrow[1].metrics["loss"] - 0.01


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: "-".join(mesh) or "one")
def test_weights_in_bfloat16_have_moments_in_float32_and_learn(mesh, base, steps):
    options = PrecisionOptions("bfloat16", param_dtype="bfloat16")
    narrow = steps(dataclasses.replace(base, precision=options), num_steps=8, **mesh)
    assert_learns_narrow(narrow, steps(base, num_steps=8, **mesh))


@pytest.mark.parametrize("compute", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("output", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_logits_have_the_output_dtype_and_gradients_are_float32(compute, output):
    """Read off the traced program: dtypes need no numbers."""
    task = decoder(SMALL, batch_size=2, sequence_length=4, dtype=compute, output_dtype=output)
    params = meta.unbox(jax.eval_shape(task.init, jax.random.key(0)))
    batch = {name: jnp.ones(leaf.shape, leaf.dtype) for name, leaf in task.batch.items()}
    batch[SEQUENCE_INDEX] = jnp.arange(2)
    text = str(jax.make_jaxpr(lambda p: task.loss(p, batch, jax.random.key(0), True)[0])(params))
    names = {jnp.bfloat16: "bf16", jnp.float16: "f16", jnp.float32: "f32"}
    assert f"{names[output]}[2,4,128] = dot_general" in text
    gradients = jax.eval_shape(jax.grad(lambda p: task.loss(p, batch, jax.random.key(0), True)[0]), params)
    assert {leaf.dtype for leaf in jax.tree.leaves(gradients)} == {jnp.dtype(jnp.float32)}


def test_cudnn_goes_by_what_is_computed_in():
    options = dataclasses.replace(SMALL, attention="cudnn")
    precision = PrecisionOptions("bfloat16", compute_dtype="float32")
    given = Config(model=options, data=DataOptions("synthetic"), precision=precision)
    [line] = tasks.decoder.check(given, dict.fromkeys(AXES, 1))
    assert "model.attention" in line
    given = dataclasses.replace(given, precision=PrecisionOptions(compute_dtype="bfloat16"))
    assert tasks.decoder.check(given, dict.fromkeys(AXES, 1)) == []


@pytest.mark.parametrize(
    "overrides, words",
    [
        ({"precision.policy": "fp16"}, ["precision.policy", "did you mean 'float16'?"]),
        ({"precision.param_dtype": "float16"}, ["precision.param_dtype", "bfloat16"]),
        ({"precision.compute_dtype": "float16", "loss_scale.mode": "none"}, ["loss_scale.mode: got none with float16"]),
        ({"loss_scale.initial": "0.5"}, ["loss_scale.initial: got 0.5; allowed: at least 1"]),
        ({"guard.max_skipped_in_a_row": "-1"}, ["guard.max_skipped_in_a_row: got -1; allowed: at least 0"]),
    ],
)
def test_wrong_input_is_one_line(overrides, words):
    with pytest.raises(UserError) as caught:
        resolve(default(), overrides, reads_data=False)
    [line] = caught.value.problems
    assert all(word in line for word in words)
