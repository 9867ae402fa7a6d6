"""Plans by the compiler of GPUs that are not there, against arithmetic: `scripts/test --plan` runs these.

L: weights of the layers, E: of the embedding table, as many as of the head.
"""

import dataclasses
import functools
import importlib
import json
import pathlib
import runpy
import subprocess
import sys

import jax
import pytest

from meshtrain.config import smaller
from meshtrain.config.resolve import resolve
from meshtrain.hardware import compiler_options
from meshtrain.hardware.links import Link, Links
from meshtrain.lab.compression import CompressionOptions
from meshtrain.models.decoder_options import MoeOptions
from meshtrain.models.remat import RematOptions
from meshtrain.pipeline.schedules import PipelineOptions
from meshtrain.plan import planner, text_report
from meshtrain.plan.cluster import attention_tracing, clusters
from meshtrain.plan.cluster import compile as compiling
from meshtrain.plan.findings import findings
from meshtrain.plan.hlo import parse
from meshtrain.plan.hlo.collectives import collectives, traffic
from meshtrain.plan.search import changes
from meshtrain.plan.timing.streams import Assumptions, timing
from meshtrain.sharding.mesh import MeshOptions
from meshtrain.sharding.param_sharding import ZeroOptions
from meshtrain.sharding.reduction import ReductionOptions
from meshtrain.sharding.rules import LayoutOptions
from meshtrain.step.precision import PrecisionOptions
from tests.plan.conftest import config as small
from tests.plan.conftest import planned
from tests.plan.counted import gathered_twice

pytestmark = pytest.mark.gpu_compiler

ROOT = pathlib.Path(__file__).parents[2]


@functools.cache
def llama():
    return resolve(runpy.run_path(str(ROOT / "configs" / "llama3_8b.py"))["get_config"](), reads_data=False)


def llama_on(sequence_length=8192, batch_size=8, **changed):
    """Returns Llama 3 8B on eight devices, one microbatch of one sequence a device where the batch is split."""
    mesh = MeshOptions(**changed.pop("mesh"))
    return dataclasses.replace(
        llama(), mesh=mesh, batch_size=batch_size, accumulation_steps=1, sequence_length=sequence_length, **changed
    )


FSDP = llama_on(mesh={"fsdp": 8})
TENSOR = llama_on(mesh={"tensor": 8}, batch_size=1)
RECOMPUTED_NOT = dataclasses.replace(TENSOR, remat=RematOptions("none"))
DATA = dataclasses.replace(
    llama_on(mesh={"data": 8}, sequence_length=512), model=dataclasses.replace(llama().model, num_layers=4)
)
PIPELINE = llama_on(
    mesh={"pipeline": 8}, sequence_length=2048, batch_size=16, pipeline=PipelineOptions("1f1b", num_microbatches=16)
)
INTERLEAVED = dataclasses.replace(PIPELINE, pipeline=PipelineOptions("interleaved_1f1b", 16, 2))
NAMED = {"fsdp": FSDP, "tensor": TENSOR, "data": DATA, "1f1b": PIPELINE, "interleaved": INTERLEAVED}


def sent(plan, axis, kind=None):
    return sum(row.wire_bytes for row in plan.traffic if row.axis == axis and kind in (None, row.kind))


def weights(plan):
    """Returns (L without norms, E)."""
    params = plan.compiled.assembly.state.params
    layers = {**params["layers"]["attention"], **params["layers"]["mlp"]}
    return sum(leaf.size for leaf in layers.values()), params["embedding"]["table"].size


def test_fsdp_sends_little_more_than_it_has_to():
    plan = planned("h100:1x8", FSDP)
    layers, table = weights(plan)
    assert plan.minimum["fsdp"] == pytest.approx((3 * layers + 2 * 2 * table) * 2 * 7 / 8, rel=1e-4)
    assert sent(plan, "fsdp") <= 1.05 * plan.minimum["fsdp"]
    # Activations stay where they are: not even the attention heads change places.
    assert not [row for row in plan.traffic if row.kind == "all-to-all"]


def test_fsdp_gathers_while_it_multiplies():
    plan = planned("h100:1x8", FSDP)
    layers, table = weights(plan)
    # The first product of an iteration (queries, keys and values), the look-up and the head wait for their weights.
    # With LARGE_GPU_OPTIONS, XLA gathers for the next iteration, but hides only 43 %, and the step takes 4 % longer.
    attention = plan.compiled.assembly.state.params["layers"]["attention"]
    first = sum(attention[name].size for name in ("query", "key", "value"))
    gathers = [row for row in plan.traffic if row.kind == "all-gather"]
    assert share_hidden(gathers) == pytest.approx(2 * (layers - first) / (2 * layers + 2 * table), rel=0.01)


