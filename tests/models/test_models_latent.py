"""Latent attention as its paper writes it, one head after the other, and which tensors of a file are left out."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax.core import meta

from meshtrain.hf.names import is_ignored
from meshtrain.models.attention.attention import Attention, Latent
from meshtrain.models.attention.latent import LatentAttention
from meshtrain.models.decoder_options import DecoderOptions, LatentOptions
from meshtrain.sharding.placement import Placement

LENGTH, WIDTH, HEADS, OWN, ROTARY, VALUES = 5, 12, 3, 4, 2, 3
LATENT = Latent(width=6, query_width=7, rotary=ROTARY, values=VALUES, epsilon=1e-6)


def normed(x):
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + LATENT.epsilon)


def rotated(pair, angle):
    return np.array(
        [pair[0] * np.cos(angle) - pair[1] * np.sin(angle), pair[1] * np.cos(angle) + pair[0] * np.sin(angle)]
    )


def by_heads(p, x, angles, stretch):
    latents, shared = np.split(x @ p["key_value_down"], [LATENT.width], axis=-1)
    queries = np.einsum("tr,rnh->tnh", normed(x @ p["query_down"]), p["query"])
    both = np.einsum("tr,rnh->tnh", normed(latents), p["key_value"])
    result = np.zeros((LENGTH, WIDTH))
    for head in range(HEADS):
        for t in range(LENGTH):
            query = np.append(queries[t, head, :OWN], rotated(queries[t, head, OWN:], angles[t, 0]))
            keys = [np.append(both[s, head, :OWN], rotated(shared[s], angles[s, 0])) for s in range(t + 1)]
            scores = np.exp(stretch**2 * np.array(keys) @ query / np.sqrt(OWN + ROTARY))
            result[t] += (scores / scores.sum()) @ both[: t + 1, head, OWN:] @ p["output"][head]
    return result


def test_heads_are_those_of_the_formula():
    attention = Attention(HEADS, HEADS, OWN + ROTARY, "xla")
    module = LatentAttention(attention, 0.5, 0.5, Placement.single_device(), jnp.float32, LATENT)
    x = np.random.default_rng(0).normal(size=(1, LENGTH, WIDTH)).astype(np.float32)
    angles = np.linspace(0, 2, LENGTH, dtype=np.float32)[None, :, None]
    params = meta.unbox(module.init(jax.random.key(0), x, angles, None))["params"]
    for stretch in (None, 1.3):
        got = module.apply({"params": params}, x, angles, None, stretch=stretch)
        wanted = by_heads(jax.tree.map(np.float64, params), np.float64(x[0]), angles[0], stretch or 1.0)
        np.testing.assert_allclose(got[0], wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


def test_only_layers_for_further_tokens_are_left_out_of_a_file():
    options = DecoderOptions(num_layers=2, latent=LatentOptions(dim=4, rope_dim=2))
    assert is_ignored("model.layers.2.mlp.gate_proj.weight", options)
    assert not is_ignored("model.layers.1.mlp.gate_proj.weight", options)
    assert not is_ignored(
        "model.layers.2.mlp.gate_proj.weight",
        dataclasses.replace(options, latent=dataclasses.replace(options.latent, dim=0)),
    )
