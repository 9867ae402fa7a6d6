"""Which weights one loop alone slices, and that hooks see the slices of each layer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Literal

from meshtrain.layout import loops

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
    assert loops.traced(function, [W, V], X).sliced == expected


@pytest.mark.parametrize("name", [name for name, (_, expected) in CASES.items() if expected])
def test_a_hook_gets_each_slice_with_what_goes_with_it(name):
    function, indices = CASES[name]
    traced, added = loops.traced(function, [W, V], X), [10.0 * W + 1, 10.0 * V + 1]

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

    found = loops.run_after(function, jnp.float32(7), W, X)
    jax.tree.map(np.testing.assert_array_equal, found, function(W, X))
    jaxpr = jax.make_jaxpr(lambda first: loops.run_after(function, first, W, X))(jnp.float32(7)).jaxpr
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
