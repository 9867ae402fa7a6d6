"""ZeRO levels change where moments, gradients and weights live, and no number."""

import dataclasses

import pytest

from meshtrain.layout.zero import ZeroOptions

MESHES = [{"data": 8}, {"data": 4, "tensor": 2}, {"data": 2, "tensor": 2, "pipeline": 2}, {"data": 2, "fsdp": 4}]
# The fast ones: each level and each mesh once. Level 0 is what every other parity test runs.
FAST = {(1, 0), (2, 2), (3, 1), (1, 3)}


def cases():
    for level in (1, 2, 3):
        for number, mesh in enumerate(MESHES):
            marks = () if (level, number) in FAST else (pytest.mark.slow,)
            yield pytest.param(level, mesh, marks=marks, id=f"{level}-" + "-".join(f"{a}{n}" for a, n in mesh.items()))


@pytest.mark.parametrize("level, mesh", list(cases()))
def test_level_changes_no_number(level, mesh, base, trained, one_device, assert_same):
    # Two microbatches, so that adding up matters; a pipeline has four of its own.
    parts = 1 if "pipeline" in mesh else 2
    config = dataclasses.replace(base, zero=ZeroOptions(level=level), accumulation_steps=parts)
    assert_same(trained(config, **mesh), one_device)
