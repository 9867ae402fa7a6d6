"""`train` at its start and `plan` in its findings report a kernel that is missing or does not support the device."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import pytest

from meshtrain.models import fallback as reports
from meshtrain.models.attention import dot_product, flex, select, splash, triton
from meshtrain.models.decoder_options import MoeOptions
from meshtrain.models.moe import grouped_matmul_gpu, grouped_matmul_tpu
from meshtrain.models.transformer.decoder import DecoderOptions
from meshtrain.models.transformer.decoder_cost import kernels
from meshtrain.plan.cluster.attention_tracing import as_on_target
from meshtrain.plan.cluster.clusters import Cluster
from meshtrain.plan.findings import findings
from meshtrain.run import preflight
from meshtrain.sharding.placement import Placement
from meshtrain.sharding.rules import AXES
from meshtrain.step.precision import PrecisionOptions
from tests.plan.conftest import assembled, config, planned

ACCELERATOR = pathlib.Path(__file__).parents[2] / "docs" / "results" / "accelerator.json"
MODEL = DecoderOptions(
    1, 128, 64, 1, 1, head_dim=128, vocab_size=16, moe=MoeOptions(num_experts=4, expert_dim=128), within_documents=False
)
PACKED = dataclasses.replace(MODEL, within_documents=True)
SMALL = {"batch_size": 8, "sequence_length": 1024, "precision": PrecisionOptions("bfloat16")}
JAX, LOOP = f"JAX {jax.__version__} has no ", "experts: products by a loop over blocks, because "
# (platform, module and function that states whether JAX has the kernel, model, start and end of the line).
REMOVED = {
    "cudnn": ("gpu", dot_product, "has_cudnn", MODEL, f"attention: triton, because {JAX}", "nearest: jax 0.12.0.1"),
    "triton": (
        "gpu",
        triton,
        "is_available",
        PACKED,
        f"attention: blockwise, because cuDNN's kernel does not support documents, and {JAX}",
        f"nearest: jax 0.12.0.1, or {select.APART}",
    ),
    "splash": ("tpu", splash, "is_available", PACKED, f"attention: blockwise, because {JAX}", "nearest: jax 0.12.0.1"),
    "gpu": ("gpu", grouped_matmul_gpu, "is_available", MODEL, f"{LOOP}{JAX}", "nearest: jax 0.12.0.1"),
    "tpu": ("tpu", grouped_matmul_tpu, "is_available", MODEL, f"{LOOP}{JAX}", "nearest: jax 0.12.0.1"),
}


def lines(model, platform, dtype=jnp.bfloat16, length=1024, capability=None):
    parts = kernels(model, length, dtype, platform, dict.fromkeys(AXES, 1), length, capability)
    return [part.fallback_line for part in parts if part.fallback]


@pytest.mark.parametrize("name", REMOVED)
def test_train_and_plan_report_a_kernel_that_jax_lacks(name, monkeypatch, tmp_path, capsys):
    platform, module, function, model, start, end = REMOVED[name]
    asked = config(model=model, **SMALL)
    plan = planned("cpu:8", config())
    compiled = dataclasses.replace(plan.compiled, assembly=assembled(asked, data=8))
    cluster = dataclasses.replace(plan.cluster, platform=platform)
    plan = dataclasses.replace(plan, compiled=compiled, cluster=cluster)
    monkeypatch.setattr(Placement, "platform", platform)

    def reported():
        with as_on_target(Cluster("h100:1x8", "cuda", (), 1, None, (9, 0))):
            preflight.checked_assembly(asked, jax.devices(), [], None, None, tmp_path)
        told = [line for line in capsys.readouterr().err.splitlines() if "because" in line]
        return told, [found for found in findings(plan) if "because" in found.what]

    assert reported() == ([], [])
    monkeypatch.setattr(module, function, lambda: False)
    [line], [finding] = reported()
    line = line.removeprefix("meshtrain: WARNING: ")
    assert line.startswith(start)
    assert line.endswith(end)
    assert finding.line() == line.replace("; nearest: ", "; ")


def test_nothing_is_reported_of_a_cpu_or_of_an_implementation_that_was_asked_for(monkeypatch):
    monkeypatch.setattr(select, "is_available", lambda kernel: False)
    assert lines(PACKED, "cpu") == []
    assert lines(dataclasses.replace(PACKED, attention="blockwise"), "gpu") == []


@pytest.mark.parametrize(
    ("options", "given", "cost", "nearest"),
    [
        ({}, {"capability": (7, 5)}, "because no kernel supports this GPU: about 23% of", reports.NEWER_GPU),
        ({}, {"dtype": jnp.float32}, "support float32: about 23% of", "precision.policy=bfloat16"),
        ({"window": 100}, {}, "does not support window: about 13% of", select.APART),
        ({"attention_cap": 5.0}, {}, "support capped scores: about 23% of", "model.attention_cap=0"),
        ({"head_dim": 512}, {}, "does not support heads of 512: about 23% of", "heads of 128"),
    ],
    ids=str,
)
def test_a_device_or_setting_without_a_kernel_is_reported_with_a_change_that_helps(options, given, cost, nearest):
    line = lines(dataclasses.replace(PACKED, **options), "gpu", **given)[0]
    assert cost in line
    assert line.endswith(f"; nearest: {nearest}")


def test_a_mask_of_documents_replaces_a_missing_kernel_at_the_cost_of_memory(monkeypatch):
    monkeypatch.setattr(triton, "is_available", lambda: False)
    [line] = lines(dataclasses.replace(PACKED, moe=MoeOptions()), "gpu", capability=(8, 0))
    assert line.startswith("attention: cudnn, because cuDNN's kernel does not support documents, and ")
    assert "with a [T, S] mask does: a mask of 2 MB for each sequence; the speed is not measured; nearest: jax" in line
    [line] = lines(dataclasses.replace(PACKED, moe=MoeOptions()), "gpu", length=16384, capability=(8, 0))
    assert line.startswith("attention: blockwise, ")


def test_where_cudnn_has_a_score_function_it_is_named_as_untried(monkeypatch):
    monkeypatch.setattr(triton, "is_available", lambda: False)
    monkeypatch.setattr(flex, "supports", lambda capability: capability == (9, 0))
    line = lines(PACKED, "gpu", capability=(9, 0))[0]
    assert line.endswith(f"nearest: jax 0.12.0.1, or model.attention=cudnn, where {select.BY_SCORES}")


def test_old_gpus_multiply_experts_in_a_loop():
    assert lines(MODEL, "gpu", capability=(7, 0))[1].startswith("experts: products by a loop over blocks, because no ")
    assert lines(MODEL, "gpu", capability=(8, 0)) == []


def test_the_installed_jax_has_all_kernels_and_is_not_newer_than_reports_state():
    assert all(map(select.is_available, ("cudnn", "triton", "splash")))
    assert grouped_matmul_gpu.is_available()
    assert grouped_matmul_tpu.is_available()
    assert flex.is_available() == (jax.__version_info__ >= (0, 12))
    numbers = lambda version: tuple(map(int, version.split(".")[:3]))  # noqa: E731
    assert numbers(jax.__version__) <= numbers(reports.WITH_KERNELS.removeprefix("jax "))


def test_speeds_in_reports_are_measured():
    measured = json.loads(ACCELERATOR.read_text())["steps"]["rates"]["result"]
    for name, share in select.SPEED.items():
        assert share == pytest.approx(measured[f"attention_{name}"], rel=2e-3)
