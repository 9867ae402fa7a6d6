"""A model with each kernel on a mesh, and which implementation is chosen where."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import meta
from jax.extend import core

from meshtrain.errors import UserError
from meshtrain.models.attention import flex, select, splash, triton
from meshtrain.models.attention.attention import Attention
from meshtrain.models.attention.select import Case, chosen
from meshtrain.models.decoder_options import NormOptions
from meshtrain.models.remat import HEADS, RematOptions
from meshtrain.models.task import SEQUENCE_INDEX
from meshtrain.models.transformer.decoder import DecoderOptions
from meshtrain.models.transformer.task import decoder
from meshtrain.sharding.mesh import make_mesh
from meshtrain.sharding.placement import Placement
from meshtrain.sharding.rules import AXES, LayoutOptions, default_rules
from tests.models.test_models_attention import HEAD_DIM, NUM_HEADS, arrays, documents_of


def test_logits_softmax_and_sums_are_float32():
    q, k, v, cotangent = arrays(256, 256, 2, jnp.bfloat16)
    documents, attention = (documents_of(256),) * 2, Attention(NUM_HEADS, 2, HEAD_DIM)
    attend = functools.partial(splash.attend, documents=documents, attention=attention, name=HEADS, interpret=False)
    jaxpr = jax.make_jaxpr(lambda *qkv: jax.vjp(attend, *qkv)[1](cotangent))(q, k, v)
    found = [e for e in inside(jaxpr.jaxpr, False) if e.primitive.name in ("dot_general", "exp", "reduce_sum")]
    assert len(found) >= 2 + 4 + 3
    assert {variable.aval.dtype for equation in found for variable in equation.outvars} == {jnp.dtype(jnp.float32)}


def inside(jaxpr, in_kernel):
    """Yields the operations inside of kernels."""
    for equation in jaxpr.eqns:
        if in_kernel:
            yield equation
        for value in equation.params.values():
            for part in value if isinstance(value, tuple | list) else (value,):
                inner = part.jaxpr if isinstance(part, core.ClosedJaxpr) else part
                if isinstance(inner, core.Jaxpr):
                    yield from inside(inner, in_kernel or equation.primitive.name == "pallas_call")


MODEL = DecoderOptions(
    num_layers=1,
    embed_dim=32,
    mlp_dim=32,
    num_heads=4,
    num_kv_heads=2,
    vocab_size=11,
    norm=NormOptions(qk=True),
    window=40,
)
SHAPE = (8, 128)


def batch():
    place = np.broadcast_to(np.arange(SHAPE[1]), SHAPE)
    return {
        "tokens": (7 * place % 11).astype(np.int32),
        "targets": (5 * place % 11).astype(np.int32),
        "segment_ids": (1 + (place >= 50)).astype(np.int32),
        "positions": np.where(place < 50, place, place - 50).astype(np.int32),
        "weights": np.ones(SHAPE, np.float32),
        SEQUENCE_INDEX: np.arange(SHAPE[0], dtype=np.int32),
    }


def gradients(implementation, placement=None, policy="none", model=MODEL):
    """(loss, gradients)."""
    options = dataclasses.replace(model, attention=implementation)
    task = decoder(
        options, batch_size=SHAPE[0], sequence_length=SHAPE[1], remat=RematOptions(policy), placement=placement
    )
    params = meta.unbox(jax.jit(task.init)(jax.random.key(0)))
    both = jax.value_and_grad(lambda params: task.loss(params, batch(), jax.random.key(1), True)[0])
    return jax.jit(both)(params)


# With scores that are scaled and capped, sinks, and a layer without the window.
ALTERNATING = {"num_layers": 2, "global_every": 2, "attention_cap": 2.0, "attention_scalar": 5, "sinks": True}


@pytest.mark.parametrize(
    ("implementation", "changed", "sizes"),
    [
        ("splash", {}, {"data": 2, "fsdp": 2, "tensor": 2}),
        ("blockwise", {}, {"data": 2, "fsdp": 2, "tensor": 2}),
        pytest.param("cudnn", {}, {"data": 2, "fsdp": 2, "tensor": 2}, marks=pytest.mark.slow),
        pytest.param(
            "triton", {"window": 0, "sinks": True}, {"data": 2, "fsdp": 2, "tensor": 2}, marks=pytest.mark.slow
        ),
        pytest.param("flex", {"sinks": True}, {"data": 2, "fsdp": 2, "tensor": 2}, marks=pytest.mark.slow),
        pytest.param("flex", ALTERNATING, {"tensor": 2}, marks=pytest.mark.slow),
        pytest.param("splash", ALTERNATING, {"tensor": 2}, marks=pytest.mark.slow),
        pytest.param("blockwise", ALTERNATING, {"tensor": 2}, marks=pytest.mark.slow),
    ],
)
def test_a_model_learns_the_same_from_the_kernel_on_a_mesh(implementation, changed, sizes, cudnn_by_xla, monkeypatch):
    if implementation == "flex":
        implementation = "cudnn"
        monkeypatch.setattr(Placement, "compute_capability", (9, 0))
    model = dataclasses.replace(MODEL, **changed)
    mesh = make_mesh(dict.fromkeys(AXES, 1) | sizes, jax.devices())
    placement = Placement(default_rules(LayoutOptions()), mesh)
    loss, got = gradients(implementation, placement, "save_attention", model)
    expected_loss, expected = gradients("xla", model=model)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=4e-5 * np.abs(b).max()), got, expected)


LONG, FAR = (8192, 8192), (8200, 8200)


def case(head_dim, lengths, dtype, platform, *, documents=False, memory=False, asked="auto", **options):
    return Case(Attention(8, 8, head_dim, asked, **options), lengths, dtype, platform, documents, memory)


@pytest.mark.parametrize(
    ("case", "name", "why"),
    [
        (case(128, LONG, jnp.bfloat16, "tpu", documents=True), "splash", "supports it"),
        (case(64, (128, 1280), jnp.bfloat16, "tpu", memory=True), "splash", "supports it"),
        (case(128, LONG, jnp.float32, "tpu"), "blockwise", "supports only bfloat16"),
        (case(128, FAR, jnp.bfloat16, "tpu"), "blockwise", "multiples of 128"),
        (case(80, (512, 512), jnp.bfloat16, "tpu"), "xla", "below 1,024 tokens"),
        (case(128, LONG, jnp.bfloat16, "gpu"), "cudnn", "supports it"),
        (case(64, FAR, jnp.float16, "cuda", window=100), "cudnn", "supports it"),
        (
            case(128, LONG, jnp.bfloat16, "gpu", documents=True),
            "triton",
            "cuDNN's kernel does not support documents; JAX's",
        ),
        (case(128, LONG, jnp.bfloat16, "gpu", documents=True, window=8192), "triton", "not support documents"),
        (case(256, (128, 128), jnp.bfloat16, "gpu"), "triton", "not support heads of 256"),
        (case(128, (127, 127), jnp.bfloat16, "gpu", documents=True), "xla", "not support sequences of 127 tokens"),
        (case(128, LONG, jnp.float32, "gpu", documents=True), "blockwise", "not support float32 or documents"),
        (case(512, LONG, jnp.bfloat16, "gpu"), "blockwise", "not support heads of 512"),
        (
            case(128, LONG, jnp.bfloat16, "gpu", documents=True, window=100),
            "blockwise",
            "Pallas kernel does not support window",
        ),
        (case(128, LONG, jnp.bfloat16, "gpu", cap=1.0), "blockwise", "not support capped scores"),
        (case(64, LONG, jnp.bfloat16, "gpu", sinks=True), "triton", "cuDNN's kernel does not support sinks"),
        (
            case(64, LONG, jnp.bfloat16, "gpu", sinks=True, window=128),
            "blockwise",
            "Pallas kernel does not support window",
        ),
        (
            case(128, LONG, jnp.bfloat16, "gpu", documents=True, memory=True),
            "blockwise",
            "Pallas kernel does not support memory",
        ),
        (case(128, (1024, 1024), jnp.bfloat16, "cpu"), "blockwise", "no kernel for cpu"),
        (case(128, (1023, 1024), jnp.bfloat16, "cpu", documents=True), "xla", "below 1,024 tokens"),
        (case(80, LONG, jnp.float32, "cpu", asked="splash"), "splash", "model.attention=splash"),
    ],
)
def test_auto_is_the_kernel_that_fits(case, name, why):
    found, reason = chosen(case)
    assert found == name
    assert why in reason


# A GPU before Hopper: documents are a mask if no other kernel supports them, and if the mask is small.
@pytest.mark.parametrize(
    ("lengths", "options", "name", "why"),
    [
        (LONG, {}, "triton", "JAX's Pallas kernel does"),
        (
            LONG,
            {"window": 100},
            "cudnn",
            "Pallas kernel does not support window; cuDNN's kernel with a [T, S] mask does",
        ),
        (FAR, {"window": 100}, "blockwise", "Pallas kernel does not support window"),
        (LONG, {"cap": 5.0}, "blockwise", "Pallas kernel does not support capped scores"),
    ],
)
def test_gpus_before_hopper_mask_documents_of_up_to_8192_tokens_by_cudnn(lengths, options, name, why):
    given = case(128, lengths, jnp.bfloat16, "gpu", documents=True, **options)
    found, reason = chosen(given._replace(capability=(8, 0)))
    assert found == name
    assert reason.endswith(why)
    assert chosen(given._replace(capability=(9, 0)))[0] == chosen(given)[0]  # a newer GPU as an unknown one


def test_cudnn_has_a_score_function_from_hopper_on_if_it_is_asked_for(monkeypatch):
    given = case(128, LONG, jnp.bfloat16, "gpu", documents=True, asked="cudnn", sinks=True, cap=5.0)._replace
    monkeypatch.setattr(flex, "is_available", lambda: True)
    monkeypatch.setattr(flex, "_module", lambda: types.SimpleNamespace(check_cudnn_version=lambda: 91300))
    assert "a score function masks documents" in chosen(given(capability=(9, 0)))[1]
    assert select.problems(given().attention, "bfloat16", dict.fromkeys(AXES, 1)) == []
    plain = given(attention=Attention(8, 8, 128, "cudnn"), capability=(8, 0))
    assert chosen(plain) == ("cudnn", "model.attention=cudnn; documents are a [T, S] mask")
    refused = (
        "^model.attention: got cudnn with model.attention_cap on a device without .*; nearest: model.attention=auto$"
    )
    for capability in (None, (8, 9)):
        with pytest.raises(UserError, match=refused):
            chosen(given(capability=capability))
    monkeypatch.setattr(flex, "_module", lambda: types.SimpleNamespace(check_cudnn_version=lambda: 91200))
    with pytest.raises(UserError, match=refused):
        chosen(given(capability=(9, 0)))
    monkeypatch.setattr(flex, "is_available", lambda: False)
    found = select.problems(given().attention, "bfloat16", dict.fromkeys(AXES, 1))
    assert [line.got.split(",")[0] for line in found] == [
        "cudnn with model.attention_cap = 5.0",
        "cudnn with model.sinks = True",
    ]


def test_auto_does_without_a_kernel_that_this_version_of_jax_has_not(monkeypatch):
    monkeypatch.setattr(triton, "is_available", lambda: False)
    name, why = chosen(case(128, LONG, jnp.bfloat16, "gpu", documents=True))
    assert (name, why.rpartition("; ")[2]) == (
        "blockwise",
        f"JAX {jax.__version__} has no Pallas kernel for attention on GPUs",
    )
