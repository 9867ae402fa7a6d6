"""Plans for simulated CPUs: a plan's numbers against those of a real run, and the program from its command line."""

import dataclasses
import json
import re
from types import SimpleNamespace

import jax
import pytest

from meshtrain.config import smaller
from meshtrain.config.schema import LocalStepsOptions
from meshtrain.errors import UserError
from meshtrain.hardware.links import Link, Links, to_json
from meshtrain.models.lora import LoraOptions
from meshtrain.observe import charts
from meshtrain.plan import __main__ as program
from meshtrain.plan import findings, text_report
from meshtrain.plan.cost.memory import Memory
from meshtrain.plan.findings import Finding
from meshtrain.plan.hlo import collectives
from meshtrain.plan.search import changes
from meshtrain.plan.timing import streams
from meshtrain.plan.timing.streams import Timing
from meshtrain.report import plan_pages
from meshtrain.sharding.param_sharding import ZeroOptions
from meshtrain.sharding.rules import AXES
from meshtrain.step.device_memory import StateBytes, Statistics
from meshtrain.step.precision import PrecisionOptions
from tests.plan.conftest import H100
from tests.quick import with_places

MESHES = [
    {"data": 8},
    pytest.param({"pipeline": 2, "data": 4}, marks=pytest.mark.slow),
    {"data": 2, "pipeline": 2, "tensor": 2},
    {"data": 2, "fsdp": 2, "tensor": 2},
]


def held(array):
    """Bytes of an array on each device that holds a piece of it."""
    pieces = {}
    for shard in array.addressable_shards:
        pieces[shard.device] = pieces.setdefault(shard.device, 0) + shard.data.nbytes
    return pieces


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: " ".join(f"{axis} {size}" for axis, size in mesh.items()))
def test_arguments_are_the_bytes_that_a_run_holds(plan, small, mesh):
    made = plan("cpu:8", small(mesh))
    assembly = made.compiled.assembly
    state = assembly.steps.init(jax.random.key_data(jax.random.key(0)))
    batch = {
        name: jax.device_put(jax.numpy.zeros(leaf.shape, leaf.dtype), leaf.sharding)
        for name, leaf in assembly.batch.items()
        if name not in made.memory.unread
    }
    total = dict.fromkeys(jax.devices(), 0)
    for array in jax.tree.leaves((state, batch)):
        for device, size in held(array).items():
            total[device] += size
    assert set(total.values()) == {made.memory.arguments_expected_bytes}
    assert made.memory.compiler.arguments_bytes == made.memory.arguments_expected_bytes


def test_groups_send_scalars_in_a_step_and_weights_in_a_program_of_their_own(plan, small):
    """On data 2 x fsdp 2: four groups, two on a device, each split over fsdp."""
    options = LocalStepsOptions(period=10, groups=4)
    made = plan("cpu:4", small({"data": 2, "fsdp": 2}, local_steps=options))
    across = collectives.sent_along([row for row in made.traffic if "data" in row.axis.split("+")], "data")
    assert 0 < across <= 1024
    assert made.minimum["data"] == 0.0
    [outer] = made.others
    assert collectives.sent_along(outer.traffic, "data") == outer.minimum_bytes > 10_000
    shown = text_report.text(made)
    assert "every 10 steps" in shown
    [found] = text_report.to_json(made)["other_programs"]
    assert found["wire_bytes_minimum"] == outer.minimum_bytes
    assert (found["name"], found["every"]) == ("outer step", 10)


def test_data_parallel_is_never_free(plan, small):
    made = plan("cpu:8", small({"data": 8}))
    assert text_report.sent_along(made, "data") >= made.minimum["data"] > 0


