"""Attention is traced as on the target: which kernel it is, and that JAX's private functions come back."""

import functools
import types

import jax
import jax.numpy as jnp
import pytest
from flax.core import meta
from jax.extend import core

from meshtrain.models.attention import blockwise, splash, triton
from meshtrain.models.attention.attention import Attention
from meshtrain.models.task import SEQUENCE_INDEX
from meshtrain.models.transformer.decoder import DecoderOptions
from meshtrain.models.transformer.decoder_cost import kernels
from meshtrain.models.transformer.task import decoder
from meshtrain.plan.cluster.attention_tracing import as_on_target, private, replace_functions
from meshtrain.plan.cluster.clusters import Cluster
from meshtrain.plan.cluster.traced_flops import CUDNN, attention_kernel
from meshtrain.sharding.placement import Placement
from meshtrain.sharding.rules import AXES

NAMES = ("check_cudnn_version", "check_compute_capability", "is_cuda_compute_capability_equal")


def test_functions_are_put_back_after_an_error():
    originals = {name: getattr(private, name) for name in NAMES}

    def interrupted():
        with replace_functions(private, check_cudnn_version=lambda: 91000):
            raise KeyError(private.check_cudnn_version())

    with pytest.raises(KeyError, match="91000"):
        interrupted()
    assert {name: getattr(private, name) for name in NAMES} == originals


def test_a_function_that_has_moved_is_an_error_and_replaces_nothing():
    module = types.ModuleType("module")
    module.here = original = len
    with pytest.raises(AttributeError, match="gone"), replace_functions(module, here=max, gone=max):
        raise AssertionError("the block must not run")
    assert module.here is original


def by_jax(implementation):
    return functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation=implementation)


GIVEN = {"documents": None, "attention": Attention(4, 4, 64), "name": "heads"}
KERNELS = {
    "cudnn": by_jax("cudnn"),
    "splash": functools.partial(splash.attend, interpret=True, **GIVEN),
    "blockwise": functools.partial(blockwise.attend, **GIVEN),
    "triton": functools.partial(triton.attend, interpret=True, **GIVEN),
    "xla": by_jax("xla"),
}


@pytest.mark.parametrize("within_documents", [True, False])
def test_cudnn_gets_a_window_or_a_mask_and_is_causal_in_both_cases(within_documents):
    options = DecoderOptions(
        1, 256, 64, 4, 4, vocab_size=16, attention="cudnn", window=100, within_documents=within_documents
    )
    task = decoder(options, batch_size=2, sequence_length=128, dtype=jnp.bfloat16)
    params = meta.unbox(jax.eval_shape(task.init, jax.random.key(0)))
    batch = {**task.batch, SEQUENCE_INDEX: jax.ShapeDtypeStruct((2,), jnp.int32)}
    with as_on_target(Cluster("h100:1x8", "cuda", (), 1, None, (9, 0))):
        traced = jax.make_jaxpr(task.logits)(params, batch)
    (found,) = [equation for equation in equations(traced.jaxpr) if equation.primitive.name in CUDNN]
    assert found.params["mask_type"] == private.MaskType.CAUSAL
    assert (found.params["sliding_window_length"] or 0) == (0 if within_documents else 100)
    shapes = [variable.aval.shape for variable in found.invars]
    assert ((2, 1, 128, 128) in shapes) == within_documents


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in core.jaxprs_in_params(equation.params):
            yield from equations(inner)


@pytest.mark.parametrize("name", KERNELS)
def test_the_kernel_is_read_off_the_traced_step(name):
    head = jax.ShapeDtypeStruct((2, 128, 4, 64), jnp.bfloat16)
    loop = lambda q: jax.lax.scan(lambda x, _: (KERNELS[name](x, x, x), None), q, length=2)[0]  # noqa: E731
    with as_on_target(Cluster("h100:1x8", "cuda", (), 1, None, (9, 0))):
        traced = jax.make_jaxpr(jax.grad(lambda q: jax.jit(loop)(q).astype(jnp.float32).sum()))(head)
    assert attention_kernel(traced.jaxpr) == name


@pytest.mark.parametrize(
    ("length", "cluster", "changed"),
    [
        (128, "cuda", {}),
        (128, "cuda", {"within_documents": False}),
        (1024, "cuda", {"window": 100}),
        (1024, "cpu", {}),
        (128, "cpu", {"window": 1000}),
    ],
    ids=str,
)
def test_what_explain_says_of_attention_is_what_is_traced(monkeypatch, length, cluster, changed):
    model = DecoderOptions(1, 256, 64, 4, 4, vocab_size=16, **changed)
    monkeypatch.setattr(Placement, "platform", cluster)
    task = decoder(model, batch_size=1, sequence_length=length, dtype=jnp.bfloat16)
    (kernel,) = kernels(model, length, jnp.bfloat16, cluster, dict.fromkeys(AXES, 1), length)
    params = meta.unbox(jax.eval_shape(task.init, jax.random.key(0)))
    batch = {**task.batch, SEQUENCE_INDEX: jax.ShapeDtypeStruct((1,), jnp.int32)}
    with as_on_target(Cluster("h100:1x8", "cuda", (), 1, None, (9, 0))):
        traced = jax.make_jaxpr(task.logits)(params, batch)
    assert attention_kernel(traced.jaxpr) == kernel.by
