"""Codes of 8 bits: levels in order, the right mean, no second moment rounded to zero, blocks from shapes alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshtrain.optim.eight_bits import decode, encode, extents, num_blocks

# One block of each random number that a rounding can have.
SIDE, ALL_RANDOM = 256, np.arange(2**16, dtype=np.uint16).reshape(256, 256)
WHOLE = (SIDE, SIDE)


def there_and_back(x, *, is_signed, random=ALL_RANDOM, extent=WHOLE):
    codes, scales = encode(jnp.asarray(x), jnp.asarray(random), extent, is_signed=is_signed)
    return np.asarray(codes), np.asarray(decode(codes, scales), np.float64)


@pytest.mark.parametrize(("is_signed", "codes"), [(True, np.arange(-127, 128, dtype=np.int8)), (False, np.arange(256))])
def test_each_level_is_a_level_and_larger_codes_are_larger_numbers(is_signed, codes):
    codes = codes.astype(np.int8 if is_signed else np.uint8)[None]
    levels = np.asarray(decode(jnp.asarray(codes), jnp.full((1, 1), 3.0)))
    assert np.all(np.diff(levels[0]) > 0)
    assert levels[0, -1] == (3.0 if is_signed else 9.0)
    smallest = 3e-6 if is_signed else 9e-14  # the square of 3e-7
    assert np.min(levels[levels > 0]) == pytest.approx(smallest)
    # Half way up: to the nearest level, which is itself.
    again, _ = encode(levels, np.full(levels.shape, 2**15, np.uint16), levels.shape, is_signed=is_signed)
    np.testing.assert_array_equal(again, codes)


@pytest.mark.parametrize("value", [0.7, -0.7, 0.0312, 2.7e-3, -4.4e-5, 3e-7])
def test_the_mean_over_all_random_numbers_is_the_number(value):
    x = np.full(WHOLE, value, np.float32)
    x[0, 0] = 5.0  # the scale
    codes, back = there_and_back(x, is_signed=True)
    assert back[0, 0] == 5.0
    chosen = np.unique(back[1:])
    assert len(chosen) == 2, "the two levels beside it"
    assert chosen[0] < value < chosen[1]
    np.testing.assert_allclose(np.mean(back[1:]), value, atol=1e-2 * (chosen[1] - chosen[0]))
    assert codes.dtype == np.int8


def test_no_second_moment_above_zero_becomes_zero():
    x = np.full(WHOLE, 1e-17, np.float32)  # its root is far below the lowest level, 1e-7
    x[0, 0], x[5] = 1.0, 0.0
    codes, back = there_and_back(x, is_signed=False)
    assert codes.dtype == np.uint8
    np.testing.assert_array_equal(back > 0, x > 0)
    _, zeros = there_and_back(np.zeros(WHOLE, np.float32), is_signed=False)
    assert not np.any(zeros)


def test_blocks_have_scales_of_their_own():
    x = np.where(np.arange(SIDE) < 128, 1e-8, 1e3).astype(np.float32) * np.ones(WHOLE, np.float32)
    _, back = there_and_back(x, is_signed=False, extent=(16, 16))
    np.testing.assert_allclose(back, x, rtol=1e-6)


@pytest.mark.parametrize(
    ("shape", "axes", "block", "extent"),
    [
        ((32, 4096, 14336), ("layers", "embed", "mlp"), 256, (1, 16, 16)),
        ((2, 16, 4096, 14336), ("chunks", "layers", "embed", "mlp"), 256, (1, 1, 16, 16)),
        ((128256, 4096), ("vocab", "embed"), 256, (4, 64)),
        ((32, 4096, 32, 128), ("layers", "embed", "heads", "head_dim"), 256, (1, 2, 1, 128)),
        ((8, 64, 256), ("layers", "embed", "mlp"), 64, (1, 4, 16)),
        ((8, 6, 22), ("layers", "embed", "mlp"), 256, None),
        ((32, 4096), ("layers", "norm"), 256, None),
        ((32, 32, 128), ("layers", "heads", "head_dim"), 256, None),
    ],
)
def test_blocks_leave_each_dim_many_parts_and_never_join_layers(shape, axes, block, extent):
    assert extents(shape, axes, block) == extent
    if extent is not None:
        counts = num_blocks(shape, extent)
        assert np.prod(counts) * np.prod(extent) == np.prod(shape)


def test_the_same_numbers_in_chunks_have_the_same_codes():
    """Interleaved pipelines reshape [L, ...] to [V, L / V, ...]: random bits and blocks must not notice."""
    x = np.random.default_rng(0).normal(size=(4, 64, 64)).astype(np.float32)
    key = jax.random.key(3)
    found = []
    for shape, axes in (
        ((4, 64, 64), ("layers", "embed", "mlp")),
        ((2, 2, 64, 64), ("chunks", "layers", "embed", "mlp")),
    ):
        random = jax.random.bits(key, shape, jnp.uint16)
        codes, scales = encode(x.reshape(shape), random, extents(shape, axes, 256), is_signed=True)
        found.append((np.ravel(codes), np.ravel(scales)))
    np.testing.assert_array_equal(found[0][0], found[1][0])
    np.testing.assert_array_equal(found[0][1], found[1][1])
