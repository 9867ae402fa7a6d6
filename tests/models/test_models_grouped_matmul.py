"""Blocks of rows with one expert each: where choices stand, and products against each row's own, written out."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshtrain.models.moe import grouped_matmul
from meshtrain.models.moe.grouped_matmul import (
    How,
    Stack,
    arrange_blocks,
    compute_blocks,
    kernel_for,
    no_kernel,
    product,
)

E, D, F, M = 4, 6, 5, 4


@pytest.mark.parametrize(
    "chosen",
    [[2, 0, 2, 3, 2, 0, 2, 2, 4, 2, 4], [1] * 11, [4] * 11, [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2]],
    ids=["some", "one expert", "none here", "all"],
)
def test_each_choice_stands_once_in_a_block_of_its_expert_and_in_its_order(chosen):
    blocks = jax.jit(arrange_blocks, static_argnums=(1, 2))(jnp.int32(chosen), E, M)
    assert (blocks.owners.shape, blocks.rows.shape) == ((3 + E,), ((3 + E) * M,))
    of_rows = blocks.rows.tolist()
    assert [row for row in of_rows if row < 11] == sorted(
        (i for i, expert in enumerate(chosen) if expert < E), key=lambda i: (chosen[i], i)
    )
    assert max(of_rows) <= 11
    used = []
    for owner, rows in zip(blocks.owners.tolist(), np.reshape(of_rows, (-1, M)).tolist(), strict=True):
        real = [row for row in rows if row < 11]
        assert {chosen[row] for row in real} == ({owner} if owner < E else set()), "one expert a block"
        assert rows[: len(real)] == real, "padding comes last"
        used += [owner] * bool(real)
    sizes = np.bincount(chosen, minlength=E + 1)[:E]
    assert np.bincount(used, minlength=E).tolist() == (-(-sizes // M)).tolist()
    assert blocks.owners.tolist() == used + [E] * (3 + E - len(used)), "blocks without rows come last"


def written_out(rows, weights, owners):
    """Products row by row, with a weight of zeros where a block has no owner."""
    padded = jnp.concatenate([weights, jnp.zeros_like(weights[:1])])
    return jnp.einsum("rd,rdf->rf", rows, padded[jnp.repeat(owners, rows.shape[0] // owners.size)])


def both_ways(way, rows, weights, owners):
    """The products and the gradients of rows and weights."""
    loss = lambda rows, weights: jnp.sum(jnp.sin(way(rows, weights, owners).astype(jnp.float32)))  # noqa: E731
    return jax.jit(lambda *given: (way(*given, owners), *jax.grad(loss, argnums=(0, 1))(*given)))(rows, weights)


def test_products_and_gradients_are_those_of_each_rows_own_weight():
    keys = jax.random.split(jax.random.key(0), 2)
    owners = jnp.int32([0, 2, 2, 3, 4, 4])
    rows, weights = jax.random.normal(keys[0], (6 * M, D)), jax.random.normal(keys[1], (E, D, F))
    for got, expected in zip(*(both_ways(way, rows, weights, owners) for way in (product, written_out)), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)
    halves = [x.astype(jnp.bfloat16) for x in (rows, weights)]
    for got, exact in zip(
        both_ways(product, *halves, owners),
        both_ways(written_out, *(x.astype(jnp.float32) for x in halves), owners),
        strict=True,
    ):
        assert got.dtype == jnp.bfloat16
        error = np.linalg.norm(got.astype(jnp.float32) - exact) / np.linalg.norm(exact)
        assert error <= jnp.finfo(jnp.bfloat16).eps


@pytest.mark.parametrize(
    ("kernel", "shape", "dtype"),
    [("gpu", (96, 48), jnp.float32), ("gpu", (96, 48), jnp.bfloat16), ("tpu", (256, 128), jnp.float32)],
)
def test_the_kernels_compute_products_and_gradients_of_the_loop(kernel, shape, dtype):
    keys, block_rows = jax.random.split(jax.random.key(0), 2), 16
    owners = jnp.int32([0, 2, 2, 4, 4])  # no block has the expert 1 or 3
    rows = jax.random.normal(keys[0], (5 * block_rows, shape[0])).astype(dtype)
    weights = jax.random.normal(keys[1], (E, *shape)).astype(dtype)
    rows = rows.at[-block_rows:].set(jnp.nan)  # these are of no expert, and nothing reads them
    ways = [functools.partial(compute_blocks, How(name, interpret=True)) for name in (kernel, "loop")]
    for got, expected in zip(*(both_ways(way, rows, weights, owners) for way in ways), strict=True):
        assert got.dtype == dtype
        got, expected = np.asarray(got, np.float32), np.asarray(expected, np.float32)
        bound = 5e-6 if dtype == jnp.float32 else jnp.finfo(dtype).eps / 2
        assert np.linalg.norm(got - expected) <= bound * np.linalg.norm(expected)


def stacked(weights):
    """The weights as the second of three layers; the others are not numbers."""
    return Stack(jnp.full((3, *weights.shape), jnp.nan, weights.dtype).at[1].set(weights), jnp.int32(1))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_kernel_that_reads_weights_in_a_stack_gives_the_same_bits(dtype):
    keys, owners = jax.random.split(jax.random.key(0), 2), jnp.int32([0, 2, 2, 3, 4, 4])
    rows = jax.random.normal(keys[0], (6 * 16, 96)).astype(dtype)
    weights = jax.random.normal(keys[1], (E, 96, 48)).astype(dtype)
    how = How("gpu", interpret=True)
    of_stack = lambda rows, weights, owners: compute_blocks(how, rows, weights, owners, stacked(weights))  # noqa: E731
    of_slice = functools.partial(compute_blocks, how)
    for got, expected in zip(*(both_ways(way, rows, weights, owners) for way in (of_stack, of_slice)), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_weights_in_a_stack_that_the_kernel_does_not_take_are_read_from_the_slice(monkeypatch):
    taken = lambda platform, rows, weights, *_: "gpu" if weights[0] == E else "loop"  # noqa: E731
    monkeypatch.setattr(grouped_matmul, "kernel_for", taken)
    keys, owners = jax.random.split(jax.random.key(0), 2), jnp.int32([0, 2, 4])
    rows, weights = jax.random.normal(keys[0], (3 * 16, 96)), jax.random.normal(keys[1], (E, 96, 48))
    got = product(rows, weights, owners, stacked(weights))
    np.testing.assert_array_equal(got, compute_blocks(How("gpu", interpret=True), rows, weights, owners))


@pytest.mark.parametrize(
    ("capability", "weights", "dtype", "kernel"),
    [
        ((9, 0), (16, 2048, 768), "bfloat16", "mosaic"),
        ((9, 0), (17, 2048, 768), "bfloat16", "loop"),
        ((9, 0), (16, 2048, 96), "bfloat16", "loop"),
        ((9, 0), (16, 2048, 768), "float32", "loop"),
        ((8, 0), (16, 2048, 768), "bfloat16", "loop"),
        ((10, 0), (16, 2048, 768), "bfloat16", "loop"),
        (None, (16, 2048, 768), "bfloat16", "loop"),
    ],
)
def test_without_triton_hopper_has_kernels_by_mosaic(monkeypatch, capability, weights, dtype, kernel):
    given = "gpu", (1024, weights[1]), weights, 128, dtype, capability
    assert kernel_for(*given) == "gpu"
    monkeypatch.setattr(grouped_matmul.grouped_matmul_gpu, "is_available", lambda: False)
    assert kernel_for(*given) == kernel
    assert (no_kernel(*given) is None) == (kernel == "mosaic")


@pytest.mark.parametrize(
    ("platform", "weights", "block_rows", "dtype", "kernel"),
    [
        ("cuda", (8, 4096, 1792), 128, "bfloat16", "gpu"),
        ("cuda", (8, 96, 48), 16, "float32", "gpu"),
        ("cuda", (8, 4096, 24), 128, "bfloat16", "loop"),
        ("cuda", (8, 64, 64), 8, "bfloat16", "loop"),
        ("cuda", (256, 7168, 2048), 128, "bfloat16", "loop"),
        ("tpu", (8, 4096, 1792), 128, "bfloat16", "tpu"),
        ("tpu", (8, 4096, 96), 128, "bfloat16", "loop"),
        ("tpu", (8, 4096, 1792), 128, "float16", "loop"),
        ("cpu", (8, 4096, 1792), 128, "bfloat16", "loop"),
    ],
)
def test_a_kernel_is_taken_where_the_platform_has_one_for_the_shapes(platform, weights, block_rows, dtype, kernel):
    assert kernel_for(platform, (1024, weights[1]), weights, block_rows, dtype) == kernel
