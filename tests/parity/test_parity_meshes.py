"""The meshes that the short table leaves out, with each level of ZeRO: the same numbers as plain JAX on one device."""

import dataclasses

import pytest

from meshtrain.layout.zero import ZeroOptions
from tests.parity import runs

pytestmark = pytest.mark.slow

MESHES = [
    {"fsdp": 8},
    {"tensor": 8},
    {"data": 2, "fsdp": 4},
    {"data": 4, "tensor": 2},
    {"fsdp": 4, "tensor": 2},
    {"data": 2, "fsdp": 2, "tensor": 2},
]
LEVELS = [
    (1, {"data": 4, "tensor": 2}),
    (1, {"data": 2, "tensor": 2, "pipeline": 2}),
    (2, {"data": 8}),
    (2, {"data": 2, "tensor": 2, "pipeline": 2}),
    (3, {"data": 2, "fsdp": 4}),
    (3, {"data": 2, "tensor": 2, "pipeline": 2}),
]


def name(mesh):
    return "-".join(f"{axis}{size}" for axis, size in mesh.items()) if isinstance(mesh, dict) else str(mesh)


@pytest.mark.parametrize("mesh", MESHES, ids=name)
def test_mesh_changes_no_number(mesh, assert_parity):
    assert_parity(runs.CONFIG, **mesh)


@pytest.mark.parametrize("level, mesh", LEVELS, ids=name)
def test_level_changes_no_number(level, mesh, assert_parity):
    # Two microbatches, so that adding up matters; a pipeline has four of its own.
    parts = 1 if "pipeline" in mesh else 2
    assert_parity(dataclasses.replace(runs.CONFIG, zero=ZeroOptions(level=level), accumulation_steps=parts), **mesh)
