"""A layer cut in two: its gradients are those of `jax.grad`, and what waits between the two depends on activations.

b: sequences, T: tokens a sequence, D: embed dim.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from meshtrain.errors import UserError
from meshtrain.models.decoder_options import NormOptions
from meshtrain.models.remat import RematOptions
from meshtrain.models.task import LayerSums
from meshtrain.models.transformer.decoder import DecoderOptions
from meshtrain.models.transformer.task import decoder
from meshtrain.pipeline.pullback import SplitLayer

WIDTH = 8
X = jnp.asarray(np.random.default_rng(0).normal(size=(4, WIDTH)), jnp.float32)
W = jnp.asarray(np.random.default_rng(1).normal(size=(1, WIDTH, WIDTH)), jnp.float32)
SEED = jnp.float32(2.0)


def without_its_first_dim(w, x, index):
    return jnp.tanh(x @ w[0]), None


def in_a_loop(w, x, index):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0], None


def cast(w, x, index):
    turn = lambda x, w: ((x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(x.dtype), None)  # noqa: E731
    return jax.lax.scan(turn, x, w)[0], None


def transposed(w, x, index):
    return jnp.tanh(x @ (w[0] * 2).T), None


def recomputed(w, x, index):
    return jax.checkpoint(lambda w, x: transposed(w, x, index)[0])(w, x), None


def with_a_loss(w, x, index):
    return jnp.tanh(x @ w[0]), (jnp.sum(x**2), {"rows": jnp.float32(len(x))})


def by_random_numbers(w, x, index):
    """One key depends on the index alone, another one on the activations; and so do the columns that are added."""
    key = jax.random.fold_in(jax.random.key(0), index)
    chosen = jnp.where(x[0, 0] > 0, key, jax.random.key(7))
    columns = jnp.argsort(x[0])
    x = x[:, columns] * jax.random.bernoulli(key, 0.5, x.shape)
    noise = jax.checkpoint(lambda x: jnp.tanh(x) * jax.random.normal(chosen, x.shape))
    return noise(x @ w[0]), None


LAYERS = [without_its_first_dim, in_a_loop, cast, transposed, recomputed, with_a_loss, by_random_numbers]


@pytest.mark.parametrize("layer", LAYERS)
def test_gradients_are_those_of_one_pass_and_no_weight_waits(layer):
    index = jnp.int32(3)

    def total(w, x):
        y, sums = layer(w, x, index)
        return jnp.sum(jnp.sin(y)) + (0.0 if sums is None else SEED * sums[0])

    def in_two(w, x):
        unit = SplitLayer(layer, w, x, index)
        # Where the two passes are traced apart, one knows of the other what a buffer holds.
        y, _, kept = jax.jit(unit.forward)(w, x, index)
        assert [(leaf.shape, leaf.dtype) for leaf in kept] == [(leaf.shape, leaf.dtype) for leaf in unit.kept]
        return jax.jit(unit.backward)(kept, w, index, jnp.cos(y), SEED), [leaf.shape for leaf in kept]

    (w_gradient, x_gradient), shapes = in_two(W, X)
    expected = jax.grad(total, argnums=(0, 1))(W, X)
    for found, wanted in zip((w_gradient, x_gradient), expected, strict=True):
        assert np.linalg.norm(found - wanted) <= 1e-6 * np.linalg.norm(wanted)
    assert shapes
    assert not {shape for shape in shapes if shape[-2:] == (WIDTH, WIDTH)}


def test_residuals_in_host_memory_are_one_line():
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["x"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    layer = jax.checkpoint(lambda w, x: jnp.tanh(checkpoint_name(2 * x, "x") @ w[0]), policy=policy)
    with pytest.raises(
        UserError, match=r"stages.repeated: got saved activations in host memory.*nearest: nothing_saveable"
    ):
        SplitLayer(lambda w, x, _: (layer(w, x), None), W, X, jnp.int32(0))


def kept_by_decoder(policy, every=1, **options) -> tuple[list[tuple[tuple[int, ...], str]], LayerSums]:
    """Returns (shape, dtype) of what a unit of layers keeps: b = 2, T = 6, D = 32, two heads of 16, an mlp of 48."""
    shape = DecoderOptions(
        num_layers=2, embed_dim=32, mlp_dim=48, num_heads=2, num_kv_heads=2, vocab_size=16, **options
    )
    remat = RematOptions(policy, every)
    task = decoder(shape, batch_size=2, sequence_length=6, dtype=jnp.bfloat16, remat=remat)
    assert task.stages is not None
    stages, ints = task.stages, jnp.zeros((2, 6), jnp.int32)
    batch = dict.fromkeys(("positions", "segment_ids"), ints) | {"sequence_index": jnp.arange(2)}
    weights = nn.unbox(jax.eval_shape(task.init, jax.random.key(0)))["layers"]
    of_unit = lambda leaf: jax.ShapeDtypeStruct((stages.num_together, *leaf.shape[1:]), leaf.dtype)  # noqa: E731
    weights = jax.tree.map(of_unit, weights)
    layer = lambda weights, x, start: stages.repeated(weights, x, batch, jax.random.key(0), start, True)  # noqa: E731
    x = jax.ShapeDtypeStruct((2, 6, 32), jnp.bfloat16)
    unit = SplitLayer(layer, jax.eval_shape(stages.cast, weights), x, jax.ShapeDtypeStruct((), jnp.int32))
    return sorted((tuple(size for size in leaf.shape if size > 1), leaf.dtype.name) for leaf in unit.kept)


STREAM, HEADS, MLP = ((2, 6, 32), "bfloat16"), ((2, 6, 2, 16), "bfloat16"), ((2, 6, 48), "bfloat16")


@pytest.mark.parametrize("options", [{"dropout_rate": 0.1}, {"norm": NormOptions(name="layernorm"), "biases": True}])
def test_each_policy_keeps_what_it_names(options):
    """Masks of dropout and of documents, rotary angles and keys depend on no activation: they are made again."""
    assert kept_by_decoder("full", **options) == [STREAM]
    assert kept_by_decoder("save_attention", **options) == sorted([STREAM, HEADS])
    # Layer input and middle; queries, keys, values and heads; up and gate.
    assert kept_by_decoder("selective", **options) == sorted([STREAM] * 2 + [HEADS] * 4 + [MLP] * 2)
    everything = kept_by_decoder("none", **options)
    assert len(everything) > 15
    assert not {(32, 48), (48, 32), (32, 2, 16), (2, 16, 32)} & {shape for shape, _ in everything}


def test_every_second_layer_keeps_everything():
    one, none, both = (kept_by_decoder(*given) for given in (("full",), ("none",), ("full", 2)))
    assert len(both) == len(one) + len(none)
