"""Compressed sums on replicas that are a vmap: nothing is lost, replicas agree, and a NaN is not hidden."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshtrain.config import extensions
from meshtrain.config.schema import Config
from meshtrain.lab import compression
from meshtrain.lab.compression import CompressionOptions

NUM_REPLICAS, NUM_STEPS = 8, 20
# Shape, and the dim that is scattered: odd sizes, small ones that travel together, and one above `SMALL_BYTES`.
LEAVES = [((3, 7, 11), 0), ((16, 24), -2), ((5,), 0), ((3, 40, 150), 0), ((3, 2, 8), -1)]
DIMS = [dim for _, dim in LEAVES]


def summing(options):
    """(leaves [replicas, ...], residuals likewise or None for each) -> (sums, residuals), jitted."""

    def of_one(leaves, residuals):
        return compression.compressed_sums(leaves, residuals, DIMS, options, "data")

    return jax.jit(jax.vmap(of_one, axis_name="data"))


def gradients(generator):
    """Float32 with heavy tails: many elements are far below the scale of their block."""
    return [
        (generator.standard_normal((NUM_REPLICAS, *shape)) ** 3).astype(np.float32) + np.float32(0.1)
        for shape, _ in LEAVES
    ]


def whole(reduced, dim):
    """The sum that each replica has, [replicas, ...], or that they have together along a dim, as one array."""
    return np.concatenate(list(reduced), axis=dim) if dim else reduced[0]


@pytest.mark.parametrize("kind", ["int8", "topk"])
def test_what_was_applied_and_the_residuals_are_the_accumulated_gradients(kind):
    run, generator = summing(CompressionOptions(name=kind)), np.random.default_rng(0)
    residuals = [np.zeros((NUM_REPLICAS, *shape), np.float32) for shape, _ in LEAVES]
    applied = [np.zeros(shape) for shape, _ in LEAVES]
    accumulated = [np.zeros(shape) for shape, _ in LEAVES]
    for _ in range(NUM_STEPS):
        leaves = gradients(generator)
        reduced, residuals = jax.device_get(run(leaves, residuals))
        for i, dim in enumerate(DIMS):
            if dim == 0:
                assert (reduced[i] == reduced[i][0]).all(), "bitwise the same on each replica"
            applied[i] += whole(reduced[i], dim)
            accumulated[i] += leaves[i].sum(axis=0, dtype=np.float64)
    for i in range(len(LEAVES)):
        lost = np.linalg.norm(applied[i] + residuals[i].sum(axis=0) - accumulated[i])
        assert lost <= 1e-5 * np.linalg.norm(accumulated[i])
        assert np.linalg.norm(residuals[i]) > 1e-4 * np.linalg.norm(accumulated[i]), "some of it waits"


def test_a_small_gradient_beside_a_large_one_arrives_with_feedback_only():
    gradient = [jnp.full((NUM_REPLICAS, *shape), 1e-3).at[..., 0].set(1.0) for shape, _ in LEAVES]
    arrived = {}
    for feedback in (True, False):
        run = summing(CompressionOptions(name="int8", feedback=feedback))
        residuals, total = [jnp.zeros_like(leaf) if feedback else None for leaf in gradient], 0.0
        for _ in range(NUM_STEPS):
            reduced, residuals = run(gradient, residuals)
            total += float(reduced[0][0, 0, 0, 1])
        arrived[feedback] = total / (NUM_STEPS * NUM_REPLICAS * 1e-3)
    assert arrived[True] == pytest.approx(1, abs=0.2)
    assert arrived[False] == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_block_with_a_value_that_is_not_finite_comes_out_so(bad):
    """In a whole sum: compilers keep a NaN in the maximum of `pack` alone, and lose it where that is fused."""
    gradients = [np.ones((NUM_REPLICAS, *shape), np.float32) for shape, _ in LEAVES]
    gradients[3][2, 1, 7, 5] = bad
    reduced, _ = summing(CompressionOptions(name="int8", feedback=False))(gradients, [None] * len(LEAVES))
    assert [int((~np.isfinite(leaf[0])).sum()) for leaf in reduced] == [0, 0, 0, 256, 0]
    np.testing.assert_allclose(reduced[4][0], NUM_REPLICAS)


def test_zeros_stay_zeros():
    blocks = jnp.zeros((3, 16))
    assert compression.pack(blocks).dtype == jnp.int8
    np.testing.assert_array_equal(compression.unpack(compression.pack(blocks)), blocks)


def made(*options, **named):
    return extensions.of(Config(reduction=CompressionOptions(*options, **named)))


def test_bytes_of_an_element():
    int8, topk = made("int8").sent_bytes, made("topk").sent_bytes
    assert int8(1, 8, False) == pytest.approx(1.7773, abs=1e-4)
    assert int8(1, 8, True) == int8(1, 8, False) / 2
    assert topk(1, 8, False) == topk(1, 8, True) == 0.875
    assert topk(1, 64, False) > 2 * 63 / 64 * 4 * 0.99, "no fewer than the float32 all-reduce"


def test_only_feedback_has_a_residual():
    shapes = {"w": jax.ShapeDtypeStruct((3,), jnp.float32)}
    for name in ("int8", "topk"):
        assert made(name).init(shapes) == shapes
        assert made(name, feedback=False).init(shapes) == ()


@pytest.mark.parametrize(
    ("kept", "num_replicas", "is_scattered", "larger"),
    [(8, 8, False, False), (16, 8, False, False), (17, 8, False, True), (8, 17, False, True), (9, 8, True, True)],
)
def test_top_k_at_a_share_of_half_the_replicas_inverse_is_larger_than_int8(kept, num_replicas, is_scattered, larger):
    found = made("topk", kept=kept).advice(num_replicas, is_scattered)
    assert [change for _, change in found] == ["reduction.name=int8, which also loses less precision"] * larger
    assert not made("int8").advice(num_replicas, is_scattered)
