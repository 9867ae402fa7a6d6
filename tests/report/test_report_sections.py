"""The page of runs: every part is there, runs of any task work, and it stays small with 100,000 logged steps."""

import json
import re
import time

import pytest

from meshtrain.report import sections
from meshtrain.report.runs import open_runs
from tests.report.folders import CONFIG, DEVICE, folder, metrics


@pytest.fixture
def runs(tmp_path):
    """A function (name -> arguments of `folder`) -> the runs."""

    def made(**described):
        paths = [str(folder(tmp_path / name, **what)) for name, what in described.items()]
        found, problems = open_runs(paths)
        assert problems == []
        return found

    return made


def without_plotly(page):
    """The page without Plotly's own script."""
    return re.sub(r"<script>/\*\*.*?</script>", "", page, count=1, flags=re.DOTALL)


def cells(page):
    """The rows of the tables of a page, as lists of text."""
    return [re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row) for row in re.findall(r"<tr>(.*?)</tr>", page)]


def test_a_page_has_every_part(runs):
    text = sections.run_page(runs(a={"sample": "def <f>:"}, b={"config": CONFIG | {"seed": 7}}), ["<p>a picture</p>"])
    header, first, second = cells(text)[:3]
    assert dict(zip(header, first, strict=True)) == {
        "run": "a",
        "task": "decoder",
        "mesh": "data 2 x pipeline 2 x tensor 2 (cpu)",
        "steps": "40 of 40",
        "loss": "3.0250",
        "last evaluation": "loss 3.2500",
        "best loss": "3.2500 at step 40",
        "throughput": "8,192 tokens/s",
        "goodput": "80.0%",
        "hours": "0.01",
    }
    assert second[0] == "b"
    assert ["seed", "0", "7"] in cells(text)
    assert "<pre>def &lt;f&gt;:</pre>" in text
    assert "<p>a picture</p>" in text
    assert "activations and temporaries" in text
    assert ">8 MiB<" in text, "the gradients are among the compiler's temporaries"
    assert json.dumps(CONFIG, indent=2).splitlines()[1].replace('"', "&quot;") in text


def test_it_needs_nothing_else(runs):
    text = sections.run_page(runs(a={}), [])
    ours = without_plotly(text)
    assert len(text) - len(ours) > 4_000_000, "Plotly's own script is in it"
    assert "://" not in ours
    assert "src=" not in ours
    assert "default-src 'none'" in ours


def test_a_run_of_images_without_anything_of_text(runs):
    rows = [{"step": step, "loss": 2.0, "accuracy": 0.5, "images": 32 * step, "images_per_second": 9.0}
            for step in (1, 2)] + [{"step": 2, "eval_accuracy": 0.75}]  # fmt: skip
    config = {"task": "mine.images:task", "model": {"width": 8}, "mesh": {"data": -1}}
    text = sections.run_page(runs(a={"rows": rows, "config": config, "device": None}), [])
    header, first = cells(text)[:2]
    row = dict(zip(header, first, strict=True))
    assert (row["task"], row["mesh"], row["steps"], row["best loss"]) == ("mine.images:task", "", "2", "")
    assert row["last evaluation"] == "accuracy 0.7500"
    assert '"text":"accuracy"' in text
    assert '"text":"evaluation accuracy"' in text
    assert '"label":"images"' in text
    for part in ("Memory", "Samples"):
        assert f"<h2>{part}" not in text


def test_runs_that_hold_the_same_share_one_chart(runs):
    text = sections.run_page(
        runs(a={}, b={}, c={"device": DEVICE | {"moments_bytes": 5, "on_host_bytes": 1 << 20}}), []
    )
    assert "<h3>a, b</h3>" in text
    assert "<h3>c</h3>" in text
    assert without_plotly(text).count("<svg") == 2
    assert "1 MiB of moments in host memory" in text


def test_configurations_that_are_the_same_say_so(runs):
    assert "The configurations are the same." in sections.run_page(runs(a={}, b={}), [])


def test_fields_of_one_task_are_no_difference_between_tasks():
    decoder = {"task": "decoder", "seed": 0, "model": {"num_layers": 8, "num_kv_heads": 8}}
    seq2seq = {"task": "seq2seq", "seed": 0, "model": {"num_layers": 2, "source_length": 32}}
    convnet = {"task": "convnet", "seed": 1, "model": {"channels": 3}}
    assert sections.differences([decoder, seq2seq, convnet]) == [
        ["task", "decoder", "seq2seq", "convnet"],
        ["seed", "0", "0", "1"],
        ["model.num_layers", "8", "2", "-"],
    ]
    older = {"task": "decoder", "seed": 0, "model": {"num_layers": 8}}
    assert sections.differences([decoder, older]) == [["model.num_kv_heads", "8", "-"]]


def test_the_page_has_no_toolbar(runs):
    """Plotly's holds a button that uploads the chart."""
    assert '"displayModeBar": false' in without_plotly(sections.run_page(runs(a={}), []))


@pytest.mark.parametrize(
    ("device", "mesh", "wanted"),
    [
        (DEVICE, {"data": -1}, DEVICE["mesh"]),
        ({}, {"data": 4, "fsdp": 2}, {"data": 4, "fsdp": 2}),
        ({}, {"data": -1}, None),
        ({"mesh": {}}, {"data": "2"}, None),
        ({"mesh": [2]}, 8, None),
        ({}, {"data": True}, None),
    ],
)
def test_the_mesh_is_that_of_the_devices_and_else_that_of_the_configuration(runs, device, mesh, wanted):
    [run] = runs(a={"device": device, "config": CONFIG | {"mesh": mesh}})
    assert sections.mesh_shape(run) == wanted


def test_a_long_run_makes_a_page_of_at_most_8_megabytes(runs):
    rows = metrics(100_000, every=1, noise=0.2)
    rows[77_776]["loss"] = 123.4567
    rows[33_333]["grad_norm"] = 1e-9
    found = runs(long={"rows": rows})
    start = time.process_time()
    text = sections.run_page(found, [])
    assert 5_500_000 < len(text.encode()) <= 8_000_000, "as many points as there may be"
    assert "123.4567" in text, "a spike of one step"
    assert "1e-09" in text, "and a dip"
    assert time.process_time() - start < 20
