"""Long sequences split over devices, by the compiler of GPUs that are not there: what they send and hold."""

import dataclasses

import pytest

from meshtrain.models.remat import RematOptions
from meshtrain.plan import text_report
from meshtrain.plan.findings import findings
from meshtrain.step.precision import PrecisionOptions
from tests.plan.conftest import config as small
from tests.plan.conftest import planned

pytestmark = pytest.mark.gpu_compiler

MODEL = dataclasses.replace(small().model, embed_dim=256, mlp_dim=512, head_dim=64, num_kv_heads=2)


def split(sequence_length):
    """Returns the plan of a decoder on fsdp 2 x context 4 whose two key and value heads are repeated."""
    config = small(
        {"fsdp": 2, "context": 4},
        model=MODEL,
        sequence_length=sequence_length,
        batch_size=2,
        precision=PrecisionOptions("bfloat16"),
        remat=RematOptions("full"),
    )
    return planned("h100:1x8", config)


def test_the_exchange_sends_what_the_formula_says_and_weights_cross_both_axes_together():
    plan = split(8192)
    (exchanged,) = [row for row in plan.traffic if row.axis == "context" and row.kind == "all-to-all"]
    one = 3 / 4 * 2048 * 64 * 2 * 2 * (4 + 4)  # 2,048 tokens here, 4 heads, and 2 of keys and of values, each twice
    assert exchanged.wire_bytes == pytest.approx(2 * 3 * one, rel=0.02)
    assert text_report.sent_along(plan, "context") == pytest.approx(plan.minimum["context"], rel=0.02)
    assert text_report.sent_along(plan, "fsdp+context") == pytest.approx(plan.minimum["fsdp+context"], rel=0.03)
    assert {axis: plan.minimum[axis] > 1e6 for axis in plan.minimum} == {"fsdp+context": True, "context": True}
    assert not any("times what it has to" in found.what for found in findings(plan))
    assert plan.compiled.attention == "cudnn"
    assert plan.timing.wire_seconds > exchanged.wire_bytes / plan.cluster.accelerator.link_bytes_per_second


def test_temporaries_grow_as_sequences_do():
    short, long = (split(tokens).memory.compiler.temporary_bytes for tokens in (8192, 32_768))
    assert 2 < long / short <= 4.1  # 16 where something is kept for each pair of tokens
