"""Mixtures of experts, by the compiler of GPUs that are not there: what they send."""

import dataclasses

import pytest

from meshtrain.models.remat import RematOptions
from meshtrain.plan import text_report
from meshtrain.step.precision import PrecisionOptions
from tests.plan.conftest import config as small
from tests.plan.conftest import planned

pytestmark = pytest.mark.gpu_compiler

MODEL = dataclasses.replace(
    small().model, num_layers=8, embed_dim=256, num_experts=8, experts_per_token=2, expert_dim=256, head_dim=64
)


def test_tokens_and_weights_send_what_the_formulas_say():
    config = small(
        {"fsdp": 2, "expert": 4},
        model=MODEL,
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
