"""Rotary angles against independent formulas, norms against numpy, and where dropout's zeros fall."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import meta

from meshtrain.models.decoder_options import RopeOptions
from meshtrain.models.layers import Norm, dropout
from meshtrain.models.rotary import Scaling, rotary_angles, rotate
from meshtrain.models.task import SEQUENCE_INDEX
from meshtrain.models.transformer.decoder import DecoderOptions, angles_of
from meshtrain.models.transformer.task import decoder
from meshtrain.sharding.placement import Placement

# Llama 3.1 405B's (rope_theta, head dim, factor, low, high, original length).
BASE, HEAD_DIM, FACTOR, LOW, HIGH, ORIGINAL = 500000.0, 128, 8.0, 1.0, 4.0, 8192


def scaled_frequencies():
    """Llama 3.1's rule, written channel by channel in terms of wavelengths; and how many channels each case has."""
    result, cases = [], {"kept": 0, "stretched": 0, "between": 0}
    for i in range(HEAD_DIM // 2):
        frequency = 1.0 / BASE ** (2 * i / HEAD_DIM)
        wavelength = 2 * math.pi / frequency
        if wavelength < ORIGINAL / HIGH:
            cases["kept"] += 1
        elif wavelength > ORIGINAL / LOW:
            cases["stretched"] += 1
            frequency /= FACTOR
        else:
            cases["between"] += 1
            smooth = (ORIGINAL / wavelength - LOW) / (HIGH - LOW)
            frequency = (1 - smooth) * frequency / FACTOR + smooth * frequency
        result.append(frequency)
    return np.array(result), cases


def test_llama3_scaling_of_rotary_frequencies():
    expected, cases = scaled_frequencies()
    assert min(cases.values()) > 0
    positions = np.array([[0, 1, 100, 8191, 131071]])
    got = rotary_angles(jnp.asarray(positions), HEAD_DIM, BASE, Scaling(FACTOR, LOW, HIGH, ORIGINAL))
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, positions[..., None] * expected, rtol=1e-5)


def test_options_reach_the_angles():
    positions = jnp.array([[0, 3, 700]])
    plain = DecoderOptions(embed_dim=128, num_heads=1, rope=RopeOptions(base=BASE, original_length=ORIGINAL))
    frequencies = BASE ** (-np.arange(0, 128, 2) / 128)
    np.testing.assert_allclose(angles_of(plain, positions), np.asarray(positions)[..., None] * frequencies, rtol=1e-5)
    scaled = DecoderOptions(
        embed_dim=128, num_heads=1, rope=RopeOptions(base=BASE, original_length=ORIGINAL, factor=8.0)
    )
    np.testing.assert_allclose(
        angles_of(scaled, positions), np.asarray(positions)[..., None] * scaled_frequencies()[0], rtol=1e-5
    )
    assert angles_of(DecoderOptions(positions="learned"), positions) is None
    local = dataclasses.replace(scaled, rope=dataclasses.replace(scaled.rope, local_base=BASE / 2))
    assert angles_of(local, positions).shape == (1, 3, 64), "no layer has a window"
    unscaled = angles_of(dataclasses.replace(plain, rope=dataclasses.replace(plain.rope, base=BASE / 2)), positions)
    np.testing.assert_array_equal(angles_of(dataclasses.replace(local, window=4), positions), unscaled)
    both = angles_of(dataclasses.replace(local, window=4, global_every=2), positions)
    np.testing.assert_array_equal(both.local, unscaled)
    np.testing.assert_array_equal(both.everywhere, angles_of(scaled, positions))


def test_rotation_is_a_complex_product():
    generator = np.random.default_rng(0)
    x, angles = generator.normal(size=(2, 3, 4, 10)), generator.normal(size=(2, 3, 5))
    product = (x[..., :5] + 1j * x[..., 5:]) * np.exp(1j * angles)[:, :, None]
    got = rotate(jnp.asarray(x, jnp.float32), jnp.asarray(angles, jnp.float32))
    np.testing.assert_allclose(got, np.concatenate([product.real, product.imag], -1), rtol=1e-4, atol=1e-6)
    rounded = jnp.asarray(x, jnp.bfloat16)
    got, wide = (rotate(one, jnp.asarray(angles, jnp.float32)) for one in (rounded, rounded.astype(jnp.float32)))
    assert (got.dtype, wide.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_array_equal(got, wide.astype(jnp.bfloat16))


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
def test_norm(kind):
    generator = np.random.default_rng(0)
    x, scale, bias = generator.normal(2.0, 3.0, (2, 3, 8)), generator.normal(size=8), generator.normal(size=8)
    norm = Norm(kind, 1e-2, True, Placement.single_device())
    got = norm.apply({"params": {"scale": jnp.asarray(scale), "bias": jnp.asarray(bias)}}, jnp.asarray(x, jnp.float32))
    centred = x - x.mean(-1, keepdims=True) if kind == "layernorm" else x
    expected = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-2) * scale + bias
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_norm_of_16_bits_computes_in_float32(kind, dtype):
    x = jnp.asarray(np.random.default_rng(0).normal(2.0, 3.0, (4, 32)), dtype)
    norm, scale = Norm(kind, 1e-5, False, Placement.single_device()), {"params": {"scale": jnp.linspace(0.5, 2, 32)}}
    got, wanted = norm.apply(scale, x), norm.apply(scale, x.astype(jnp.float32))
    assert (got.dtype, wanted.dtype) == (dtype, jnp.float32)
    np.testing.assert_array_equal(got, wanted.astype(dtype))


