"""A whole scaling: how many programs, where searches run, baselines, tables, JSON, chart; most steps are imagined."""

import dataclasses
import json
import re

import pytest

from meshtrain.errors import UserError
from meshtrain.hardware.links import Link, Links
from meshtrain.observe.charts import picture
from meshtrain.plan import __main__ as program
from meshtrain.plan import arguments, planner
from meshtrain.plan.cluster import clusters
from meshtrain.plan.search import estimate
from meshtrain.plan.search.candidates import Candidate
from meshtrain.plan.timing.streams import Assumptions
from meshtrain.report.scaling import command, scaling, scaling_report, strategies
from meshtrain.sharding.rules import AXES
from tests.plan.conftest import config as small
from tests.plan.test_plan_candidates import cluster_of
from tests.report import imagined

SIZES = [2, 4, 8]


def cluster(num_devices=8):
    return dataclasses.replace(cluster_of("h100", 1, num_devices), text=f"h100:1x{num_devices}")


@pytest.fixture(autouse=True)
def open_cluster(monkeypatch):
    """Clusters of simulated devices with an H100's peaks."""
    monkeypatch.setattr(scaling, "open_cluster", lambda text: cluster(int(text.rpartition("x")[2])))


CONFIG = small({"data": 8}, batch_size=128, accumulation_steps=8)


