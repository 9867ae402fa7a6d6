"""Embedding look-ups from a split table: the same rows and the same gradient as from a whole one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import NamedSharding, PartitionSpec

from meshtrain.models.vocabulary import look_up
from meshtrain.sharding.mesh import make_mesh
from meshtrain.sharding.placement import Placement
from meshtrain.sharding.rules import AXES, LayoutOptions, default_rules

NUM_ROWS, WIDTH = 32, 8
SCATTERED = default_rules(LayoutOptions(sequence_parallel=True))


def example():
    keys = jax.random.split(jax.random.key(0), 3)
    table = jax.random.normal(keys[0], (NUM_ROWS, WIDTH))
    rows = jax.random.randint(keys[1], (4, 16), -3, NUM_ROWS + 3)
    return table, rows, jax.random.normal(keys[2], (4, 16, WIDTH))


def plain(table, rows):
    return jnp.take(table, rows, axis=0, mode="fill", fill_value=0) * (rows >= 0)[..., None]


def loss_of(find):
    return lambda table, rows, factors: jnp.sum(jnp.sin(find(table, rows)) * factors)


@pytest.mark.parametrize(
    ("sizes", "sequence_parallel"),
    [
        ({}, False),
        ({"tensor": 4}, False),
        ({"data": 2, "tensor": 2, "fsdp": 2}, False),
        ({"data": 4, "pipeline": 2}, False),
        ({"pipeline": 2, "tensor": 4}, True),
        ({"context": 4, "tensor": 2}, True),
    ],
)
def test_split_table_gives_the_same_rows_and_gradient(sizes, sequence_parallel):
    mesh = make_mesh(dict.fromkeys(AXES, 1) | sizes, jax.devices())
    placement = Placement(SCATTERED if sequence_parallel else default_rules(LayoutOptions()), mesh)
    table, rows, factors = example()
    found = jax.jit(jax.value_and_grad(loss_of(lambda table, rows: look_up(table, rows, placement))))
    where = [
        NamedSharding(mesh, PartitionSpec(("pipeline", "tensor"))),
        *2 * [NamedSharding(mesh, PartitionSpec("data"))],
    ]
    got = found(*(jax.device_put(x, place) for x, place in zip((table, rows, factors), where, strict=True)))
    expected = jax.value_and_grad(loss_of(plain))(table, rows, factors)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, expected)


def test_inside_a_manual_axis_each_shard_answers_for_its_own_part():
    """Three axes around a gather: on this mesh the partitioner's own gather ends the process (jax 0.12.0.1)."""
    mesh = make_mesh(dict.fromkeys(AXES, 1) | {"data": 2, "pipeline": 2, "tensor": 2}, jax.devices())
    placement = Placement(default_rules(LayoutOptions()), mesh)
    table, rows, factors = example()

    def on_stage(table, rows, factors):
        mine = rows - jax.lax.axis_index("pipeline") * table.shape[0]
        x, pull = jax.vjp(lambda table: look_up(table, mine, placement), table)
        return jax.lax.psum(x, "pipeline"), pull(factors)[0]

    split, whole = PartitionSpec("pipeline"), PartitionSpec()
    program = jax.shard_map(
        on_stage, mesh=mesh, in_specs=(split, whole, whole), out_specs=(whole, split), axis_names={"pipeline"},
        check_vma=False,
    )  # fmt: skip
    x, gradient = jax.jit(program)(table, rows, factors)
    expected, pull = jax.vjp(lambda table: plain(table, rows), table)
    np.testing.assert_array_equal(x, expected)
    np.testing.assert_allclose(gradient, pull(factors)[0], rtol=1e-5, atol=1e-6)


def test_gradient_of_a_bfloat16_table_is_summed_in_float32():
    """A token that stands 4,096 times: a sum in bfloat16 would stop growing at 256."""
    table = jnp.zeros((4, 1), jnp.bfloat16)
    rows = jnp.ones((1, 4096), jnp.int32)
    gradient = jax.grad(lambda table: jnp.sum(look_up(table, rows, Placement.single_device())).astype(jnp.float32))(
        table
    )
    assert gradient[:, 0].tolist() == [0, 4096, 0, 0]


def summed_in(rules, platform, monkeypatch):
    """Returns (primitive, dtype) of each sum over devices in a look-up of bfloat16 rows on such a platform."""
    monkeypatch.setattr(Placement, "platform", platform)
    mesh = make_mesh(dict.fromkeys(AXES, 1) | {"context": 2, "tensor": 4}, jax.devices())
    table, rows, _ = example()
    traced = jax.make_jaxpr(lambda table: look_up(table, rows, Placement(rules, mesh)))(table.astype(jnp.bfloat16))
    found = []

    def walk(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name in ("psum", "psum_invariant", "reduce_scatter"):
                found.append((equation.primitive.name, equation.invars[0].aval.dtype.name))
            for inner in jaxprs_in_params(equation.params):
                walk(inner)

    walk(traced.jaxpr)
    return found


@pytest.mark.parametrize("platform, dtype", [("cuda", "bfloat16"), ("cpu", "float32")])
def test_the_sum_crosses_devices_in_the_dtype_of_the_table(platform, dtype, monkeypatch):
    """Scattered where the residual stream is sharded along the sequence; on CPUs in float32, see `look_up`."""
    assert summed_in(default_rules(LayoutOptions()), platform, monkeypatch) == [("psum", dtype)]
    assert summed_in(SCATTERED, platform, monkeypatch) == [("reduce_scatter", dtype)]
