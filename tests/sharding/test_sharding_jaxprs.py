"""Which weights one loop alone slices, that hooks see each layer's, what depends on what, and regions called once."""

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Literal
from jax.sharding import AxisType, Mesh, PartitionSpec

from meshtrain.sharding import jaxprs
from meshtrain.sharding.placement import on_shards

pytestmark = pytest.mark.quick

W, V = jnp.arange(24.0).reshape(4, 2, 3), jnp.arange(4.0)
X = jnp.ones(3)


def scanned(w, x=X, **options):
    return jax.lax.scan(lambda x, w: (x + w.sum(0), x.sum()), x, w, **options)


CASES = {
    "a scan": (lambda arrays, x: scanned(arrays[0], x), {0}),
    "in another dtype": (lambda arrays, x: scanned(arrays[0].astype(jnp.bfloat16).astype(jnp.float32), x), {0}),
    "groups of layers": (lambda arrays, x: jax.lax.scan(
        lambda x, w: (x + w.sum((0, 1)), None), x, arrays[0].reshape(2, 2, 2, 3)), {0}),
    "a jitted function": (lambda arrays, x: jax.jit(lambda w, v, x: (scanned(w, x), v.sum()))(*arrays, x), {0}),
    "two arrays of one scan": (lambda arrays, x: jax.lax.scan(
        lambda x, both: (x + both[0].sum(0) * both[1], None), x, tuple(arrays)), {0, 1}),
    "two scans": (lambda arrays, x: (scanned(arrays[0], x), scanned(arrays[0], x)), set()),
    "a scan and a penalty": (lambda arrays, x: (scanned(arrays[0], x), jnp.sum(arrays[0] ** 2)), set()),
    "the result as well": (lambda arrays, x: (scanned(arrays[0], x), arrays[0]), set()),
    "carried": (lambda arrays, x: jax.lax.scan(lambda w, _: (2 * w, None), arrays[0], None, length=4), set()),
    "the same in each turn": (lambda arrays, x: jax.lax.scan(
        lambda x, _: (x + arrays[0].sum((0, 1)), None), x, None, length=4), set()),
    "layers mixed": (lambda arrays, x: jax.lax.scan(
        lambda x, w: (x + w, None), x, arrays[0].reshape(2, 4, 3).sum(1)), set()),
    "numbers without a gradient": (lambda arrays, x: scanned(arrays[0].astype(jnp.int32), x), set()),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_weight_is_hooked_where_one_loop_alone_reads_it_in_slices(name):
    function, expected = CASES[name]
    assert jaxprs.trace(function, [W, V], X).sliced == expected


@pytest.mark.parametrize("name", [name for name, (_, expected) in CASES.items() if expected])
def test_a_hook_gets_each_slice_with_what_goes_with_it(name):
    function, indices = CASES[name]
    traced, added = jaxprs.trace(function, [W, V], X), [10.0 * W + 1, 10.0 * V + 1]

    def hook(slices, given):
        return {index: slices[index] + given[index].astype(slices[index].dtype) for index in slices}

    found = traced.run([W, V], X, {index: added[index] for index in indices}, hook)
    wanted = function([array + more if at in indices else array for at, (array, more) in
                       enumerate(zip([W, V], added, strict=True))], X)  # fmt: skip
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.mark.parametrize("reverse", [False, True])
def test_loops_that_wait_compute_the_same(reverse):
    def function(w, x):
        last, sums = scanned(2 * w, x, reverse=reverse)
        return {"last": last, "sums": sums[::-1] * x.sum(), "w": w}

    found = jaxprs.run_after(function, jnp.float32(7), W, X)
    jax.tree.map(np.testing.assert_array_equal, found, function(W, X))
    jaxpr = jax.make_jaxpr(lambda first: jaxprs.run_after(function, first, W, X))(jnp.float32(7)).jaxpr
    names = [equation.primitive.name for equation in jaxpr.eqns]
    assert "scan" not in names
    # What the loop stacks starts as that number, and what it reads has passed a barrier.
    loop, known = jaxpr.eqns[names.index("while")], set(jaxpr.invars)
    for equation in jaxpr.eqns[: names.index("while")]:
        reads = {var for var in equation.invars if not isinstance(var, Literal)}
        known |= set(equation.outvars) if reads & known else set()
    starts = [var for var in loop.invars if not isinstance(var, Literal) and var in known]
    assert [var.aval.shape for var in starts] == [(4,)]
    assert "optimization_barrier" in names[: names.index("while")]


def test_a_loop_passes_on_in_its_next_turn_what_it_read_in_this_one():
    def shifted(a, b):
        turn = lambda carry, x: ((x, carry[0], carry[2]), carry[1])  # noqa: E731
        (_, _, same), stacked = jax.lax.scan(turn, (a, a, a), b)
        return same, stacked

    jaxpr = jax.make_jaxpr(shifted)(jnp.zeros(()), jnp.zeros(4)).jaxpr
    assert jaxprs.depends(jaxpr, [True, False]) == [True, True]
    assert jaxprs.depends(jaxpr, [False, True]) == [False, True]


GIVEN = jnp.arange(8.0).reshape(4, 2) / 8


@pytest.fixture(scope="module")
def mesh():
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    return Mesh(devices, ("pipeline", "tensor"), axis_types=(AxisType.Auto,) * 2)


def stage(mesh):
    """Returns a function with a layer on shards: called twice, in a loop, in a branch, and in their gradients."""
    split = PartitionSpec("tensor")

    @jax.jit
    def layer(x):
        return on_shards(mesh, lambda x: jnp.sin(x) @ jnp.eye(2), (split,), split)(jnp.cos(x))

    def total(x):
        rows = lambda x: jax.lax.scan(lambda x, _: (layer(x), None), layer(x), None, length=2)[0]  # noqa: E731
        return jnp.sum(jax.lax.cond(x[0, 0] > 0, rows, layer, rows(layer(x))))

    return jax.grad(total)


def on_stage(mesh, function):
    whole = PartitionSpec("pipeline")
    return jax.jit(on_shards(mesh, function, (whole,), whole, axes=frozenset({"pipeline"})))


def num_calls(text):
    """Numbers of calls of each function with a manual region, or with a call of such a function."""
    functions = dict(re.findall(r"func\.func (?:private|public) @(\w+)(.*?)\n  }", text, re.DOTALL))
    calls = collections.Counter(re.findall(r"call @(\w+)", text))
    regions = {name for name, body in functions.items() if "sdy.manual_computation" in body}
    while more := {name for name, body in functions.items() if set(re.findall(r"call @(\w+)", body)) & regions}:
        if more <= regions:
            break
        regions |= more
    return {name: calls[name] for name in regions if name != "main"}


def test_no_function_with_a_manual_region_is_called_twice(mesh):
    shared, own = (on_stage(mesh, function) for function in (stage(mesh), jaxprs.inline_calls(stage(mesh))))
    assert max(num_calls(shared.lower(GIVEN).as_text()).values()) > 1
    assert set(num_calls(own.lower(GIVEN).as_text()).values()) == {1}
    np.testing.assert_array_equal(own(GIVEN), shared(GIVEN))


def test_a_function_with_random_keys_is_called_once():
    """The implementation of keys is a named tuple in an equation's parameters."""
    data = jax.random.key_data(jax.random.key(3))
    drawn = lambda key_data: jax.random.normal(jax.random.wrap_key_data(key_data), (2,))  # noqa: E731
    np.testing.assert_array_equal(jax.jit(jaxprs.inline_calls(drawn))(data), jax.jit(drawn)(data))
