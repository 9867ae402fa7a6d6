"""Placements for people."""

import jax
import jax.numpy as jnp
import pytest

from meshtrain.sharding.mesh import make_mesh
from meshtrain.sharding.param_sharding import param_shardings
from meshtrain.sharding.placement_text import rows, table
from meshtrain.sharding.rules import LayoutOptions, default_rules
from tests.sharding.conftest import shape_of

pytestmark = pytest.mark.quick

RULES = default_rules(LayoutOptions())


def placed(tree, names, mesh):
    specs = param_shardings(tree, names, RULES, mesh.shape, 0)
    shardings = jax.tree.map(lambda one: jax.NamedSharding(mesh, one.parameter), specs)
    return jax.tree.map(lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree, shardings)


def explained(**sizes):
    tree = {
        "scale": jax.ShapeDtypeStruct((8,), jnp.float32),
        "step": jax.ShapeDtypeStruct((), jnp.int32),
        "table": jax.ShapeDtypeStruct((512, 8), jnp.bfloat16),
    }
    names = {"scale": ("norm",), "step": (), "table": ("vocab", "embed")}
    mesh = make_mesh(shape_of(**sizes), jax.devices())
    return rows(placed(tree, names, mesh), list(names.values()))


def test_a_line_for_each_array_and_totals():
    assert table(explained(pipeline=2, fsdp=2, tensor=2)).split("\n") == [
        "array  shape    dtype     logical axes  split over            a device",
        "-----  -------  --------  ------------  --------------------  --------",
        "scale  8        float32   norm          -                         32 B",
        "step   scalar   int32                                              4 B",
        "table  512 x 8  bfloat16  vocab embed   pipeline+tensor fsdp     1 KiB",
        "",
        "3 arrays, 4,105 elements, 8.04 KiB; 1.04 KiB on each device",
        "",
    ]


def test_bytes_on_a_device_are_what_jax_puts_there():
    row = explained(pipeline=2, fsdp=2, tensor=2)[2]
    mesh = make_mesh(shape_of(pipeline=2, fsdp=2, tensor=2), jax.devices())
    zeros = jnp.zeros((512, 8), jnp.bfloat16)
    there = jax.device_put(zeros, placed({"t": zeros}, {"t": ("vocab", "embed")}, mesh)["t"].sharding)
    assert row.num_bytes_per_device == there.addressable_shards[0].data.nbytes
    assert row.num_bytes == there.nbytes


def test_axes_of_size_one_are_not_shown():
    assert explained(tensor=8)[2].axes == (("tensor",), ())