def test_level_three_over_data_is_planned_like_fsdp(plan, small):
    made = plan("cpu:8", small({"data": 8}, zero=ZeroOptions(3)))
    size = 4 * made.compiled.assembly.task.num_parameters
    assert (made.memory.state.parameters, made.memory.state.gradients) == (size // 8, size // 8)
    assert made.memory.activations_bytes + size // 8 == made.memory.compiler.temporary_bytes
    assert made.memory.compiler.arguments_bytes == made.memory.arguments_expected_bytes
    other = 4 * (2 * 256 * 64 + 64)  # table, head and last norm, which are gathered once
    assert made.minimum == {"data": 7 / 8 * (3 * size - other)}
    # The CPU's compiler all-reduces gradients where others reduce-scatter, which is twice the bytes: four for three.
    assert 1 <= text_report.sent_along(made, "data") / made.minimum["data"] < 1.5


def test_sources_name_the_model_rather_than_what_adds_its_constraints(plan, small):
    with with_places():  # another seed: no other test has traced this configuration before
        made = plan("cpu:8", small({"data": 2, "fsdp": 2, "tensor": 2}, seed=1))
    sources = {source.partition(":")[0] for row in made.traffic for source in row.sources}
    assert not sources & {"meshtrain/sharding/placement.py", "meshtrain/models/fp8.py"}
    assert any(source.startswith("meshtrain/models/") for source in sources)


def on_an_h100(made, policy):
    """The plan as if it were of an H100, where the step takes a second."""
    config = dataclasses.replace(made.compiled.assembly.config, precision=PrecisionOptions(policy))
    compiled = dataclasses.replace(made.compiled, assembly=dataclasses.replace(made.compiled.assembly, config=config))
    return dataclasses.replace(
        made,
        compiled=compiled,
        cluster=dataclasses.replace(made.cluster, accelerator=H100),
        timing=Timing(1.0, 0.5, 2.0, 1.0, 0.0, 1.0),
        model_flops=(0.5e12, 1e12),
    )


@pytest.mark.parametrize(("policy", "peak"), [("bfloat16", 989.4e12), ("float32", 494.7e12)])
def test_utilization_is_of_the_peak_of_the_compute_dtype(plan, small, policy, peak):
    made = on_an_h100(plan("cpu:8", small({"data": 8})), policy)
    assert made.mfu == pytest.approx((1e12 / peak / 2, 1e12 / peak, 1e12 / peak / 0.5))


def test_each_interval_has_its_middle_beside_it(plan, small):
    made = dataclasses.replace(on_an_h100(plan("cpu:8", small({"data": 8})), "bfloat16"), model_flops=(1e14, 2e14))
    for line in (
        "step 0.5 to 2 s, middle 1 s modelled",
        "tokens/s 256 to 1,024, middle 512 modelled",
        "MFU 10% to 40%, middle 20%, counting full attention modelled",
    ):
        assert line in " ".join(text_report.text(made).split())
    content = text_report.to_json(made)["modelled"]
    assert [content[name] for name in ("step_seconds", "mfu")] == [1.0, made.mfu[1]]


def test_axes_of_size_one_are_left_out(plan, small):
    made = plan("cpu:8", small({"data": 4, "tensor": 2}))
    assert set(made.minimum) == {"data", "tensor"}
    named = {axis for row in made.traffic for axis in row.axis.split("+")}
    assert named == {"data", "tensor"}


def test_idle_rows_are_reported_apart(plan, small):
    made = plan("cpu:8", small({"data": 2, "pipeline": 2, "tensor": 2}))
    assert list(made.idle_bytes) == ["tensor"]  # data reduces once, and the executor's formula has the pipeline's rows
    sent, idle, least = text_report.sent_along(made, "tensor"), made.idle_bytes["tensor"], made.minimum["tensor"]
    assert 0 < idle < sent / 3
    shown = text_report.text(made).splitlines()
    assert f"sent in working clock ticks / minimum: tensor {(sent - idle) / least:.3f}" in shown
    assert f"idle clock ticks send {idle / sent:.1%} of tensor's bytes" in shown
    assert text_report.to_json(made)["wire_bytes_idle_rows"] == made.idle_bytes
    assert "idle clock ticks send" not in text_report.text(plan("cpu:8", small({"data": 8})))


def test_what_is_sent_is_compared_with_idle_rows_and_the_executors_formula(plan, small, monkeypatch):
    made, bounds = plan("cpu:8", small({"data": 2, "pipeline": 2, "tensor": 2})), {}
    monkeypatch.setattr(findings, "_traffic", lambda axis, bound, *others: [bounds.update({axis: bound})])
    findings.findings(made)
    assert bounds["data"] == made.minimum["data"]
    assert bounds["tensor"] == made.minimum["tensor"] + made.idle_bytes["tensor"]
    assert bounds["pipeline"] == made.executor_bytes > made.minimum["pipeline"]


def test_a_mesh_that_does_not_fit_the_cluster_is_one_line(small):
    with pytest.raises(UserError, match="mesh: got"):
        program.planner.shape_on(small({"data": 16}), program.clusters.open_cluster("cpu:8"))


def keys(content, prefix=""):
    found = set()
    for key, value in content.items():
        found.add(prefix + key)
        if isinstance(value, dict):
            found |= keys(value, f"{prefix}{key}.")
    return found


def test_the_json_has_what_programs_rely_on(plan, small):
    content = json.loads(json.dumps(text_report.to_json(plan("cpu:8", small({"data": 2, "pipeline": 2, "tensor": 2})))))
    memory = ("arguments", "temporary", "peak", "capacity", "parameters", "gradients", "optimizer")
    wanted = {f"memory.{name}_bytes" for name in memory}
    wanted |= {"num_devices", "fits", "flops.compiled", "flops.model_causal", "flops.model_full"}
    wanted |= {"modelled.step_seconds_low", "modelled.step_seconds", "modelled.step_seconds_high"}
    wanted |= {f"wire_bytes_minimum.{axis}" for axis in ("data", "pipeline", "tensor")}
    assert wanted <= keys(content)
    row = {"axis", "kind", "count", "logical_bytes", "wire_bytes", "asynchronous_fraction", "overlapped_fraction"}
    assert all(row <= entry.keys() for entry in content["collectives"])
    assert all(entry["seconds"] is entry["hidden_seconds"] is None for entry in content["collectives"])
    assert (content["num_devices"], content["fits"]) == (8, None)


def test_the_program_prints_and_writes(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(program.jax.config, "update", lambda *_: None)  # the cache stays on for the other tests
    overrides = ["--config.mesh.data=2", "--config.batch_size=4", "--config.model.embed_dim=64",
                 "--config.sequence_length=16"]  # fmt: skip
    files = {name: tmp_path / f"plan.{name}" for name in ("json", "html")}
    given = [f"--{name}={path}" for name, path in files.items()]
    assert program.main(["--cluster=cpu:2", *overrides, *given]) == 0
    printed = capsys.readouterr().out
    assert "plan         cpu:2: data 2: 2 x cpu" in printed
    assert "it is not known whether it fits" in printed
    assert json.loads(files["json"].read_text())["num_devices"] == 2
    assert files["html"].read_text().startswith("<!doctype html>")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.html", "plan.json"]


def test_links_of_another_platform_are_refused_before_anything_compiles(tmp_path, monkeypatch):
    monkeypatch.setattr(program.jax.config, "update", lambda *_: None)
    device = SimpleNamespace(device_kind="NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(program.clusters, "open_cluster", lambda _: SimpleNamespace(devices=[device]))
    file = tmp_path / "links.json"
    file.write_text(json.dumps(to_json(Links("cpu", (Link("data", "all-reduce", 8, 1, 1e-6, 1e9),)))))
    with pytest.raises(UserError, match="measured on 'cpu', for a plan on 'NVIDIA H100 80GB HBM3'"):
        program.main(["--cluster=h100:8", f"--links={file}"])


def test_the_peak_holds_the_temporaries(plan, small):
    of_compiler = plan("cpu:8", small({"data": 2, "pipeline": 2, "tensor": 2})).memory.compiler
    assert of_compiler.peak_bytes >= of_compiler.temporary_bytes + of_compiler.arguments_bytes


def test_a_page_needs_nothing_else(plan, small):
    made = plan("cpu:8", small({"data": 2, "pipeline": 2, "tensor": 2}))
    text = plan_pages.plan_page(made)
    assert "://" not in text
    assert "src=" not in text
    assert "url(" not in text.replace("url(#", "")  # what matplotlib draws refers to itself
    assert text.count("<svg") == text.count("</svg>") >= 3


def test_memory_has_the_colours_of_the_page_of_runs(plan, small):
    text = plan_pages.plan_page(plan("cpu:8", small({"data": 2, "pipeline": 2, "tensor": 2})))
    drawn = re.findall(r'clip-path[^>]* style="fill: (#\w+)"/>', text.partition("</svg>")[0])
    held = ("parameters", "gradients", "optimizer", "batch", charts.ACTIVATIONS, charts.PEAK)
    of_runs = charts.bars([(label, 1.0) for label in held], None)
    assert drawn == re.findall(r'clip-path[^>]* style="fill: (#\w+)"/>', of_runs)
    assert len(set(drawn)) == len(held)


def test_a_page_escapes_what_it_is_given(plan, small, monkeypatch):
    made = plan("cpu:8", small({"data": 2, "pipeline": 2, "tensor": 2}))
    found = Finding("<b>is</b> & stays text", "see train_step.<locals>.step")
    monkeypatch.setattr(text_report, "findings", lambda _: [found])
    text = plan_pages.plan_page(made)
    assert "&lt;b&gt;is&lt;/b&gt; &amp; stays text; see train_step.&lt;locals&gt;.step" in text
    assert "<b>is</b>" not in text
    assert "<locals>" not in text


@pytest.mark.parametrize(("given", "expected"), [("", None), ("1.5", 1.5), ("2e-1", 0.2)])
def test_seconds_to_calibrate_with(given, expected):
    assert streams.measured_seconds(given) == expected


def test_a_log_is_calibrated_with_by_its_median(tmp_path):
    log = tmp_path / "metrics.jsonl"
    log.write_text('{"step": 1, "loss": 3}\n' + "".join(f'{{"step": {i}, "step_seconds": {i}}}\n' for i in (2, 9, 3)))
    assert streams.measured_seconds(str(log)) == 3


@pytest.mark.parametrize("content", ["", "not json\n", '{"loss": 3}\n', '{"step_seconds": "x"}\n'])
def test_a_log_without_step_times_is_one_line(tmp_path, content):
    log = tmp_path / "metrics.jsonl"
    log.write_text(content)
    with pytest.raises(UserError, match=r"--calibrate: .*allowed: metrics\.jsonl"):
        streams.measured_seconds(str(log))


GIB = 1 << 30
GIVEN_UP = Memory(StateBytes(0, 0, 0, 0), 0, None, 0, None, 80 * GIB, 73 * GIB, 0, (), (), fits=False)


def test_changes_are_words_to_copy(small):
    change = {"layout.sequence_parallel": True, "mesh.fsdp": 4, "remat.policy": "full"}
    words = "--config.layout.sequence_parallel=true --config.mesh.fsdp=4 --config.remat.policy=full"
    assert smaller.arguments(change) == words
    changed = smaller.with_change(small(), change)
    assert (changed.layout.sequence_parallel, changed.mesh.fsdp, changed.remat.policy) == (True, 4, "full")


def test_changes_that_keep_the_mesh_come_first_and_then_together(small):
    shape = dict.fromkeys(AXES, 1) | {"data": 2, "tensor": 2}
    tried = list(changes.changes_to_try(small({"data": 2, "tensor": 2}), shape, GIVEN_UP))
    free = [{"layout.sequence_parallel": True}, {"zero.level": 1}, {"accumulation_steps": 2}, {"remat.policy": "full"}]
    assert tried[:4] == free
    assert tried[4:8] == [
        {"zero.level": 3},
        {"mesh.data": 1, "mesh.fsdp": 2},
        {"mesh.data": 1, "mesh.tensor": 4},
        {"mesh.data": 1, "mesh.pipeline": 2},
    ]
    assert tried[8:] == [{key: value for change in tried[:5] for key, value in change.items()}]


@pytest.mark.parametrize(
    ("capacity", "temporary", "times"), [(73, 50, 2), (73, 3338, 128), (73, 9000, 256), (30, 50, 256), (None, 50, 2)]
)
def test_microbatches_are_as_many_as_the_temporaries_need(capacity, temporary, times, small):
    """With 33 GiB of arguments, most of which are not alive at the peak, and 256 sequences on each device."""
    stats = Statistics(33 * GIB, temporary * GIB, 0, 0, (2 + temporary) * GIB, 0)
    most = capacity and capacity * GIB
    held = Memory(StateBytes(33 * GIB, 0, 0, 0), 0, stats, 0, 0, None, most, temporary * GIB // 10, (), (), fits=False)
    shape = dict.fromkeys(AXES, 1) | {"fsdp": 8}
    config = small(shape, batch_size=2048, lora=LoraOptions(rank=4))
    found = list(changes.changes_to_try(config, shape, held))
    assert {"accumulation_steps": times} in found
    assert {"accumulation_steps": times, "precision.frozen_dtype": "bfloat16"}.items() <= found[-1].items()
    assert ({"precision.frozen_dtype": "bfloat16"} in found) == ((capacity, temporary) in [(None, 50), (73, 50)])


def test_levels_above_the_one_in_use_are_tried(small):
    shape = dict.fromkeys(AXES, 1) | {"data": 2, "fsdp": 2}
    tried = list(changes.changes_to_try(small(shape, zero=ZeroOptions(1), accumulation_steps=2), shape, GIVEN_UP))
    assert [change["zero.level"] for change in tried if list(change) == ["zero.level"]] == [2, 3]
    assert {"mesh.fsdp": 1, "mesh.tensor": 2} in tried
    assert not any(
        "zero.level" in change for change in changes.changes_to_try(small(shape, zero=ZeroOptions(3)), shape, GIVEN_UP)
    )
