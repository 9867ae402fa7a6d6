"""One program, any mesh: the same initial weights, losses and gradients as on one device, dropout on."""

import dataclasses

import jax
import numpy as np
import pytest

from meshtrain.assemble import assemble
from meshtrain.layout.axes import AXES
from meshtrain.models.remat import RematOptions

MESHES = [
    {"data": 8},
    {"fsdp": 8},
    {"tensor": 8},
    {"pipeline": 8},
    {"data": 2, "fsdp": 4},
    {"data": 4, "tensor": 2},
    {"data": 4, "pipeline": 2},
    {"fsdp": 4, "tensor": 2},
    {"fsdp": 2, "pipeline": 4},
    {"tensor": 2, "pipeline": 4},
    {"data": 2, "fsdp": 2, "tensor": 2},
    {"data": 2, "tensor": 2, "pipeline": 2},
    {"data": 2, "fsdp": 2, "pipeline": 2},
    {"fsdp": 2, "tensor": 2, "pipeline": 2},
]


def name(mesh: dict[str, int]) -> str:
    return "-".join(f"{axis}{size}" for axis, size in mesh.items())


@pytest.mark.parametrize("mesh", MESHES, ids=name)
def test_mesh_changes_no_number(mesh, trained, one_device, assert_same):
    assert_same(trained(**mesh), one_device)


def test_reference_learns(one_device):
    """The bound would say nothing of a model that stands still."""
    assert one_device.losses[-1] < one_device.losses[0] - 0.1
    assert np.abs(np.diff(one_device.losses)).min() > 1e-3


def test_initial_weights_do_not_depend_on_the_level_of_optimization(base, one_device):
    """On CPUs the program makes them with less of it, for a quick start."""
    init = assemble(base, dict.fromkeys(AXES, 1), jax.devices()[:1]).init.__wrapped__
    params = jax.jit(init)(jax.random.key_data(jax.random.key(base.seed))).params
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(params), one_device.initial)


def test_sequence_parallelism_changes_no_number(sequence_parallel, trained, one_device, assert_same):
    assert_same(trained(sequence_parallel, data=2, tensor=4), one_device)


def test_sequence_parallelism_in_a_pipeline_changes_no_number(sequence_parallel, trained, one_device, assert_same):
    assert_same(trained(sequence_parallel, tensor=4, pipeline=2), one_device)


@pytest.mark.parametrize("num_parts", [2, 4])
def test_accumulation_changes_no_number(num_parts, base, trained, one_device, assert_same):
    assert_same(trained(dataclasses.replace(base, accumulation_steps=num_parts), data=4, tensor=2), one_device)


@pytest.mark.parametrize("policy", ["full", "dots"])
def test_rematerialization_changes_no_number(policy, base, trained, one_device, assert_same):
    config = dataclasses.replace(base, remat=RematOptions(policy))
    assert_same(trained(config, data=2, fsdp=2, tensor=2), one_device)
