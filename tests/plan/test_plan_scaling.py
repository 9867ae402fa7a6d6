"""A whole scaling: how many programs, where searches run, baselines, tables, JSON, chart; steps are imagined."""

import dataclasses
import json
import re

import pytest

from meshtrain.launch.links import Link, Links
from meshtrain.layout.axes import AXES
from meshtrain.observe.line_charts import picture
from meshtrain.plan import __main__ as program
from meshtrain.plan import page, planner, scaling, scaling_report, search, topology
from meshtrain.plan.candidates import Candidate
from meshtrain.plan.curves import COMPILED, MODELLED
from meshtrain.plan.timing import Assumptions
from meshtrain.words.errors import UserError
from tests.plan import imagined
from tests.plan.conftest import config as small
from tests.plan.test_plan_candidates import cluster_of

SIZES = [2, 4, 8]


def cluster(num_devices=8):
    return dataclasses.replace(cluster_of("h100", 1, num_devices), text=f"h100:1x{num_devices}")


@pytest.fixture(autouse=True)
def open_cluster(monkeypatch):
    """Clusters of simulated devices with an H100's peaks."""
    monkeypatch.setattr(scaling, "open_cluster", lambda text: cluster(int(text.rpartition("x")[2])))


def finds(shape_of, calls=None):
    """A search that finds data x fsdp meshes by a function of the number of devices; None: nothing."""

    def run(config, cluster, assumptions, most):
        size = len(cluster.devices)
        if calls is not None:
            calls.append((size, most))
        data = shape_of(size)
        if data is None:
            raise UserError("--search: got nothing")
        shape = dict.fromkeys(AXES, 1) | {"data": data, "fsdp": size // data}
        change = {f"mesh.{axis}": length for axis, length in shape.items()} | {"accumulation_steps": 1}
        one = Candidate(change, shape, 0.0, 0.0)
        plan = dataclasses.make_dataclass("plan", ["memory", "compiled"])
        memory = dataclasses.make_dataclass("memory", ["fits"])(True)
        return search.Found(cluster, ((one, plan(memory, None)),), 1, ())

    return run


CONFIG = small({"data": 8}, batch_size=128, accumulation_steps=8)


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setattr(scaling, "sample_of", lambda point, compiled: imagined.sample(point))

    def run(shape_of=lambda size: size, config=CONFIG, sizes=SIZES, calls=None, **fields):
        given = {"say": lambda line: None, "compile_step": imagined.sample} | fields
        assumed = given.pop("assumptions", Assumptions())
        return scaling.scaling(config, cluster(), sizes, assumed, run_search=finds(shape_of, calls), **given)

    return run


def curve(found, name, kind):
    return next(one for one in found.curves if (one.name, one.kind) == (name, kind))


def test_one_device_is_added_as_what_the_others_are_compared_with(run):
    found = run()
    assert found.sizes == (1, 2, 4, 8)
    strong = curve(found, "data", "strong")
    assert strong.base.point.num_devices == 1
    for row in strong.rows:
        assert strong.speedup(row) == pytest.approx(strong.base.seconds / row.seconds)
        assert strong.efficiency(row) == pytest.approx(strong.speedup(row) / row.point.num_devices)
    weak = curve(found, "data", "weak")
    assert [row.point.batch_size for row in weak.rows] == [16, 32, 64, 128]
    assert weak.efficiency(weak.rows[-1]) == pytest.approx(weak.base.seconds / weak.rows[-1].seconds)
    assert 0 < strong.fitted_serial_share < 1
    assert weak.fitted_serial_share is None


def test_where_no_cluster_is_a_single_device_the_smallest_is_the_base(run, monkeypatch):
    def opened(text):
        if text.endswith("x1"):
            raise UserError("--cluster: got 1")
        return cluster(int(text.rpartition("x")[2]))

    monkeypatch.setattr(scaling, "open_cluster", opened)
    found = run()
    assert found.sizes == (2, 4, 8)
    assert curve(found, "data", "strong").base.point.num_devices == 2


def test_without_room_on_one_device_the_smallest_that_fits_is_the_base(run, monkeypatch):
    monkeypatch.setattr(scaling, "usable_bytes", lambda accelerator: 2_000_000)  # of 1.2 MB of training state and more

    def large(point, _):
        return dataclasses.replace(imagined.sample(point), peak_bytes=5_000_000 // point.shape["fsdp"])

    calls = []
    found = run(compile_step=large, calls=calls)
    assert [size for size, _ in calls] == [4, 8]  # no search where nothing has fitted
    assert curve(found, "data", "strong").base is None
    fsdp = curve(found, "fsdp", "strong")
    assert found.sizes == (2, 4, 8)
    assert [row.fits for row in fsdp.rows] == [False, True, True]
    assert fsdp.base.point.num_devices == 4
    assert fsdp.speedup(fsdp.rows[0]) is None
    assert "too much" in scaling_report.text(found)


def test_the_search_runs_on_three_sizes_and_its_best_is_used_between(run):
    calls = []
    found = run(lambda size: 1 if size == 1 else 2, calls=calls)
    assert [size for size, _ in calls] == [1, 4, 8] if found.sizes[0] == 1 else [2, 4, 8]
    assert found.searched == tuple(size for size, _ in calls)
    best = curve(found, "best", "strong")
    assert len(best.rows) == len(found.sizes)
    others = [curve(found, name, "strong") for name in ("data", "fsdp", "hybrid")]
    for number, row in enumerate(best.rows):
        assert row.rate >= max(other.rows[number].rate for other in others) * (1 - 1e-9)


def test_a_search_that_finds_nothing_goes_on_with_more_devices(run):
    calls = []
    found = run(lambda size: size if size > 2 else None, calls=calls)
    assert [size for size, _ in calls] == [1, 2, 4, 8]
    assert found.searched == (4, 8)
    nothing = run(lambda size: None)
    assert nothing.searched == ()
    assert {one.name for one in nothing.curves} == {"data", "fsdp", "hybrid"}


@pytest.mark.parametrize("programs", [1, 3, 4, 9, 40])
def test_it_says_how_many_programs_and_compiles_no_more(run, programs):
    said, seen = [], []

    def counted(point, _):
        assert said, "the number of programs comes first"
        seen.append(point)
        return imagined.sample(point)

    found = run(programs=programs, say=said.append, compile_step=counted)
    (announced,) = re.findall(r"at most (\d+) programs", said[0])
    assert len(said) == 1 + len(seen)
    assert len(seen) + len(found.searched) == found.num_compiled <= int(announced) <= programs


def test_the_table_the_json_and_the_page_say_the_same(run):
    found = run()
    content = json.loads(json.dumps(scaling_report.to_json(found)))
    text, html = scaling_report.text(found), page.scaling_page(found)
    assert {row["how"] for one in content["curves"] for row in one["rows"]} == {COMPILED, MODELLED}
    for one in content["curves"]:
        for row in one["rows"]:
            parts = row["computing_seconds"] + row["idle_seconds"] + sum(row["waiting_seconds"].values())
            assert parts == pytest.approx(row["step_seconds"])
            assert row["mesh"] is not None
    weak = [line for line in text.splitlines() if line.startswith("data ")]
    assert len(weak) == 2 * len(found.sizes) + 1  # and one of Amdahl's
    assert text.count("modelled") >= sum(row["how"] == MODELLED for one in content["curves"] for row in one["rows"])
    assert "off by at most 0.00%" in text
    assert html.count("<svg") == 1
    assert "://" not in html
    assert "Amdahl" in html


def test_the_chart_has_a_line_for_each_way_against_one_base(run):
    found = run()
    strong, weak = page.scaling_panels(found)
    assert (
        [line.label for line in strong.lines]
        == [line.label for line in weak.lines]
        == ["data", "fsdp", "hybrid", "best"]
    )
    assert max(line.points[0][1] for line in strong.lines) == 1  # the fastest on one device is one device's worth
    assert [line.points[0][0] for line in strong.lines] == [1, 1, 1, 1]
    assert [size for size, _, _ in strong.ideal.points] == [1, 2, 4, 8]
    assert picture([strong, weak], page.NOTE, "png").startswith(b"\x89PNG")


def test_what_has_no_time_is_a_line_below_the_table(run):
    found = run(config=small({"data": 8}, batch_size=2 * 8, accumulation_steps=2), sizes=[2, 8])
    assert "strong scaling: the batch stays 16 examples a step" in scaling_report.text(found)
    none = run(config=small({"data": 4}, batch_size=4), sizes=[2, 8])
    assert "data on 8 devices: 4 sequences do not divide over 8 devices" in scaling_report.text(none)


def test_measured_links_take_the_place_of_the_assumed_ones(run):
    slow = Links("NVIDIA H100 80GB HBM3", (Link("data", "all-reduce", 8, 1, 0.5, 1e9),))
    found, assumed = run(assumptions=Assumptions(links=slow)), run()
    one, other = (curve(each, "data", "weak").rows[-1].spent for each in (found, assumed))
    assert one.waiting["data"] == pytest.approx(0.5 + 2 * 7 / 8 * 2048 * 4096 * 4 / 1e9)
    assert one.latency == pytest.approx(0.5)
    assert other.waiting["data"] < 0.01
    text = scaling_report.text(found)
    assert "links of all-reduce along data: as measured" in text
    assert "links of all-gather along fsdp: as assumed" in text
    assert {"axis": "data", "kind": "all-reduce", "is_measured": True} in scaling_report.to_json(found)["links"]
    assert scaling_report.to_json(assumed)["links"] == []


def test_a_cluster_without_known_speed_is_one_line():
    unknown = topology.open_cluster("cpu:8")
    with pytest.raises(UserError, match=r"--scaling: got --cluster=cpu:8, whose speed is not known"):
        scaling.scaling(CONFIG, unknown, SIZES, Assumptions())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--scaling=8"], "--scaling: got '8'"),
        (["--scaling=8,16", "--search"], "--search: got it together with --scaling"),
        (["--scaling=8,16", "--calibrate=1.5"], "--calibrate: got it together with --scaling"),
        (["--scaling=8,16", "--programs=41"], "--programs: got '41'; allowed: 1 to 40"),
        (["--scaling=8,16", "--chart=a.pdf"], "--chart: got 'a.pdf'"),
        (["--chart=a.png"], "--chart: got 'a.png' without --scaling"),
        (["--programs=3"], "--programs: got '3' without --scaling"),
    ],
)
def test_wrong_words_are_one_line_each(words, said):
    given = program.flags.arguments(["--cluster=h100:1x8", *words], program.arguments())
    found = program.problems(given)
    assert len(found) == 1
    assert found[0].startswith(said)
    assert "nearest: " in found[0]


def test_all_sizes_that_no_cluster_has_are_said_together(monkeypatch):
    monkeypatch.setattr(scaling, "open_cluster", topology.open_cluster)
    with pytest.raises(UserError) as error:
        scaling.open_clusters(cluster(), [12, 20])
    assert len(error.value.problems) == 2
    assert planner.shape_on(CONFIG, cluster())["data"] == 8