def test_a_centered_scale_starts_at_zero_and_multiplies_as_one():
    x = jnp.asarray(np.random.default_rng(0).normal(2.0, 3.0, (2, 3, 8)), jnp.float32)
    centered, plain = (Norm("rmsnorm", 1e-2, False, Placement.single_device(), kind) for kind in (True, False))
    start = meta.unbox(centered.init(jax.random.key(0), x))
    assert not np.any(start["params"]["scale"])
    np.testing.assert_array_equal(centered.apply(start, x), plain.apply(plain.init(jax.random.key(0), x), x))
    scale = {"params": {"scale": jnp.linspace(-2, 2, 8)}}
    more = plain.apply({"params": {"scale": 1 + scale["params"]["scale"]}}, x)
    np.testing.assert_array_equal(centered.apply(scale, x), more)


def test_dropout_keeps_the_mean_and_its_rate():
    rate, x = 0.2, jnp.ones((4, 50, 64), jnp.bfloat16)
    dropped = dropout(x, rate, jax.random.split(jax.random.key(0), 4), 1)
    assert dropped.dtype == jnp.bfloat16
    values = np.asarray(dropped, np.float32)
    assert set(np.unique(values)) == {0.0, np.float32(jnp.bfloat16(1 / (1 - rate)))}
    deviation = math.sqrt(rate * (1 - rate) / values.size)
    assert abs((values == 0).mean() - rate) < 4 * deviation
    assert dropout(x, 0.0, jax.random.split(jax.random.key(0), 4), 1) is x


# A decoder whose every matrix is zero adds up its biases alone: each place drops another power of two, so the sum tells
# which of them were dropped. At a rate of one half, what is kept is doubled.
PLACES = ("embedding", "layer 0 attention", "layer 0 mlp", "layer 1 attention", "layer 1 mlp")
OPTIONS = DecoderOptions(
    num_layers=2, embed_dim=32, mlp_dim=8, num_heads=2, num_kv_heads=2, vocab_size=7, vocab_multiple=8,
    dropout_rate=0.5, activation="gelu", biases=True,
)  # fmt: skip
NUM_SEQUENCES, SEQUENCE_LENGTH = 6, 16


def kept(rng, sequence_index, train=True, layers=slice(None), start=0):
    """Bool [place, b, T, D]: what was kept at each of `PLACES`. `layers` are applied, the first has index `start`."""
    task = decoder(OPTIONS, batch_size=NUM_SEQUENCES, sequence_length=SEQUENCE_LENGTH)
    shapes = jax.eval_shape(task.init, jax.random.key(0))
    params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), jax.tree.map(lambda box: box, shapes))
    params = jax.tree.map(lambda box: box.value, params, is_leaf=lambda leaf: hasattr(leaf, "value"))
    params["embedding"]["table"] += 1.0
    params["layers"]["attention"]["output_bias"] += jnp.array([[2.0], [8.0]])
    params["layers"]["mlp"]["down_bias"] += jnp.array([[4.0], [16.0]])
    ints = jnp.zeros((len(sequence_index), SEQUENCE_LENGTH), jnp.int32)
    batch = dict.fromkeys(("tokens", "positions", "segment_ids"), ints)
    batch[SEQUENCE_INDEX] = jnp.asarray(sequence_index, jnp.int32)
    x = task.stages.first(params, batch, rng, train)
    some = jax.tree.map(lambda leaf: leaf[layers], params["layers"])
    x = np.asarray(task.stages.repeated(some, x, batch, rng, start, train)[0])
    assert np.array_equal(x, np.round(x))
    return np.stack([(x.astype(int) // (2 if train else 1)) >> place & 1 == 1 for place in range(len(PLACES))])


@pytest.fixture(scope="module")
def masks():
    return kept(jax.random.key(3), range(NUM_SEQUENCES))


def unrelated(a, b):
    """Whether two masks agree as often as independent coins do."""
    return abs((a == b).mean() - 0.5) < 4 * 0.5 / math.sqrt(a.size)


def test_masks_of_all_places_are_coins_of_their_own(masks):
    for place, mask in enumerate(masks):
        assert abs(mask.mean() - 0.5) < 4 * 0.5 / math.sqrt(mask.size), PLACES[place]
        for other in range(place):
            assert unrelated(mask, masks[other]), (PLACES[place], PLACES[other])
        for sequence in range(1, NUM_SEQUENCES):
            assert unrelated(mask[0], mask[sequence]), (PLACES[place], sequence)


def test_masks_follow_the_index_of_the_sequence_in_the_global_batch(masks):
    order = [4, 0, 5, 2]
    np.testing.assert_array_equal(kept(jax.random.key(3), order), masks[:, order])


def test_masks_differ_from_step_to_step(masks):
    for place, mask in enumerate(kept(jax.random.key(4), range(NUM_SEQUENCES))):
        assert unrelated(mask, masks[place]), PLACES[place]


def test_a_layer_draws_by_its_index_in_the_whole_model(masks):
    alone = kept(jax.random.key(3), range(NUM_SEQUENCES), layers=slice(1, 2), start=1)
    np.testing.assert_array_equal(alone[3:], masks[3:])


def test_nothing_is_dropped_outside_training():
    assert kept(jax.random.key(3), range(2), train=False).all()
