"""Products of 8-bit floats: which dtypes, how near, one scale for all shards, and in each product of a layer."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from meshtrain.assembly.assemble import assemble
from meshtrain.config.resolve import resolve
from meshtrain.models.fp8 import BACKWARD, FORWARD, product, quantize
from meshtrain.sharding.placement import Placement
from meshtrain.sharding.rules import AXES, LayoutOptions, default_rules

NOWHERE = dataclasses.replace(Placement.single_device(), in_fp8=True)
SMALL = {
    "batch_size": 8,
    "sequence_length": 8,
    "model": {"num_layers": 2, "embed_dim": 16, "mlp_dim": 32, "num_heads": 2, "num_kv_heads": 2, "vocab_size": 60},
    "data": {"source": "synthetic"},
    "precision": {"policy": "fp8"},
    "pipeline": {"num_microbatches": 2},
}
MATRICES_A_LAYER = 7


def numbers(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def value_and_gradients(x, w, placement=NOWHERE):
    def total(x, w):
        y = product(x, w, placement)
        return jnp.sum(jnp.sin(y)), y

    (_, y), gradients = jax.value_and_grad(total, (0, 1), has_aux=True)(x, w)
    return y, *gradients


@pytest.mark.parametrize("shapes", [((2, 8, 32), (32, 4, 8)), ((2, 8, 4, 8), (4, 8, 32))], ids=["one dim", "two dims"])
def test_products_are_near_those_of_the_given_dtype(shapes):
    x, w = numbers(*shapes[0]), numbers(*shapes[1], seed=1)
    y, *gradients = value_and_gradients(x, w)
    for got, wanted in zip((y, *gradients), value_and_gradients(x, w, Placement.single_device()), strict=True):
        assert got.shape == wanted.shape
        assert got.dtype == wanted.dtype
        error = float(jnp.linalg.norm(got - wanted) / jnp.linalg.norm(wanted))
        # With 3 bits of mantissa a number changes by 1/16 of itself at most. Cotangents are those of a rounded y.
        assert 1e-3 < error < (0.05 if got is y else 0.3)


def test_a_scale_is_a_power_of_two_and_changes_no_mantissa():
    x = numbers(64)
    for dtype in (FORWARD, BACKWARD):
        low, scale = quantize(x, dtype, NOWHERE)
        assert float(jnp.log2(scale)) % 1 == 0
        largest = float(jnp.max(jnp.abs(x))) / float(scale)
        assert float(jnp.finfo(dtype).max) / 2 <= largest <= float(jnp.finfo(dtype).max)
        beside, other = quantize(jnp.append(x, 100.0), dtype, NOWHERE)
        assert other > scale
        back, again = low.astype(jnp.float32) * scale, beside[:-1].astype(jnp.float32) * other
        large = np.abs(x) > 0.01
        np.testing.assert_array_equal(back[large], again[large])


@pytest.mark.parametrize("value", [0.0, 1e-38, 3e38, np.inf, np.nan])
def test_numbers_at_the_ends_stay_what_they_are(value):
    low, scale = quantize(jnp.asarray([0.0, value], jnp.float32), FORWARD, NOWHERE)
    back = np.asarray(low.astype(jnp.float32) * scale)
    assert back[0] == 0 or not np.isfinite(value)
    assert np.isfinite(back[1]) == np.isfinite(value)


@pytest.mark.parametrize("manual", [(), ("data",)], ids=["partitioner", "data is manual"])
def test_a_scale_is_that_of_all_shards(manual):
    """The largest numbers are in one replica's part: with a scale of its own, the other's sum would not fit it."""
    mesh = jax.make_mesh((2, 1, 2, 1), ("data", "fsdp", "tensor", "pipeline"), axis_types=(AxisType.Auto,) * 4)
    placement = Placement(default_rules(LayoutOptions()), mesh, in_fp8=True)
    x, w = numbers(4, 8, 32).at[0].multiply(300.0), numbers(32, 16, seed=1)

    def scales(x, w):
        return jnp.stack([quantize(x, FORWARD, placement)[1], quantize(w, FORWARD, placement)[1]])

    rows, columns = PartitionSpec("data"), PartitionSpec(None, "tensor")
    function = scales
    if manual:
        function = jax.shard_map(
            lambda x, w: scales(x, w)[None], mesh=mesh, in_specs=(rows, PartitionSpec()), out_specs=rows,
            axis_names=frozenset(manual), check_vma=False,
        )  # fmt: skip
    placed = jax.device_put(x, NamedSharding(mesh, rows)), jax.device_put(w, NamedSharding(mesh, columns))
    found = np.asarray(jax.jit(function)(*placed)).reshape(-1, 2)
    wanted = np.asarray([quantize(x, FORWARD, NOWHERE)[1], quantize(w, FORWARD, NOWHERE)[1]])
    for of_replica in found:
        np.testing.assert_array_equal(of_replica, wanted)


def products(jaxpr, times=1):
    """Counts the dtypes of both operands of each product in a traced function, times the trips of its loops."""
    found = collections.Counter()
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            found[tuple(variable.aval.dtype.name for variable in equation.invars)] += times
        inner = times * equation.params["length"] if equation.primitive.name == "scan" else times
        for parameter in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns")):
            parameter = getattr(parameter, "jaxpr", parameter)
            if hasattr(parameter, "eqns"):
                found += products(parameter, inner)
    return found


@pytest.mark.parametrize(
    ("axes", "rank"), [({}, 0), ({"data": 2, "tensor": 2}, 0), ({"pipeline": 2}, 0), ({}, 2)], ids=str
)
def test_each_product_of_a_layer_has_two_8_bit_operands(axes, rank):
    sizes = dict.fromkeys(AXES, 1) | axes
    config = resolve(SMALL | {"lora": {"rank": rank}})
    assembly = assemble(config, sizes, jax.devices()[: int(np.prod(list(sizes.values())))])
    found = products(assembly.steps.train.trace(assembly.state, assembly.batch).jaxpr.jaxpr)
    e4m3, e5m2 = "float8_e4m3fn", "float8_e5m2"
    in_layers = 2 * MATRICES_A_LAYER
    of_weights = 0 if rank else in_layers  # frozen ones have no gradient
    counted = [found[pair] for pair in ((e4m3, e4m3), (e5m2, e4m3), (e4m3, e5m2))]
    if axes:  # not all of their loops have a length in the trace
        assert counted[0] >= counted[1] == counted[2] >= MATRICES_A_LAYER
        assert counted[1] % MATRICES_A_LAYER == 0
    else:
        assert counted == [in_layers, in_layers, of_weights]
    # Attention, head and adapters have none. No product has one alone.
    assert all(pair in ((e4m3, e4m3), (e5m2, e4m3), (e4m3, e5m2)) or "float8" not in "".join(pair) for pair in found)
    assert found["bfloat16", "bfloat16"] > 0