def test_fsdp_gathers_what_theory_says():
    plan = planned("h100:1x8", FSDP)
    layers, table = weights(plan)
    # Layers forward and backward, table and head once; layers and the head scattered: all in bfloat16.
    gathers, scatters = 2 * (2 * layers + 2 * table), 2 * (layers + table)
    assert sent(plan, "fsdp", "all-gather") == pytest.approx(7 / 8 * gathers, rel=0.01)
    assert sent(plan, "fsdp", "reduce-scatter") >= 0.99 * 7 / 8 * scatters


@pytest.mark.parametrize(("config", "reductions"), [(TENSOR, 5), (RECOMPUTED_NOT, 4)], ids=["full", "none"])
def test_tensor_reduces_four_times_a_layer_and_five_where_it_recomputes(config, reductions):
    plan = planned("h100:1x8", config)
    one = 2 * 7 / 8 * 8192 * 4096 * 2
    assert (sent(plan, "tensor", "all-reduce") / one - 2) / 32 == pytest.approx(reductions, rel=0.02)


def test_data_parallel_sends_its_gradients_once():
    plan = planned("h100:1x8", DATA)
    assert sent(plan, "data") == pytest.approx(plan.minimum["data"], rel=0.001)
    assert plan.minimum["data"] > 0


def test_compressed_gradients_send_what_the_formula_says():
    model = dataclasses.replace(small().model, embed_dim=256, mlp_dim=1024, vocab_size=1024)
    plan = planned("h100:2x4", small({"data": 8}, model=model, reduction=CompressionOptions("int8")))
    parameters = sum(leaf.size for leaf in jax.tree.leaves(plan.compiled.assembly.state.params))
    assert plan.minimum["data"] <= sent(plan, "data") < 1.80 * parameters
    assert plan.memory.state.extra == plan.memory.state.parameters
    assert plan.memory.compiler.arguments_bytes == pytest.approx(plan.memory.arguments_expected_bytes, rel=1e-3)


@pytest.mark.parametrize("config", [PIPELINE, INTERLEAVED], ids=["1f1b", "interleaved"])
def test_the_pipeline_sends_what_the_executors_formula_says(config):
    plan = planned("h100:1x8", config)
    assert sent(plan, "pipeline") == pytest.approx(plan.executor_bytes, rel=0.01)


@pytest.mark.parametrize("name", NAMED)
def test_arguments_are_what_shardings_say(name):
    memory = planned("h100:1x8", NAMED[name]).memory
    assert memory.compiler.arguments_bytes == pytest.approx(memory.arguments_expected_bytes, rel=0.001)


@pytest.mark.parametrize(
    ("mesh", "level", "ratio"),
    [
        ({"data": 8}, 1, 1.0),
        ({"data": 8}, 2, 1.0),
        ({"data": 8}, 3, 1.001),  # the head too is gathered in the compute dtype: in float32 it would be 1.054
        # Data and fsdp split two dims of a weight: its gradient is all-reduced where one axis reduce-scatters it.
        ({"data": 2, "fsdp": 4}, 3, 1.394),
    ],
    ids=str,
)
def test_each_zero_level_sends_the_least(mesh, level, ratio):
    plan = planned("h100:1x8", small(mesh, zero=ZeroOptions(level), precision=PrecisionOptions("bfloat16")))
    ((axis, least),) = [(axis, least) for axis, least in plan.minimum.items() if "data" in axis]
    assert text_report.sent_along(plan, axis) / least == pytest.approx(ratio, abs=0.003)
    assert plan.memory.compiler.arguments_bytes == pytest.approx(plan.memory.arguments_expected_bytes, rel=0.001)


@pytest.mark.parametrize("name", ["fsdp", "tensor", "data"])
def test_flops_are_those_traced(name):
    plan = planned("h100:1x8", NAMED[name])
    assert plan.added_share == pytest.approx(0, abs=0.001)


def test_attention_is_the_kernel_that_the_target_would_take():
    plan = planned("h100:1x8", FSDP)
    assert plan.compiled.attention == "cudnn"
    # Two products forward, the same again for the backward pass, and its five.
    assert plan.work.attention_full == pytest.approx((2 + 2 + 5) * 2 * 32 * 8192 * 8192 * 32 * 128, rel=0.001)
    assert any("cuDNN" in finding.what for finding in findings(plan))


def test_on_an_a100_the_options_hide_what_nothing_hides_without(monkeypatch):
    hidden = share_hidden(planned("a100:1x8", FSDP).traffic)
    assembling = importlib.import_module("meshtrain.assembly.compiling")  # the module, whatever the package calls so
    monkeypatch.setattr(assembling, "options_of", lambda *given, **named: ())
    target = clusters.open_cluster("a100:1x8")
    bare = compiling.compile_step(FSDP, planner.shape_on(FSDP, target), target)
    rows = traffic(collectives(parse.read(bare.text), dict(bare.assembly.mesh.shape)))
    assert share_hidden(rows) < 0.1
    assert hidden > 0.3


