"""Marked values: what the backward pass of a layer reads, and what it computes again."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from meshtrain.models.split import keep_activations, keep_named
from meshtrain.sharding.passes import Passes
from meshtrain.sharding.placement import on_shards
from meshtrain.sharding.saved import mark, mark_residuals

X = jnp.asarray(np.random.default_rng(0).normal(size=(4, 8)), jnp.float32)
W = jnp.asarray(np.random.default_rng(1).normal(size=(3, 8, 8)), jnp.float32)


@jax.custom_vjp
def kernel(x, scale):
    return jnp.log1p(x * x) * scale


def kernel_forward(x, scale):
    heads, sums = jnp.log1p(x * x) * scale, jnp.sin(x)
    return heads, (x, sums, heads, scale)


kernel.defvjp(kernel_forward, lambda saved, g: (g * saved[1] + 0 * saved[2] + saved[0], None))


def layer(w, x, given):
    """Marks its input, a product and a function with a custom backward pass; the metric has no cotangent."""
    x = mark(x, "input")
    y = mark(x @ w, "product")
    y = mark_residuals([lambda y: kernel(y, given)], None, "kernel", y)
    return jnp.tanh(y), (jnp.sum(x**2), {"metric": jnp.sum(jnp.exp(y))})


def alternating(w, x, given):
    functions = [functools.partial(kernel, scale=given), functools.partial(kernel, scale=2 * given)]
    return mark_residuals(functions, x[0, 0] > 0, "kernel", mark(x @ w, "product")), None


def in_a_region(w, x, given):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def of_device(x, w):
        return mark_residuals([lambda y: kernel(y, 1.0)], None, "kernel", mark(x @ w, "product"))

    specs = PartitionSpec("data"), PartitionSpec()
    return on_shards(mesh, of_device, specs, specs[0], is_opaque=True)(x, w), None


def loss(run):
    """(w, x) -> the sum of a scan over layers, with the losses that they add."""

    def of(w, x):
        y, sums = jax.lax.scan(lambda x, w: run(w, x, jnp.float32(1.5)), x, w)
        return jnp.sum(jnp.sin(y)) + (0.0 if sums is None else jnp.sum(sums[0]))

    return of


NAMES = [(), ("input", "product"), ("kernel",), ("product", "kernel")]


@pytest.mark.parametrize("names", [*NAMES, None], ids=str)
@pytest.mark.parametrize("function", [layer, alternating, in_a_region])
def test_gradients_do_not_depend_on_what_is_saved(function, names):
    kept = keep_activations(function) if names is None else keep_named(function, names)
    expected = jax.jit(jax.grad(loss(function), argnums=(0, 1)))(W, X)
    found = jax.jit(jax.grad(loss(kept), argnums=(0, 1)))(W, X)
    for got, wanted in zip(found, expected, strict=True):
        assert np.linalg.norm(got - wanted) <= 1e-6 * np.linalg.norm(wanted)


def traced(function, names):
    kept = keep_activations(function) if names is None else keep_named(function, names)
    return str(jax.make_jaxpr(jax.grad(loss(kept), argnums=(0, 1)))(W, X))


@pytest.mark.parametrize(
    ("function", "names", "products", "kernels"),
    [
        (layer, None, 3, 1),
        (layer, ("product",), 3, 2),
        (layer, ("kernel",), 4, 1),
        (layer, ("product", "kernel"), 3, 1),
        (alternating, ("product",), 3, 4),
        (alternating, ("product", "kernel"), 3, 2),
        (in_a_region, ("product",), 3, 2),
        (in_a_region, ("product", "kernel"), 3, 1),
    ],
)
def test_a_saved_value_is_not_computed_again(function, names, products, kernels):
    """A layer has one product, whose backward pass has two."""
    text = traced(function, names)
    assert (text.count(" dot_general["), text.count(" log1p ")) == (products, kernels)


@pytest.mark.parametrize("names", [None, ("product",), ("product", "kernel")])
def test_a_metric_has_no_cotangent(names):
    assert traced(layer, names).count(" exp ") == 1


def test_a_weight_without_a_gradient_saves_nothing_for_it():
    """Neither the input nor the product is needed for the cotangent of x."""
    names = ("input", "product")
    linear = keep_named(lambda w, x, given: (mark(mark(x, "input") @ w, "product"), None), names)
    text = str(jax.make_jaxpr(jax.grad(lambda x: loss(linear)(W, x)))(X))
    assert "f32[3,4,8]" not in text


def test_the_leaves_of_a_pullback_that_are_arguments_are_recognized():
    """By identity in a trace, on which `keep_named` relies; `Passes` compares variables of the jaxpr."""

    def of(x, w):
        _, pull = jax.vjp(lambda x, w: jnp.sin(x) @ w, x, w)
        found = [id(leaf) for leaf in jax.tree.leaves(pull)]
        assert id(w) in found
        assert id(x) not in found
        return x

    jax.make_jaxpr(of)(X, W[0])
    both = [True, True]
    passes = Passes(lambda x, w: (jnp.sin(x) @ w, None), (X, W[0]), both, both, both)
    assert [array.shape for array in passes.kept] == [X.shape, X.shape]  # sine and cosine, not the weight
