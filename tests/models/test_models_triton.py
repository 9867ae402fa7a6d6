"""JAX's attention kernel for GPUs, interpreted, against attention written out; and what it is not taken for."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshtrain.errors import UserError
from meshtrain.models.attention import triton
from meshtrain.models.remat import HEADS, checkpoint_policy
from meshtrain.sharding.placement import Placement
from tests.models.test_models_blockwise import arrays, attention, both_ways, documents_of, written_out
from tests.models.test_models_blockwise import num_runs as num_jitted


def attend(q, k, v, documents, **options):
    return triton.attend(q, k, v, documents, attention(k, **options), name=HEADS, interpret=True)


@pytest.mark.parametrize(
    ("length", "num_kv_heads", "masked", "options"),
    [(256, 2, True, {}), (200, 1, False, {"scalar": 4}), (200, 4, True, {"causal": False})],
    ids=["documents", "padded", "all"],
)
def test_the_kernel_computes_attention_and_its_gradients(length, num_kv_heads, masked, options):
    given, documents = arrays(length, length, num_kv_heads), (documents_of(length),) * 2 if masked else None
    ways = [both_ways(way, given, documents, **options) for way in (attend, written_out)]
    for got, expected in zip(*ways, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


def test_in_16_bits_it_errs_by_no_more_than_one_rounding():
    given, documents = arrays(256, 256, 2, jnp.bfloat16), (documents_of(256),) * 2
    exact = both_ways(written_out, [x.astype(jnp.float32) for x in given], documents)
    for got, expected in zip(both_ways(attend, given, documents), exact, strict=True):
        assert got.dtype == jnp.bfloat16
        error = np.linalg.norm(got.astype(jnp.float32) - expected) / np.linalg.norm(expected)
        assert error <= jnp.finfo(jnp.bfloat16).eps


@pytest.mark.parametrize(("policy", "num_forward"), [("none", 1), ("full", 2), ("save_attention", 1)])
def test_the_kernel_runs_again_where_the_policy_says_so(policy, num_forward):
    given = arrays(128, 128, 2)
    loss = lambda q: jnp.sum(jnp.sin(attend(jnp.sin(q), *given[1:3], None)))  # noqa: E731
    if policy != "none":
        loss = jax.checkpoint(loss, policy=checkpoint_policy(policy, Placement.nowhere()))
    assert num_jitted(jax.make_jaxpr(jax.grad(loss))(given[0]).jaxpr, "mha_forward") == num_forward


OTHER_FORMS = {"no kernel": types.SimpleNamespace(), "no segments": types.SimpleNamespace(mha=jax.jit(lambda q: q))}


@pytest.mark.parametrize("module", OTHER_FORMS.values(), ids=OTHER_FORMS)
def test_a_kernel_of_another_form_is_refused_in_one_line(monkeypatch, module):
    monkeypatch.setattr(triton, "_module", lambda: module)
    triton.is_there.cache_clear()
    with pytest.raises(UserError, match=r"^model.attention: got triton, whose kernel .*; nearest: "):
        attend(*arrays(128, 128, 2)[:3], None)
    triton.is_there.cache_clear()