def share_hidden(rows):
    return sum(row.wire_bytes * row.overlapped_fraction for row in rows) / sum(row.wire_bytes for row in rows)


def test_all_but_one_layer_of_the_gradients_are_hidden_by_the_backward_loop():
    config = resolve(runpy.run_path(str(ROOT / "configs" / "gpt2_124m.py"))["get_config"](), reads_data=False)
    plan = planned("h100:2x4", dataclasses.replace(config, remat=RematOptions()))
    assert config.accumulation_steps == 4
    assert plan.layer_gradients.overlapped_fraction == pytest.approx(11 / 12)
    assert share_hidden(plan.traffic) > 0.58
    assert sum(row.wire_bytes for row in plan.traffic) == pytest.approx(plan.minimum["data"], rel=1e-3)
    assert f"{plan.layer_gradients.overlapped_fraction:.0%} of the bytes overlap products" in text_report.text(plan)
    assert text_report.to_json(plan)["layer_gradients"]["wire_bytes"] == plan.layer_gradients.wire_bytes


def test_every_option_of_the_table_has_a_reason_and_is_shown():
    plan = planned("h100:1x8", FSDP)
    options, shown = compiler_options.options_of("NVIDIA H100 80GB HBM3"), text_report.text(plan)
    assert plan.compiled.options == {option.name: option.value for option in options}
    assert all(option.name in shown and option.reason in shown for option in options)


def test_it_fits_or_not():
    assert planned("h100:1x8", FSDP).memory.fits is True
    large = dataclasses.replace(FSDP, mesh=MeshOptions(data=8))
    plan = planned("h100:1x8", large)
    assert plan.memory.fits is False
    assert plan.memory.margin_bytes < 0
    assert text_report.to_json(plan)["fits"] is False


def test_what_does_not_fit_is_made_to_fit_by_changes_that_were_compiled():
    plan = planned("h100:1x8", dataclasses.replace(FSDP, mesh=MeshOptions(data=8)))
    found = changes.cheapest(plan)
    assert 1 <= len(found) <= 3
    assert all(spare > 0 for _, spare in found)
    assert "--config." in smaller.arguments(found[0][0])


def test_measured_seconds_fit_the_one_factor():
    plan = planned("h100:1x8", FSDP)
    assert plan.timing.low_seconds < plan.timing.step_seconds < plan.timing.high_seconds
    assert 0.3 < plan.mfu[0] < plan.mfu[1] < 0.9
    measured = 1.3 * plan.timing.step_seconds
    fitted = planned("h100:1x8", FSDP, measured).timing
    assert fitted.step_seconds == pytest.approx(measured)
    assert fitted.factor == pytest.approx(1.3)


def test_measured_links_are_used_where_the_step_has_such_collectives():
    plan = planned("h100:1x8", FSDP)
    link = Link("fsdp", "all-gather", 8, 1, 1e-3, 1e9)
    assumptions = Assumptions(links=Links("NVIDIA H100 80GB HBM3", (link,)))
    made = timing(plan.compiled.assembly.mesh, plan.cluster, compiling.program_of(plan.compiled), assumptions)
    assert made.links["fsdp", "all-gather"] == link
    assert made.links["fsdp", "reduce-scatter"] is None
    [gathers] = [row for row in plan.traffic if (row.axis, row.kind) == ("fsdp", "all-gather")]
    assumed = plan.assumptions
    speed = 450e9 * assumed.link_efficiency
    more = gathers.count * (1e-3 - 3 * assumed.latency_seconds) + gathers.wire_bytes * (1e-9 - 1 / speed)
    assert made.wire_seconds - plan.timing.wire_seconds == pytest.approx(more, rel=1e-9)
    assert "measured: all-gather along fsdp, 8 devices on a host" in text_report.text(
        dataclasses.replace(plan, timing=made)
    )


