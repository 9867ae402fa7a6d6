"""Files of measured links: written and read again, found by axis and operation, refused in one line each."""

import json
import re

import pytest

from meshtrain.errors import UserError
from meshtrain.hardware import links
from meshtrain.hardware.links import Link, Links

REDUCED = Link("data", "all-reduce", 8, 2, 30e-6, 40e9)
MEASURED = Links(
    "NVIDIA H100 80GB HBM3",
    (REDUCED, Link("fsdp", "all-gather", 4, 1, 20e-6, 300e9), Link("pipeline", "collective-permute", 4, 1, 9e-6, 2e11)),
)
ENTRY = links.to_json(MEASURED)["links"][0]
HUGE = "1" + "0" * 400


def written(path, content):
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_what_is_written_is_read_again_and_further_keys_are_left_alone(tmp_path):
    content = {**links.to_json(MEASURED), "measurements": [{"bytes": 1}]}
    assert links.read(written(tmp_path / "links.json", content)) == MEASURED


def test_a_collective_takes_the_latency_and_its_bytes_at_the_bandwidth():
    assert REDUCED.seconds(80e9) == pytest.approx(2.00003)


@pytest.mark.parametrize(
    "axis, operation, group_size, num_hosts, latency",
    [
        ("data", "all-reduce", 8, 2, 30e-6),
        ("data", "all-reduce", 64, 16, 60e-6),  # four devices a host, as measured: log2(64) / log2(8) of the latency
        ("data", "all-reduce", 64, 8, None),  # eight devices share a host's adapters
        ("data", "all-reduce", 4, 1, None),  # inside a host: other links
        ("data", "all-gather", 8, 2, None),
        ("fsdp", "all-reduce", 8, 2, None),
        ("fsdp", "all-gather", 2, 1, 10e-6),
        ("fsdp", "all-gather", 8, 2, None),
        ("pipeline", "collective-permute", 8, 1, 9e-6),
    ],
)
def test_a_link_is_found_for_groups_that_use_the_same_network(axis, operation, group_size, num_hosts, latency):
    found = links.link_for(MEASURED, axis, operation, group_size, num_hosts)
    if latency is None:
        assert found is None
        return
    assert (found.group_size, found.num_hosts) == (group_size, num_hosts)
    assert found.latency_seconds == pytest.approx(latency, rel=1e-12)
    assert found.bytes_per_second == {"data": 40e9, "fsdp": 300e9, "pipeline": 200e9}[axis]


def test_of_two_sizes_the_nearest_is_taken():
    both = Links("cpu", (Link("data", "all-reduce", 2, 1, 10e-6, 1e9), Link("data", "all-reduce", 16, 1, 80e-6, 2e9)))
    assert links.link_for(both, "data", "all-reduce", 8, 1).bytes_per_second == 2e9
    assert links.link_for(both, "data", "all-reduce", 2, 1) == both.links[0]


@pytest.mark.parametrize("kind", ["NVIDIA H200", "NVIDIA H200 141GB HBM3e"])
def test_names_of_one_accelerator_are_one_platform(kind):
    assert links.refuse_other_platform("f", Links("NVIDIA H200", ()), kind) is None, "not refused"


@pytest.mark.parametrize("measured_on, planned", [("cpu", "NVIDIA H200"), ("cpu", "TPU v4"), ("NVIDIA H200", "cpu")])
def test_another_platform_is_refused_by_name(measured_on, planned):
    with pytest.raises(UserError, match=f"'f', measured on '{measured_on}', for a plan on '{planned}'") as raised:
        links.refuse_other_platform("f", Links(measured_on, ()), planned)
    assert len(raised.value.problems) == 1


@pytest.mark.parametrize(
    "content, said",
    [
        ("", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ([], "has no platform and no links"),
        ({"platform": "cpu"}, "has no links"),
        ({"platform": "cpu", "links": []}, "the machine was busy"),
        ({"platform": "", "links": [ENTRY]}, "platform: got ''"),
        ({"platform": "cpu", "links": {"data": 1}}, "allowed: a list"),
        ({"platform": "cpu", "links": [ENTRY, 3]}, "links[1] has no axis, operation"),
        ({"platform": "cpu", "links": [ENTRY, ENTRY]}, "has all-reduce on data twice"),
        ({"platform": "cpu", "links": [{**ENTRY, "axis": 3}]}, "links[0].axis: got 3"),
        ({"platform": "cpu", "links": [{**ENTRY, "operation": "sum"}]}, "links[0].operation: got 'sum'"),
        ({"platform": "cpu", "links": [{**ENTRY, "operation": ["sum"]}]}, "links[0].operation: got ['sum']"),
        ({"platform": "cpu", "links": [{**ENTRY, "group_size": 1, "num_hosts": 1}]}, "links[0].group_size: got 1"),
        ({"platform": "cpu", "links": [{**ENTRY, "num_hosts": 9}]}, "links[0].num_hosts: got 9"),
        ({"platform": "cpu", "links": [{**ENTRY, "latency_seconds": -1e-6}]}, "latency_seconds: got -1e-06"),
        ({"platform": "cpu", "links": [{**ENTRY, "bytes_per_second": 0}]}, "bytes_per_second: got 0"),
        ({"platform": "cpu", "links": [{**ENTRY, "bytes_per_second": float("inf")}]}, "bytes_per_second: got inf"),
        ({"platform": "cpu", "links": [{**ENTRY, "bytes_per_second": True}]}, "bytes_per_second: got True"),
        (
            json.dumps({"platform": "cpu", "links": [ENTRY]}).replace("40000000000.0", HUGE),
            "bytes_per_second: got 1000",
        ),
    ],
)
def test_a_broken_file_is_refused_in_one_line(content, said, tmp_path):
    with pytest.raises(UserError, match=re.escape(said)) as raised:
        links.read(written(tmp_path / "links.json", content))
    assert len(raised.value.problems) == 1
    assert all(word in raised.value.problems[0] for word in ("--links", "allowed: ", "nearest: "))


def test_all_problems_of_a_file_come_at_once(tmp_path):
    entries = [{**ENTRY, "operation": "sum", "latency_seconds": None}, {**ENTRY, "axis": ""}]
    with pytest.raises(UserError) as raised:
        links.read(written(tmp_path / "links.json", {"platform": 3, "links": entries}))
    assert len(raised.value.problems) == 4


def test_a_missing_file_is_refused():
    with pytest.raises(UserError, match="not a file but nothing there"):
        links.read("nowhere/links.json")