@pytest.fixture
def run(monkeypatch):
    """Scales; the search finds one data x fsdp mesh, by a function of the number of devices, or nothing for None."""

    def run(data_of=lambda size: size, config=CONFIG, sizes=SIZES, searched=None, assumptions=None, **fields):
        def found(config, cluster, *, only_mesh):
            size = len(cluster.devices)
            if searched is not None:
                searched.append(size)
            if data_of(size) is None:
                return []
            shape = dict.fromkeys(AXES, 1) | {"data": data_of(size), "fsdp": size // data_of(size)}
            change = {f"mesh.{axis}": length for axis, length in shape.items()} | {"accumulation_steps": 1}
            return [Candidate(change, shape, 0.0, 0.0)]

        monkeypatch.setattr(scaling, "candidates", found)
        given = {"say": lambda line: None, "plan_point": imagined.row, "programs": arguments.MOST_PROGRAMS} | fields
        return scaling.scaling(config, cluster(), sizes, assumptions or Assumptions(), **given)

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
    assert 0 < strong.serial_share(*strong.rows) < 1
    assert weak.serial_share(*weak.rows) is None


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

    def large(point, *given):
        return dataclasses.replace(imagined.row(point, *given), fits=point.shape["fsdp"] > 2)

    searched = []
    found = run(plan_point=large, searched=searched)
    assert searched == [4, 8]  # no search where nothing has fitted
    assert curve(found, "data", "strong").base is None
    fsdp = curve(found, "fsdp", "strong")
    assert found.sizes == (2, 4, 8)
    assert [row.fits for row in fsdp.rows] == [False, True, True]
    assert fsdp.base.point.num_devices == 4
    assert fsdp.speedup(fsdp.rows[0]) is None
    assert "too much" in scaling_report.text(found)


def test_the_search_runs_on_three_sizes_and_its_best_is_used_between(run):
    searched = []
    found = run(lambda size: min(size, 2), searched=searched)
    assert searched == [1, 4, 8]
    assert found.searched == (1, 4, 8)
    best = curve(found, "best", "strong")
    assert len(best.rows) == len(found.sizes)
    others = [curve(found, name, "strong") for name in ("data", "fsdp", "hybrid")]
    for number, row in enumerate(best.rows):
        assert row.rate >= max(other.rows[number].rate for other in others) * (1 - 1e-9)


def test_a_search_that_finds_nothing_goes_on_with_more_devices(run):
    searched = []
    found = run(lambda size: size if size > 2 else None, searched=searched)
    assert searched == [1, 2, 4, 8]
    assert found.searched == (4, 8)
    nothing = run(lambda size: None)
    assert nothing.searched == ()
    assert {one.name for one in nothing.curves} == {"data", "fsdp", "hybrid"}


@pytest.mark.parametrize("programs", [1, 3, 4, 9, 40])
def test_it_says_how_many_programs_and_compiles_no_more(run, programs):
    said, seen = [], []

    def counted(point, *given):
        assert said, "the number of programs comes first"
        seen.append(point.config)
        return imagined.row(point, *given)

    found = run(programs=programs, say=said.append, plan_point=counted)
    (announced,) = re.findall(r"at most (\d+) programs", said[0])
    assert len(said) == 1 + len(seen)
    assert len(seen) == len(set(seen)) == found.num_compiled <= int(announced) <= programs
    left_out = [row for one in found.curves for row in one.rows if row.problem == scaling.NOT_COMPILED]
    assert bool(left_out) == (programs < 40)
    assert (f"devices: {scaling.NOT_COMPILED}" in scaling_report.text(found)) == (programs < 40)


@pytest.mark.parametrize(
    ("elsewhere", "words", "programs"),
    [(None, [], arguments.MOST_WHOLE), (print, [], arguments.MOST_PROGRAMS), (print, ["--programs=3"], 3)],
)
def test_unless_told_otherwise_less_is_compiled_where_each_program_is_compiled_whole(
    monkeypatch, elsewhere, words, programs
):
    asked = {}
    monkeypatch.setattr(scaling, "scaling", lambda *_, **fields: asked.update(fields))
    monkeypatch.setattr(scaling_report, "text", str)
    monkeypatch.setattr(scaling_report, "to_json", str)
    given = program.flags.arguments(["--cluster=h100:1x8", "--scaling=8,16", *words], arguments.parser())
    program.run_scaling(CONFIG, cluster(), given, Assumptions(), elsewhere)
    assert asked["programs"] == programs
    assert asked["plan_point"].keywords == {"elsewhere": elsewhere}


def test_of_each_way_the_smallest_and_the_largest_number_of_devices_are_planned_first():
    basis = strategies.Basis(CONFIG, 8, estimate.weights_of(CONFIG), 73e9, devices_each=4)
    plain = strategies.basic_ways(basis, dict.fromkeys(AXES, 1) | {"data": 8}, 8)
    points = [strategies.point(basis, way, "strong", size) for way in plain[:2] for size in (2, 4, 8, 256)]
    assert points[3].config is None
    order = [(one.way.name, one.num_devices) for one in scaling.in_order(points)]
    assert order == [("data", 2), ("fsdp", 2), ("data", 8), ("fsdp", 8), ("data", 4), ("fsdp", 4)]


@pytest.fixture(scope="module")
def planned():
    """(point, cluster as if of H100s, the plan of the point) of a tiny step, which this machine's compiler made."""
    config = small({"data": 2}, accumulation_steps=2)
    target = dataclasses.replace(clusters.open_cluster("cpu:2"), accelerator=cluster().accelerator)
    basis = strategies.Basis(config, 2, estimate.weights_of(config), 73e9, devices_each=2)
    one = strategies.point(basis, strategies.Way("data", "data", {}, {}, 4), "strong", 2)
    return one, target, planner.plan(one.config, one.shape, target, Assumptions())


def test_a_row_has_the_numbers_of_a_plan(planned, monkeypatch):
    one, target, plan = planned
    monkeypatch.setattr(scaling.planner, "plan", lambda config, shape, *_: plan if config == one.config else None)
    row = scaling.plan_point(one, target, Assumptions())
    assert (row.point, row.problem, row.timing) == (one, "", plan.timing)
    assert (row.peak_bytes, row.fits) == (plan.memory.compiler.peak_bytes, plan.memory.fits)
    parts = row.spent.computing + row.spent.idle + sum(row.spent.waiting.values())
    assert parts == pytest.approx(row.seconds)
    assert row.spent.waiting["data"] > 0


def test_a_row_of_another_process_is_taken_and_what_ends_there_without_one_is_planned_here(planned, monkeypatch):
    one, target, plan = planned
    monkeypatch.setattr(scaling.planner, "plan", lambda *_: plan)
    row = imagined.row(one, target, Assumptions())
    assert (
        scaling.plan_point(
            one, target, Assumptions(), lambda work, *given: given == (one, target.text, Assumptions()) and row
        )
        is row
    )
    assert scaling.plan_point(one, target, Assumptions(), lambda *_: None).timing == plan.timing


def test_what_the_compiler_gives_up_or_assemble_refuses_has_a_reason_instead_of_a_time(planned, monkeypatch):
    one, target, plan = planned
    compiled = dataclasses.replace(plan.compiled, text=None, refusal="RESOURCE_EXHAUSTED: too much\nmore")
    refused = dataclasses.replace(plan, compiled=compiled, timing=None)
    monkeypatch.setattr(scaling.planner, "plan", lambda *_: refused)
    row = scaling.plan_point(one, target, Assumptions())
    assert (row.problem, row.fits, row.is_usable) == ("does not fit: RESOURCE_EXHAUSTED: too much", False, False)

    def illegal(*_):
        raise UserError("first", "second")

    monkeypatch.setattr(scaling.planner, "plan", illegal)
    assert scaling.plan_point(one, target, Assumptions()) == scaling.Row(one, problem="first")


def test_the_table_the_json_and_the_page_say_the_same(run):
    found = run()
    content = json.loads(json.dumps(scaling_report.to_json(found)))
    text, html = scaling_report.text(found), command.scaling_page(found)
    for one in content["curves"]:
        for row in one["rows"]:
            parts = row["computing_seconds"] + row["idle_seconds"] + sum(row["waiting_seconds"].values())
            assert parts == pytest.approx(row["step_seconds"])
            assert row["mesh"] is not None
    weak = [line for line in text.splitlines() if line.startswith("data ")]
    assert len(weak) == 2 * len(found.sizes) + 1  # and one of Amdahl's
    assert html.count("<svg") == 1
    assert "://" not in html
    assert "Amdahl" in html


def test_the_chart_has_a_line_for_each_way_against_one_base(run):
    found = run()
    strong, weak = command.scaling_panels(found)
    assert (
        [line.label for line in strong.lines]
        == [line.label for line in weak.lines]
        == ["data", "fsdp", "hybrid", "best"]
    )
    assert max(line.points[0][1] for line in strong.lines) == 1  # the fastest on one device is one device's worth
    assert [line.points[0][0] for line in strong.lines] == [1, 1, 1, 1]
    assert [size for size, _ in strong.ideal.points] == [1, 2, 4, 8]
    assert picture([strong, weak], command.NOTE, "png").startswith(b"\x89PNG")


def test_what_has_no_time_is_a_line_below_the_table(run):
    found = run(config=small({"data": 8}, batch_size=2 * 8, accumulation_steps=2), sizes=[2, 8])
    assert "strong scaling: the batch stays 16 examples a step" in scaling_report.text(found)
    none = run(config=small({"data": 4}, batch_size=4), sizes=[2, 8])
    assert "data on 8 devices: 4 sequences cannot be divided evenly over 8 devices" in scaling_report.text(none)


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
    unknown = clusters.open_cluster("cpu:8")
    with pytest.raises(UserError, match=r"--scaling: got --cluster=cpu:8, whose speed is not known"):
        scaling.scaling(CONFIG, unknown, SIZES, Assumptions(), programs=1, plan_point=imagined.row)


def test_all_sizes_that_no_cluster_has_are_said_together(monkeypatch):
    monkeypatch.setattr(scaling, "open_cluster", clusters.open_cluster)
    with pytest.raises(UserError) as error:
        scaling.open_clusters(cluster(), [12, 20])
    assert len(error.value.problems) == 2
    assert planner.shape_on(CONFIG, cluster())["data"] == 8
