"""Every operation along every axis: what is measured, fitted, printed, drawn, and read again by plan --links."""

import itertools
import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from meshtrain.hardware import links
from meshtrain.hardware.links import OPERATIONS, Link, wire_share
from meshtrain.probe.bench import bandwidth_chart, measurements, sweep
from meshtrain.probe.bench.timed import Timed
from meshtrain.sharding.mesh import make_mesh
from meshtrain.sharding.rules import AXES

PLANTED = {"data": (40e-6, 25e9), "fsdp": (8e-6, 300e9)}
SIZES = sweep.sizes(2**10, 2**26)


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(dict.fromkeys(AXES, 1) | {"data": 2, "fsdp": 4}, jax.devices())


def planted(mesh, axis, operation, num_bytes):
    latency, bandwidth = PLANTED[axis]
    seconds = latency + num_bytes * wire_share(operation, mesh.shape[axis]) / bandwidth
    return Timed(axis, operation, mesh.shape[axis], num_bytes, (seconds, 1.2 * seconds))


@pytest.fixture(scope="module")
def swept(mesh):
    return sweep.sweep(mesh, SIZES, 30, measure=planted)


def test_all_operations_are_measured_on_all_axes_above_one(swept):
    keys = [(row.axis, row.operation, row.num_bytes) for row in swept.rows]
    assert keys == list(itertools.product(PLANTED, OPERATIONS, SIZES))
    assert (swept.platform, swept.num_processes, swept.num_hosts) == ("cpu", 1, 1)
    for one in swept.fits:
        latency, bandwidth = PLANTED[one.axis]
        assert one.link.latency_seconds == pytest.approx(latency, rel=1e-6)
        assert one.link.bytes_per_second == pytest.approx(bandwidth, rel=1e-6)


def test_the_file_is_read_again_as_links(swept, tmp_path):
    path = tmp_path / "links.json"
    content = json.loads(json.dumps(measurements.json_of(swept)))
    path.write_text(json.dumps(content))
    assert links.read(str(path)).links == tuple(one.link for one in swept.fits)
    [first, *_] = content["measurements"]
    assert first["bus_bytes_per_second"] == pytest.approx(first["wire_bytes"] / first["fastest_seconds"])
    assert content["mesh"] == dict.fromkeys(AXES, 1) | {"data": 2, "fsdp": 4}


def test_the_text_has_a_line_for_each_and_says_that_devices_are_simulated(swept):
    text = measurements.text(swept)
    assert sum(line.split()[:1] == ["fsdp"] for line in text.splitlines()) == len(OPERATIONS) * (len(SIZES) + 1)
    assert "data  all-reduce                  2      1        40.0    25     0%" in text
    assert measurements.SIMULATED in text
    assert "not fitted" not in text
    assert "left out" not in text
    assert "WRONG" not in text


def test_wrong_values_and_missing_fits_are_named(mesh):
    def wrong(*what):
        return Timed(*what[1:3], 2, what[3], (1e-6, 1e-6), ("process 3: device 7 has 1 wrong",))

    found = sweep.sweep(mesh, SIZES[:1], 30, measure=wrong)
    text = measurements.text(found)
    assert "WRONG        process 3: device 7 has 1 wrong" in text
    assert "not fitted   all-reduce on data: the results are wrong" in text
    assert measurements.json_of(found)["links"] == []


def test_larger_sizes_are_left_out_when_they_would_take_too_long(mesh):
    """All-reduces of 64 MiB along `data`: eight runs of five in 0.11 s."""
    found = sweep.sweep(mesh, SIZES, 0.1, measure=planted)
    largest = {(row.axis, row.operation): row.num_bytes for row in found.rows}
    assert largest["data", "all-reduce"] == 2**24
    assert largest["fsdp", "all-reduce"] == 2**26
    said = [line for line in measurements.text(found).splitlines() if line.startswith("skipped")]
    assert "skipped      all-reduce on data from 64 MiB on: it would take longer than --limit" in said
    assert not any("fsdp" in line for line in said)


def test_the_next_size_is_expected_on_the_line_through_the_last_two():
    small, large = (Timed("data", "all-reduce", 2, size, (40e-6 + size * 1e-10,)) for size in (2**22, 2**24))
    assert sweep.expected_seconds([small, large], 2**26) == pytest.approx(5 * 8 * (40e-6 + 2**26 * 1e-10))
    assert sweep.expected_seconds([small], 2**24) == pytest.approx(5 * 8 * small.fastest_seconds)
    assert sweep.expected_seconds([large, small], 2**26) == pytest.approx(5 * 8 * small.fastest_seconds)


@pytest.mark.parametrize(
    "hosts, along_data, along_fsdp",
    [(["a", "b", "c", "d"], 2, 2), (["a", "a", "b", "b"], 2, 1), (["a", "b", "a", "b"], 1, 2), (["a"] * 4, 1, 1)],
)
def test_hosts_are_counted_by_name_not_by_process(hosts, along_data, along_fsdp):
    """Two devices in each of four processes, along `fsdp`."""
    devices = np.array([SimpleNamespace(process_index=i // 2) for i in range(8)]).reshape(2, 4)
    mesh = SimpleNamespace(devices=devices, axis_names=("data", "fsdp"), shape={"data": 2, "fsdp": 4})
    assert sweep.hosts_along(mesh, "data", hosts) == along_data
    assert sweep.hosts_along(mesh, "fsdp", hosts) == along_fsdp


def test_the_room_is_that_of_the_fullest_device(mesh):
    def device(used):
        stats = None if used is None else {"bytes_limit": 80_000, "bytes_in_use": used}
        return SimpleNamespace(process_index=0, platform="gpu", memory_stats=lambda: stats)

    assert sweep.room_bytes(SimpleNamespace(devices=np.array([device(None)]))) == 2**29
    assert sweep.room_bytes(SimpleNamespace(devices=np.array([device(0), device(16_000)]))) == 8000
    assert 2**20 < sweep.room_bytes(mesh) < 2**40


def test_a_line_for_each_operation_and_a_dotted_one_for_each_fit(swept):
    drawn = bandwidth_chart.figure(swept)
    assert [len(panel.lines) for panel in drawn.axes] == [2 * len(OPERATIONS)] * 4
    times = {each.get_label(): each for each in drawn.axes[0].lines}
    np.testing.assert_allclose(
        times["all-reduce"].get_ydata(), [planted_us("data", "all-reduce", 2, size) for size in SIZES]
    )


def planted_us(axis, operation, size, num_bytes):
    return 1e6 * Link(axis, operation, size, 1, *PLANTED[axis]).seconds(num_bytes * wire_share(operation, size))
