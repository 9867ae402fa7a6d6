"""The meshes that the short table leaves out, with each level of ZeRO: the same numbers as plain JAX on one device."""

import dataclasses

import pytest

from meshtrain.layout.rules import LayoutOptions
from meshtrain.layout.zero import ZeroOptions
from meshtrain.models.remat import RematOptions
from tests.parity import runs

pytestmark = pytest.mark.slow

# Meshes without a pipeline (those with one: test_parity_schedules.py) beyond those of test_parity_covering.py.
MESHES = [
    (0, {"fsdp": 8}),
    (0, {"tensor": 8}),
    (3, {"data": 2, "fsdp": 4}),
    (1, {"data": 4, "tensor": 2}),
    (2, {"data": 8}),
]


def name(given):
    return "-".join(f"{axis}{size}" for axis, size in given.items()) if isinstance(given, dict) else f"level {given}"


@pytest.mark.parametrize("level, mesh", MESHES, ids=name)
def test_mesh_and_level_change_no_number(level, mesh, assert_parity):
    # Two microbatches where a level splits sums over data, so that adding up matters.
    parts = 2 if level else 1
    assert_parity(dataclasses.replace(runs.CONFIG, zero=ZeroOptions(level=level), accumulation_steps=parts), **mesh)


# A stage of the pipeline begins with a layer in the middle of a turn of three.
IN_TURNS = [
    ({"fsdp": 2, "tensor": 2, "pipeline": 2}, {"layout": LayoutOptions(sequence_parallel=True)}),
    ({"data": 2, "fsdp": 2, "tensor": 2}, {"remat": RematOptions("full", 2), "accumulation_steps": 2}),
]


@pytest.mark.parametrize("mesh, options", IN_TURNS, ids=["pipeline", "remat"])
def test_layers_with_a_window_and_without_are_the_same_on_every_mesh(mesh, options, assert_parity):
    """And with caps, norms after attention and mlp, and another rotary base for each kind."""
    assert_parity(dataclasses.replace(runs.CONFIG, model=runs.GEMMA, **options), **mesh)
