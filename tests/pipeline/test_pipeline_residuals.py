"""Which residuals of a layer are copies of its weights: told by the traced layer, whatever JAX saves.

b: sequences, D: embed dim.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from meshtrain.models.decoder import DecoderOptions
from meshtrain.models.decoder_task import decoder
from meshtrain.models.remat import RematOptions
from meshtrain.pipeline import pullback, residuals

WIDTH = 8
W = jax.ShapeDtypeStruct((1, WIDTH, WIDTH), jnp.float32)
X = jax.ShapeDtypeStruct((4, WIDTH), jnp.float32)


def without_its_first_dim(w, x):
    return jnp.tanh(x @ w[0]), None


def in_a_loop(w, x):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0], None


def cast(w, x):
    return jax.lax.scan(lambda x, w: ((x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(x.dtype), None), x, w)


def transposed(w, x):
    return jnp.tanh(x @ (w[0] * 2).T), None


def only_added(w, x):
    return jnp.tanh(x + w[0, :1]), None


def masked_by_activations(w, x):
    return jnp.tanh(x @ jnp.where(x[0] > 0, w[0], 0)), None


def recomputed(w, x):
    return jax.checkpoint(lambda w, x: transposed(w, x)[0])(w, x), None


def warning(layer, capsys, w=W, x=X):
    jax.eval_shape(lambda w, x: residuals.inspect(layer, w, x), w, x)
    return capsys.readouterr().err


@pytest.mark.parametrize("layer", [in_a_loop, only_added, masked_by_activations, recomputed])
def test_weights_that_are_not_copied_are_not_reported(layer, capsys):
    assert warning(layer, capsys) == ""


@pytest.mark.parametrize(
    "layer, copy",
    [(cast, "bfloat16[1, 8, 8]"), (transposed, "float32[8, 8]"), (without_its_first_dim, "float32[8, 8]")],
)
def test_copies_of_weights_are_reported_with_their_bytes(layer, copy, capsys):
    line = warning(layer, capsys)
    assert line.startswith("meshtrain: WARNING: stages.repeated: its backward pass saves "), line
    assert copy in line
    assert "nearest: dtypes by Stages.cast" in line


def test_weights_that_are_not_recognized_are_reported(capsys, monkeypatch):
    """Were a weight another array to JAX than the one given, it would be saved: here none is recognized."""
    monkeypatch.setattr(pullback, "indices_of_weights", lambda leaves, _: [None] * len(leaves))
    assert "float32[1, 8, 8]" in warning(in_a_loop, capsys)


def test_a_loop_passes_on_in_its_next_turn_what_it_read_in_this_one():
    def shifted(a, b):
        turn = lambda carry, x: ((x, carry[0], carry[2]), carry[1])  # noqa: E731
        (_, _, same), stacked = jax.lax.scan(turn, (a, a, a), b)
        return same, stacked

    jaxpr = jax.make_jaxpr(shifted)(jnp.zeros(()), jnp.zeros(4)).jaxpr
    assert residuals.depends(jaxpr, [True, False], on_constants=False) == [True, True]
    assert residuals.depends(jaxpr, [False, True], on_constants=False) == [False, True]


def layer_of_decoder(dtype, policy="none", **options):
    shape = DecoderOptions(
        num_layers=1, embed_dim=32, mlp_dim=48, num_heads=2, num_kv_heads=2, vocab_size=16, **options
    )
    task = decoder(shape, batch_size=2, sequence_length=8, dtype=dtype, remat=RematOptions(policy))
    ints = jnp.zeros((2, 8), jnp.int32)
    batch = dict.fromkeys(("positions", "segment_ids"), ints) | {"sequence_index": jnp.arange(2)}
    weights = nn.unbox(jax.eval_shape(task.init, jax.random.key(0)))["layers"]
    layer = lambda weights, x: task.stages.repeated(weights, x, batch, jax.random.key(0), 0, True)  # noqa: E731
    return task, layer, weights, jax.ShapeDtypeStruct((2, 8, 32), dtype)


@pytest.mark.parametrize(
    "policy, options", [("none", {"dropout_rate": 0.1}), ("none", {"norm": "layernorm", "biases": True}), ("dots", {})]
)
def test_layers_of_the_decoder_save_no_copies(policy, options, capsys):
    task, layer, weights, x = layer_of_decoder(jnp.bfloat16, policy, **options)
    assert warning(layer, capsys, jax.eval_shape(task.stages.cast, weights), x) == ""


def test_without_the_cast_before_the_rows_they_do(capsys):
    _, layer, weights, x = layer_of_decoder(jnp.bfloat16)
    assert "bfloat16[1, 32, 48]" in warning(layer, capsys, weights, x)
