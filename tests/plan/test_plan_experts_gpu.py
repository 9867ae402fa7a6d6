"""Mixtures of experts, by the compiler of GPUs that are not there: what they send."""

import dataclasses

import pytest

from meshtrain.models.remat import RematOptions
from meshtrain.plan import report
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
    assert report.sent_along(plan, "expert") == pytest.approx(plan.minimum["expert"], rel=0.02)
    assert report.sent_along(plan, "fsdp") == pytest.approx(plan.minimum["fsdp"], rel=0.02)
    assert report.sent_along(plan, "fsdp+expert") == pytest.approx(plan.minimum["fsdp+expert"], rel=0.02)


def test_rows_go_to_the_devices_of_their_experts_forward_and_backward():
    model = dataclasses.replace(MODEL, num_layers=2, num_experts=16, experts_per_token=4, expert_exchange="ragged")
    config = small(
        {"fsdp": 2, "expert": 4},
        model=model,
        sequence_length=512,
        batch_size=8,
        precision=PrecisionOptions("bfloat16"),
        remat=RematOptions("full"),
    )
    plan = planned("h100:1x8", config)
    [row] = [row for row in plan.traffic if row.kind == "ragged-all-to-all"]
    # There and back, their transposes, and there once more for the backward pass.
    assert (row.axis, row.count) == ("expert", model.num_layers * 5)
    assert report.sent_along(plan, "expert") == pytest.approx(plan.minimum["expert"], rel=0.02)
