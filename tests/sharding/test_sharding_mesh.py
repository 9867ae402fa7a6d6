"""Sizes of the mesh, and the order of devices in it."""

import collections
import dataclasses
import itertools

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from meshtrain.errors import UserError
from meshtrain.sharding import mesh as mesh_module
from meshtrain.sharding.mesh import MeshOptions, check, describe, make_mesh, mesh_shape, num_needed
from meshtrain.sharding.rules import AXES
from tests.sharding.conftest import shape_of

pytestmark = pytest.mark.quick


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    id: int
    process_index: int
    slice_index: int
    platform: str = "gpu"
    device_kind: str = "NVIDIA H100 80GB HBM3"
    coords: tuple[int, int, int] | None = None
    core_on_chip: int = 0


def gpus(num_hosts, num_a_host, num_slices=1):
    a_slice = num_hosts // num_slices
    return [
        FakeDevice(host * num_a_host + i, host, host // a_slice) for host in range(num_hosts) for i in range(num_a_host)
    ]


def tpus(side, num_slices=1):
    """Slices of side x side chips, four chips to a host."""
    found = []
    for s in range(num_slices):
        for x, y in itertools.product(range(side), range(side)):
            host = s * side * side // 4 + (x // 2) * (side // 2) + y // 2
            found.append(FakeDevice(len(found), host, s, "tpu", "TPU v5e", (x, y, 0)))
    return found


def ordered(devices, **sizes):
    return mesh_module._order_devices(tuple(shape_of(**sizes)[axis] for axis in AXES), devices)


def groups(array, key):
    return np.vectorize(lambda device: getattr(device, key))(array)


def test_axes_stand_in_the_order_of_the_network():
    assert AXES == ("data", "pipeline", "fsdp", "expert", "context", "tensor")
    assert tuple(mesh_shape(MeshOptions(), 1, simulated=False)) == AXES


@pytest.mark.parametrize(
    "options, expected",
    [
        (MeshOptions(data=-1), shape_of(data=8)),
        (MeshOptions(data=2, tensor=-1), shape_of(data=2, tensor=4)),
        (MeshOptions(fsdp=-1, tensor=8), shape_of(tensor=8)),
        (MeshOptions(data=2, tensor=2), shape_of(data=2, tensor=2)),
    ],
)
def test_minus_one_takes_what_is_left(options, expected):
    assert mesh_shape(options, 8, simulated=False) == expected


@pytest.mark.parametrize(
    "options, expected",
    [
        (MeshOptions(), 1),
        (MeshOptions(data=-1), 8),
        (MeshOptions(data=-1, tensor=3), 6),
        (MeshOptions(data=-1, tensor=16), 16),
        (MeshOptions(data=4, fsdp=4), 16),
    ],
)
def test_simulated_devices_fit_the_mesh(options, expected):
    assert num_needed(options) == expected
    sizes = mesh_shape(options, 1, simulated=True)
    assert np.prod(list(sizes.values())) == expected


def test_every_bad_size_is_reported_at_once():
    found = check(MeshOptions(data=0, fsdp=-2, tensor=-1, pipeline=-1))
    assert found == [
        "mesh.data: got 0; allowed: at least 1, or -1 for the remaining devices; nearest: 1",
        "mesh.fsdp: got -2; allowed: at least 1, or -1 for the remaining devices; nearest: -1",
        "mesh.pipeline, mesh.tensor: got -1 for 2 axes; allowed: -1 for one; nearest: mesh.tensor=1",
    ]
    with pytest.raises(UserError) as error:
        mesh_shape(MeshOptions(data=0, tensor=-2), 8, simulated=False)
    assert len(error.value.problems) == 2
    assert check(MeshOptions(data=-1, tensor=4)) == []


@pytest.mark.parametrize(
    "options, processes, expected",
    [
        (MeshOptions(data=-1, tensor=3), 1, "mesh.data=2, which leaves 2 unused"),
        (MeshOptions(data=-1, tensor=16), 1, "smaller axes"),
        (MeshOptions(data=4, tensor=4), 1, "at most the 8 available devices; nearest: mesh.data=2"),
        (MeshOptions(tensor=16), 1, "nearest: mesh.tensor=8"),
        (MeshOptions(data=2, tensor=2), 2, "exactly the 8 devices of 2 processes; nearest: mesh.data=4"),
        (MeshOptions(tensor=3), 2, "exactly the 8 devices of 2 processes; nearest: mesh.tensor=8"),
    ],
)
def test_sizes_that_do_not_fit_name_the_nearest_that_do(options, processes, expected):
    with pytest.raises(UserError) as error:
        mesh_shape(options, 8, simulated=False, num_processes=processes)
    (line,) = error.value.problems
    assert expected in line
    assert line.startswith("mesh")


def test_where_no_axis_alone_can_take_what_is_left_it_says_so():
    with pytest.raises(UserError, match="nearest: sizes whose product is 10"):
        mesh_shape(MeshOptions(data=3, tensor=3), 10, simulated=False, num_processes=2)


def test_a_mesh_has_auto_axes_and_takes_the_first_devices():
    mesh = make_mesh(shape_of(data=2, tensor=2), jax.devices())
    assert mesh.axis_names == AXES
    assert mesh.axis_types == (AxisType.Auto,) * len(AXES)
    assert list(mesh.devices.flat) == jax.devices()[:4]
    assert describe(mesh) == "data 2 x tensor 2: 4 x cpu, in JAX's device order"


def test_too_few_devices_are_refused():
    with pytest.raises(UserError, match=r"16 devices; allowed: at most the 8 available devices; nearest: mesh\.data=1"):
        make_mesh(shape_of(data=2, tensor=8), jax.devices())


def test_gpu_hosts_are_left_by_the_outer_axes_only():
    array = ordered(gpus(8, 8), data=4, pipeline=2, tensor=8)
    hosts = groups(array, "process_index")
    assert (hosts == hosts[..., :1]).all(), "tensor left a host"
    assert (hosts[..., 0].ravel() == np.arange(8)).all()


def test_sizes_that_do_not_nest_keep_tensor_inside_a_host():
    # Row by row, 4 hosts of 6 would cut data 3 x pipeline 4 x tensor 2 within a stage; whole stages move instead.
    array = ordered(gpus(4, 6), data=3, pipeline=4, tensor=2)
    hosts = groups(array, "process_index")
    assert (hosts == hosts[:1]).all(), "data left a host"
    assert (hosts == hosts[..., :1]).all(), "tensor left a host"
    assert len(set(hosts[0, ..., 0].ravel())) == 4


def test_an_axis_larger_than_a_host_takes_neighbouring_hosts():
    hosts = groups(ordered(gpus(4, 8), data=2, tensor=16), "process_index")
    assert sorted(set(hosts[0].flat)) == [0, 1]
    assert collections.Counter(hosts[1].flat) == {2: 8, 3: 8}


def test_gpu_devices_out_of_order_are_sorted_within_a_host():
    shuffled = gpus(2, 4)[::-1]
    ids = groups(ordered(shuffled, data=2, tensor=4), "id")
    assert ids.reshape(2, 4).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_slices_come_before_hosts():
    array = ordered(gpus(8, 4, num_slices=2), data=2, fsdp=4, tensor=4)
    slices, hosts = groups(array, "slice_index"), groups(array, "process_index")
    assert (slices == np.arange(2).reshape(2, *(1,) * (len(AXES) - 1))).all()
    assert (hosts == hosts[..., :1]).all()


def test_slices_stay_outermost_where_hosts_are_numbered_across_them():
    devices = [dataclasses.replace(device, slice_index=device.process_index % 2) for device in gpus(4, 4)]
    slices = groups(ordered(devices, data=2, fsdp=2, tensor=4), "slice_index")
    assert (slices == np.arange(2).reshape(2, *(1,) * (len(AXES) - 1))).all()


def test_tpu_slices_are_left_by_data_only_and_each_is_a_torus():
    array = ordered(tpus(4, num_slices=2), data=2, fsdp=4, tensor=4)
    assert (groups(array, "slice_index") == np.arange(2).reshape(2, *(1,) * (len(AXES) - 1))).all()
    for line in array[0, 0].reshape(-1, 4):
        xs, ys = {device.coords[0] for device in line}, {device.coords[1] for device in line}
        assert min(len(xs), len(ys)) == 1, "tensor does not run along one side of the torus"


def test_one_tpu_slice_follows_its_torus_and_not_its_hosts():
    array = ordered(tpus(4), fsdp=4, tensor=4)
    assert mesh_module._arrangement(tpus(4)) == "torus"
    assert len(set(array.flat)) == 16
    # Chips are listed along y; where an axis needs both sides of the torus, it is still found.
    assert ordered(tpus(4), tensor=16).shape == (*(1,) * (len(AXES) - 1), 16)


def test_groups_of_unequal_size_stay_as_listed():
    devices = gpus(2, 4)[:6]
    assert mesh_module._arrangement(devices) == "listed"
    assert groups(ordered(devices, data=3, tensor=2), "id").ravel().tolist() == list(range(6))


def test_the_description_names_the_axes_that_leave_a_host():
    array = ordered(gpus(4, 8), data=2, pipeline=2, tensor=8)
    fake = type("FakeMesh", (), {"devices": array, "shape": shape_of(data=2, pipeline=2, tensor=8)})()
    assert describe(fake) == (
        "data 2 x pipeline 2 x tensor 8: 32 x NVIDIA H100 80GB HBM3, hosts outermost; "
        "4 hosts, crossed by data, pipeline"
    )
    assert describe(fake, num_machines=4) == describe(fake)
    said = "data 2 x pipeline 2 x tensor 8: 32 x NVIDIA H100 80GB HBM3, processes outermost; 4 processes on"
    assert describe(fake, num_machines=1) == f"{said} one machine, crossed by data, pipeline"
    assert describe(fake, num_machines=2) == f"{said} 2 machines, crossed by data, pipeline"
