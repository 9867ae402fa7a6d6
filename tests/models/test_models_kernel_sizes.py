"""Kernels at the sizes that accelerators run: several of their own tiles, heads of 64 and 128.

They are interpreted. Those of TPUs run on two simulated cores with a memory of their own, where what nobody wrote is
not a number, a read outside of an array is an error, and a race between cores is found.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from meshtrain.models.attention import splash, triton
from meshtrain.models.attention.attention import Attention
from meshtrain.models.moe import grouped_matmul_gpu, grouped_matmul_tpu
from meshtrain.models.moe.grouped_matmul import How, compute_blocks
from meshtrain.models.remat import HEADS
from tests.models.test_models_attention import both_ways as heads_both_ways
from tests.models.test_models_attention import documents_of, written_out
from tests.models.test_models_grouped_matmul import both_ways

# Newer versions of JAX raise by default.
WARNS = {"on_race": "warn"} if "on_race" in {one.name for one in dataclasses.fields(pltpu.InterpretParams)} else {}
ON_TWO_CORES = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2, **WARNS)
# Splash's forward kernel has outputs that nobody reads, and that all cores write.
ON_ONE_CORE = dataclasses.replace(ON_TWO_CORES, num_cores_or_threads=1)


@pytest.fixture
def has_race(capfd, caplog):
    """A function () -> whether kernels raced since it was called last: one version of JAX prints, another one logs."""

    def found():
        said = capfd.readouterr().out + caplog.text
        caplog.clear()
        return "RACE DETECTED" in said

    return found


def test_a_race_between_cores_is_found(has_race):
    def kernel(x, result):
        result[...] = x[...]

    for place, is_race in ((lambda i: (i, 0), False), (lambda i: (0, 0), True)):
        call = pl.pallas_call(
            kernel,
            grid=(2,),
            in_specs=[pl.BlockSpec((8, 128), lambda i: (i, 0))],
            out_specs=pl.BlockSpec((8, 128), place),
            out_shape=jax.ShapeDtypeStruct((16, 128), jnp.float32),
            compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
            interpret=ON_TWO_CORES,
        )
        jax.block_until_ready(call(jnp.ones((16, 128))))
        assert has_race() == is_race


def assert_near(got, expected, bound):
    got, expected = np.asarray(got, np.float32), np.asarray(expected, np.float32)
    assert np.linalg.norm(got - expected) <= bound * np.linalg.norm(expected)


@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [
        ("gpu", jnp.float32),
        pytest.param("gpu", jnp.bfloat16, marks=pytest.mark.slow),
        ("tpu", jnp.float32),
        pytest.param("tpu", jnp.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_products_of_experts_over_several_tiles_are_those_of_the_loop(kernel, dtype, monkeypatch, has_race):
    """Two tiles of each dim; the last one that the TPU's products are summed over is half as wide as the first."""
    shape, block_rows, itemsize = (384 if kernel == "tpu" else 256, 256), 128, jnp.dtype(dtype).itemsize
    assert block_rows == grouped_matmul_gpu.LARGEST_TILE
    monkeypatch.setattr(grouped_matmul_tpu, "COLUMNS", 128)
    monkeypatch.setattr(grouped_matmul_tpu, "WEIGHT_BYTES", 256 * 128 * itemsize)
    monkeypatch.setattr(grouped_matmul_tpu, "SUMS_BYTES", 128 * itemsize)
    keys, owners = jax.random.split(jax.random.key(0), 2), jnp.int32([0, 2, 2, 4])  # no block has the expert 1 or 3
    rows = jax.random.normal(keys[0], (owners.size * block_rows, shape[0])).astype(dtype)
    weights = (shape[0] ** -0.5 * jax.random.normal(keys[1], (4, *shape))).astype(dtype)
    rows = rows.at[-block_rows:].set(jnp.nan)  # these are of no expert, and nothing reads them
    hows = How(kernel, ON_TWO_CORES if kernel == "tpu" else True), How("loop")
    found = [both_ways(functools.partial(compute_blocks, how), rows, weights, owners) for how in hows]
    for got, expected in zip(*found, strict=True):
        assert got.dtype == dtype
        assert_near(got, expected, 1e-6 if dtype == jnp.float32 else jnp.finfo(dtype).eps / 2)
    assert not has_race()


def heads(length, head_dim, dtype=jnp.float32):
    """(q, k, v, cotangent) of one sequence, two query heads and one of keys."""
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(1, length, num_heads, head_dim) for num_heads in (2, 1, 1, 2)]
    return [jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes, strict=True)]


def one_by_one(kernel):
    """In place of `jax.vmap`: the simulated cores take no grid to which it adds a dim."""
    return lambda *given: jnp.stack([kernel(*jax.tree.map(lambda x, i=i: x[i], given)) for i in range(len(given[0]))])


KERNELS = {"splash": (splash.attend, 2 * splash.LARGEST_BLOCK), "triton": (triton.attend, 2 * triton.GRANULE)}


@pytest.mark.parametrize("kernel", ["triton", pytest.param("splash", marks=pytest.mark.slow)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_attention_over_several_blocks_is_attention_written_out(kernel, head_dim, monkeypatch, has_race):
    attend, length = KERNELS[kernel]
    given, documents = heads(length, head_dim), (documents_of(length)[:1],) * 2
    attention, interpret = Attention(2, 1, head_dim), ON_ONE_CORE if kernel == "splash" else True
    way = functools.partial(attend, attention=attention, name=HEADS, interpret=interpret)
    expected = heads_both_ways(written_out(scalar=head_dim), given, documents)
    monkeypatch.setattr(jax, "vmap", one_by_one)
    for one, other in zip(heads_both_ways(way, given, documents), expected, strict=True):
        assert_near(one, other, 2e-6)
    assert not has_race()
