import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from meshtrain.layout.called_once import called_once
from meshtrain.layout.placement import on_shards

X = jnp.arange(8.0).reshape(4, 2) / 8


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
    shared, own = (on_stage(mesh, function) for function in (stage(mesh), called_once(stage(mesh))))
    assert max(num_calls(shared.lower(X).as_text()).values()) > 1
    assert set(num_calls(own.lower(X).as_text()).values()) == {1}
    np.testing.assert_array_equal(own(X), shared(X))
