"""cuDNN's kernel, which computes on GPUs only, by XLA."""

import enum
import types

import jax
import jax.numpy as jnp
import pytest

from meshtrain.models.attention import flex


@pytest.fixture
def cudnn_by_xla(monkeypatch):
    """XLA computes what cuDNN's kernel is asked for, with the same arguments, which are those that the kernel takes."""
    attend = jax.nn.dot_product_attention

    def called(*qkv, implementation, **given):
        if implementation == "cudnn":
            assert given["mask"] is None or given["local_window_size"] is None
            assert given["local_window_size"] is None or given["is_causal"]
        return attend(*qkv, implementation="xla", **given)

    monkeypatch.setattr(jax.nn, "dot_product_attention", called)
    monkeypatch.setattr(flex, "_module", lambda: FORMULA)
    monkeypatch.setattr(flex, "is_available", lambda: True)


class MaskType(enum.Enum):
    NO_MASK, CAUSAL = 0, 2


def scores_of(q, k, score_mod, arguments, scale, mask_type, window):
    """Scores [b, N, T, S] as cuDNN computes them: scaled, changed by the function, and only then masked by position."""
    scores = jnp.einsum("btnh,bsnh->bnts", q, repeated(k, q), preferred_element_type=jnp.float32) * scale
    scores = scores if score_mod is None else score_mod(scores, *arguments)
    distance = jnp.arange(q.shape[1])[:, None] - jnp.arange(k.shape[1])
    is_causal = mask_type is MaskType.CAUSAL
    assert window is None or (is_causal and window > 0)
    visible = (
        (distance >= 0) & (distance < (window or k.shape[1])) if is_causal else jnp.full_like(distance, True, bool)
    )
    return jnp.where(visible, scores, -jnp.inf)


def repeated(x, q):
    return jnp.repeat(x, q.shape[2] // x.shape[2], axis=2)


def forward(q, k, v, bias, q_seqlen, kv_seqlen, q_offsets, kv_offsets, page_table_k, page_table_v, score_mod_args,
            scale, seed, dropout_rate, variadic_args, mask_type, layout, sliding_window_length, score_mod,
            cudnn_version, return_residual):  # fmt: skip
    assert (dropout_rate, variadic_args, return_residual) == (0.0, (False, False), False)
    scores = scores_of(q, k, score_mod, score_mod_args, scale, mask_type, sliding_window_length)
    log_sums = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.exp(scores - log_sums[..., None])
    heads = jnp.einsum("bnts,bsnh->btnh", weights, repeated(v, q)).astype(q.dtype)
    unused = (bias, q_seqlen, kv_seqlen, q_offsets, kv_offsets, page_table_k, page_table_v)
    return heads, (q, k, v, *unused, score_mod_args, log_sums, heads)


def backward(scale, seed, dropout_rate, variadic_args, mask_type, layout, sliding_window_length, score_mod,
             cudnn_version, return_residual, res, grad_output):  # fmt: skip
    """Flash attention's backward pass (Dao 2023), from heads and logarithms of sums that may include sinks."""
    q, k, v, *_, arguments, log_sums, heads = res
    make = lambda q, k: scores_of(q, k, score_mod, arguments, scale, mask_type, sliding_window_length)  # noqa: E731
    scores, to_queries_and_keys = jax.vjp(make, q, k)
    weights = jnp.exp(scores - log_sums[..., None])
    to_values = jax.linear_transpose(lambda v: jnp.einsum("bnts,bsnh->btnh", weights, repeated(v, q)), v)
    of_weights = jnp.einsum("btnh,bsnh->bnts", grad_output, repeated(v, q))
    inner = jnp.einsum("btnh,btnh->bnt", grad_output, heads)[..., None]
    return *to_queries_and_keys(weights * (of_weights - inner)), *to_values(grad_output), *[None] * 8


# The private module of JAX that `flex` calls, by formula.
FORMULA = types.SimpleNamespace(
    MaskType=MaskType,
    AttentionLayout=enum.Enum("AttentionLayout", {"BTNH": 0}),
    check_cudnn_version=lambda: flex.OLDEST_CUDNN,
    _dot_product_attention=types.SimpleNamespace(fwd=forward, bwd=backward),
)