def test_the_program_says_nothing_on_standard_error(tmp_path):
    file = tmp_path / "plan.json"
    words = ["--cluster=h100:1x2", "--config.mesh.data=2", f"--json={file}"]
    done = subprocess.run(
        [sys.executable, "-m", "meshtrain.plan", *words], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    assert "modelled" in done.stdout
    content = json.loads(file.read_text())
    assert content["fits"] is True
    assert content["modelled"]["step_seconds_low"] < content["modelled"]["step_seconds_high"]


def test_the_private_functions_of_jax_are_where_they_were():
    # Called while attention is traced; where one is missing, `replaced` raises.
    target = clusters.open_cluster("a100:1x8")
    with attention_tracing.as_on_target(target):
        assert attention_tracing.private.check_cudnn_version() == attention_tracing.CUDNN_VERSION
        assert attention_tracing.private.check_compute_capability("8.0")
        assert not attention_tracing.private.check_compute_capability("9.0")
    with pytest.raises(RuntimeError, match="cuDNN"):
        attention_tracing.private.check_cudnn_version()


def test_sequence_parallelism_needs_a_third_less_room_for_temporaries():
    # Eight sequences, so that activations are what most of it is, and not the sums of gradients.
    whole = llama_on(mesh={"tensor": 8})
    split = planned("h100:1x8", dataclasses.replace(whole, layout=LayoutOptions(sequence_parallel=True)))
    # Eleven gathers and scatters a layer with `full`, two each for look-up and head. A compiler that gathers for the
    # next layer early repeats the scatter before that gather: twelve.
    one = 7 / 8 * 8 * 8192 * 4096 * 2
    assert 0.99 * (11 * 32 + 4) * one < text_report.sent_along(split, "tensor") < 1.01 * (12 * 32 + 4) * one
    assert gathered_twice(compiling.program_of(split.compiled)) == []
    assert split.memory.compiler.temporary_bytes <= 0.65 * planned("h100:1x8", whole).memory.compiler.temporary_bytes


def test_late_gradients_are_reduced_beside_the_whole_step():
    made = planned("h100:2x4", small({"data": 8}, reduction=ReductionOptions("one_step_late")))
    [row] = [row for row in made.traffic if row.kind == "all-reduce"]
    assert row.wire_bytes == pytest.approx(made.minimum["data"], rel=0.01)
    assert row.overlapped_fraction > 0.8


LONG = dataclasses.replace(small().model, embed_dim=256, mlp_dim=512, head_dim=64, num_kv_heads=2)


def of_long_sequences(sequence_length):
    """Returns the plan of a decoder on fsdp 2 x context 4 whose two key and value heads are repeated."""
    given = small(
        {"fsdp": 2, "context": 4},
        model=LONG,
        sequence_length=sequence_length,
        batch_size=2,
        precision=PrecisionOptions("bfloat16"),
        remat=RematOptions("full"),
    )
    return planned("h100:1x8", given)


def test_the_exchange_sends_what_the_formula_says_and_weights_cross_both_axes_together():
    plan = of_long_sequences(8192)
    (exchanged,) = [row for row in plan.traffic if row.axis == "context" and row.kind == "all-to-all"]
    one = 3 / 4 * 2048 * 64 * 2 * 2 * (4 + 4)  # 2,048 tokens here, 4 heads, and 2 of keys and of values, each twice
    assert exchanged.wire_bytes == pytest.approx(2 * 3 * one, rel=0.02)
    assert text_report.sent_along(plan, "context") == pytest.approx(plan.minimum["context"], rel=0.02)
    assert text_report.sent_along(plan, "fsdp+context") == pytest.approx(plan.minimum["fsdp+context"], rel=0.03)
    assert {axis: plan.minimum[axis] > 1e6 for axis in plan.minimum} == {"fsdp+context": True, "context": True}
    assert not any("times the minimum" in found.what for found in findings(plan))
    assert plan.compiled.attention == "cudnn"
    assert plan.timing.wire_seconds > exchanged.wire_bytes / plan.cluster.accelerator.link_bytes_per_second


def test_temporaries_grow_as_sequences_do():
    short, long = (of_long_sequences(tokens).memory.compiler.temporary_bytes for tokens in (8192, 32_768))
    assert 2 < long / short <= 4.1  # 16 where something is kept for each pair of tokens


EXPERTS = dataclasses.replace(
    small().model,
    num_layers=8,
    embed_dim=256,
    moe=MoeOptions(num_experts=8, experts_per_token=2, expert_dim=256),
    head_dim=64,
)


def test_tokens_and_weights_send_what_the_formulas_say():
    config = small(
        {"fsdp": 2, "expert": 4},
        model=EXPERTS,
        sequence_length=2048,
        batch_size=8,
        precision=PrecisionOptions("bfloat16"),
        remat=RematOptions("full"),
    )
    plan = planned("h100:1x8", config)
    assert list(plan.minimum) == ["fsdp+expert", "fsdp", "expert"]
    assert text_report.sent_along(plan, "expert") == pytest.approx(plan.minimum["expert"], rel=0.02)
    assert text_report.sent_along(plan, "fsdp") == pytest.approx(plan.minimum["fsdp"], rel=0.02)
    assert text_report.sent_along(plan, "fsdp+expert") == pytest.approx(plan.minimum["fsdp+expert"], rel=0.02)
