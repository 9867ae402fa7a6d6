"""Attention is traced as on the target: which kernel it is, and that JAX's private functions come back."""

import functools
import types

import jax
import jax.numpy as jnp
import pytest

from meshtrain.models import splash
from meshtrain.plan.attention import as_on_target, private, replaced
from meshtrain.plan.topology import Cluster
from meshtrain.plan.traced import attention_kernel

NAMES = ("check_cudnn_version", "check_compute_capability", "is_cuda_compute_capability_equal")


def test_functions_are_put_back_after_an_error():
    originals = {name: getattr(private, name) for name in NAMES}

    def interrupted():
        with replaced(private, check_cudnn_version=lambda: 91000):
            raise KeyError(private.check_cudnn_version())

    with pytest.raises(KeyError, match="91000"):
        interrupted()
    assert {name: getattr(private, name) for name in NAMES} == originals


def test_a_function_that_has_moved_is_an_error_and_replaces_nothing():
    module = types.ModuleType("module")
    module.here = original = len
    with pytest.raises(AttributeError, match="gone"), replaced(module, here=max, gone=max):
        raise AssertionError("the block must not run")
    assert module.here is original


def by_jax(implementation):
    return functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation=implementation)


KERNELS = {
    "cudnn": by_jax("cudnn"),
    "splash": functools.partial(splash.attend, documents=None, name="heads", interpret=True),
    "xla": by_jax("xla"),
}


@pytest.mark.parametrize("name", KERNELS)
def test_the_kernel_is_read_off_the_traced_step(name):
    head = jax.ShapeDtypeStruct((2, 128, 4, 64), jnp.bfloat16)
    loop = lambda q: jax.lax.scan(lambda x, _: (KERNELS[name](x, x, x), None), q, length=2)[0]  # noqa: E731
    with as_on_target(Cluster("h100:1x8", "cuda", (), 1, None, (9, 0))):
        traced = jax.make_jaxpr(jax.grad(lambda q: jax.jit(loop)(q).astype(jnp.float32).sum()))(head)
    assert attention_kernel(traced.jaxpr) == name
