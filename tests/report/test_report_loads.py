"""The load of each expert over steps: a chart of its own on the page, and no panel for each."""

import math
import re

import numpy as np
import pytest
from matplotlib.figure import Figure

from meshtrain.observe.page import STYLE
from meshtrain.report import loads, sections
from meshtrain.report.curves import metrics
from meshtrain.report.runs import open_runs
from tests.report.folders import folder

NUM_EXPERTS = 12  # as text, 10 would come before 2


@pytest.fixture
def runs(tmp_path):
    """A run of experts, of which the last one is missing in a row, and a run without."""
    rows = [
        {"step": step, "loss": 2.0}
        | {f"expert_load_each/{number}": number * step / 100 for number in range(NUM_EXPERTS)}
        for step in (10, 20, 50)
    ]
    rows[1]["expert_load_each/11"] = None
    return open_runs([str(folder(tmp_path / "experts", rows)), str(folder(tmp_path / "dense"))])[0]


def test_a_row_for_each_expert_in_their_order(runs):
    [found] = loads.of_experts(runs[0].log)
    assert found.steps.tolist() == [10, 20, 50]
    expected = np.outer(np.arange(NUM_EXPERTS), [10, 20, 50]) / 100
    expected[11, 1] = math.nan
    np.testing.assert_array_equal(found.values, expected)
    assert loads.of_experts(runs[1].log) == []


def test_the_page_has_one_chart_of_them_and_no_panels(runs):
    text = sections.run_page(runs, [])
    assert text.count('aria-label="load of each expert"') == 1
    assert ">expert<" in text
    assert "expert_load_each" not in text
    assert "expert load each" not in text
    assert "Load of each expert" not in sections.run_page(runs[1:], [])


def test_norms_have_a_chart_each_with_layers_by_name(tmp_path, monkeypatch):
    rows = [
        {"step": step, "loss": 2.0, "grad_norm_of/head": 1.0, "update_norm_of/head": 0.0}
        | {f"grad_norm_of/layers/{layer}": 10.0**layer * step for layer in range(11)}
        for step in (1, 2)
    ]
    [run] = open_runs([str(folder(tmp_path / "norms", rows))])[0]
    [found] = loads.of_layers(run.log)
    assert found.names == ["head", *(f"layers/{layer}" for layer in range(11))]
    assert found.values[3].tolist() == [100.0, 200.0]
    text = sections.run_page([run], [])
    assert text.count('aria-label="grad norm of each layer"') == 1
    assert ">layers/10<" in text
    assert not [name for name in metrics([run.log]) if "_of/" in name]
    drawn = []
    monkeypatch.setattr(loads, "svg", lambda figure, what: drawn.append(figure) or what)
    loads.chart(found)
    assert drawn[0].axes[0].collections[0].norm.vmax == 2e10
    loads.chart(found._replace(values=np.ones((12, 2))))


def test_the_chart_is_as_wide_as_the_page():
    drawn = loads.chart(loads.Loads(np.array([10]), np.ones((2, 1))))
    pixels = float(re.search(r' width="([\d.]+)pt"', drawn)[1]) * 96 / 72
    assert 0.95 <= pixels / int(re.search(r"max-width:(\d+)px", STYLE)[1]) <= 1


def test_a_column_reaches_to_its_step_and_long_runs_have_few(monkeypatch):
    drawn = []
    monkeypatch.setattr(loads, "svg", lambda figure, what: drawn.append(figure) or what)
    steps = np.array([5, 10, 30])
    loads.chart(loads.Loads(steps, np.ones((2, 3))))
    loads.chart(loads.Loads(steps[:1], np.ones((2, 1))))
    loads.chart(loads.Loads(np.arange(10_000), np.full((2, 10_000), 3.0)))
    loads.chart(loads.Loads(np.array([1, 10]), np.ones((2, 2))))
    meshes = [figure.axes[0].collections[0] for figure in drawn]
    edges = [mesh.get_coordinates()[0, :, 0].tolist() for mesh in meshes]
    assert edges[:2] == [[0, 5, 10, 30], [4, 5]]
    assert (len(edges[2]), edges[2][-1]) == (401, 9999)
    assert edges[3] == [0, 1, 10], "no step comes before the first one"
    assert [mesh.get_clim() for mesh in meshes[1:]] == [(0, 2), (0, 3), (0, 2)]
    assert isinstance(drawn[0], Figure)
    assert all(mesh.get_rasterized() for mesh in meshes)
