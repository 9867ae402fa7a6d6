"""Placements for people."""

import jax
import jax.numpy as jnp
import pytest

from meshtrain.layout.explain import MAX_DEVICES_SHOWN, draw_mesh, mesh_text, rows, table
from meshtrain.layout.mesh import make_mesh
from meshtrain.layout.partition import placements
from meshtrain.layout.rules import LayoutOptions, default_rules

RULES = default_rules(LayoutOptions())


def shape_of(data=1, pipeline=1, fsdp=1, tensor=1):
    return {"data": data, "pipeline": pipeline, "fsdp": fsdp, "tensor": tensor}


def explained(**sizes):
    tree = {
        "scale": jax.ShapeDtypeStruct((8,), jnp.float32),
        "step": jax.ShapeDtypeStruct((), jnp.int32),
        "table": jax.ShapeDtypeStruct((512, 8), jnp.bfloat16),
    }
    names = {"scale": ("norm",), "step": (), "table": ("vocab", "embed")}
    mesh = make_mesh(shape_of(**sizes), jax.devices())
    return rows(tree, names, placements(tree, names, RULES, mesh))


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
    home = placements({"t": jnp.zeros((512, 8))}, {"t": ("vocab", "embed")}, RULES, mesh)["t"]
    there = jax.device_put(jnp.zeros((512, 8), jnp.bfloat16), home)
    assert row.num_bytes_per_device == there.addressable_shards[0].data.nbytes
    assert row.num_bytes == there.nbytes


def test_axes_of_size_one_are_not_shown():
    assert explained(tensor=8)[2].axes == (("tensor",), ())


def test_a_mesh_in_letters():
    assert mesh_text(shape_of(data=2, pipeline=2, tensor=2)) == (
        "8 devices = data 2 x pipeline 2 x tensor 2\n"
        "\n"
        "data 0: share 1 of 2 of the batch\n"
        "        tensor     0   1\n"
        "    pipeline 0   [0] [1]   layers 1/2\n"
        "    pipeline 1   [2] [3]   layers 2/2\n"
        "\n"
        "data 1: share 2 of 2 of the batch\n"
        "        tensor     0   1\n"
        "    pipeline 0   [4] [5]   layers 1/2\n"
        "    pipeline 1   [6] [7]   layers 2/2\n"
    )


def test_devices_in_letters_are_those_of_the_mesh():
    sizes = shape_of(data=1, pipeline=2, fsdp=2, tensor=2)
    text = mesh_text(sizes)
    for index in make_mesh(sizes, jax.devices()).devices[0, 1].flat:
        assert f"[{index.id}]" in next(line for line in text.split("\n") if "pipeline 1" in line)
    assert "shares 1 to 2 of 2" in text


def test_a_large_mesh_loses_its_middle():
    text = mesh_text(shape_of(data=64, pipeline=8, tensor=8))
    assert "4096 devices" in text
    assert "[4095]" in text
    assert "..." in text
    assert text.count("[") <= MAX_DEVICES_SHOWN
    assert mesh_text(shape_of(data=8)).count("...") == 0


@pytest.mark.parametrize("sizes", [shape_of(data=2, pipeline=2, tensor=2), shape_of(data=64, fsdp=4, tensor=8)])
def test_a_picture_is_written(tmp_path, sizes):
    path = tmp_path / "mesh.png"
    draw_mesh(sizes, path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_picture_has_a_card_for_each_device(tmp_path):
    path = tmp_path / "mesh.svg"
    draw_mesh(shape_of(data=2, pipeline=2, tensor=2), path)
    text = path.read_text()
    # matplotlib keeps each text as a comment beside its outlines.
    assert [f"<!-- device {i} -->" in text for i in range(9)] == [True] * 8 + [False]
    assert "<!-- tensor 1 -->" in text
    assert "<!-- fsdp 0" not in text
