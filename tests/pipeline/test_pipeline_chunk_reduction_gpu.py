"""Where the GPU compiler puts the reductions of chunks, and how it gathers weights: `scripts/test --plan` runs this."""

import dataclasses

import pytest

from meshtrain.pipeline.schedules import PipelineOptions
from meshtrain.plan import text_report
from meshtrain.sharding.param_sharding import ZeroOptions
from meshtrain.step.precision import PrecisionOptions
from tests.plan.conftest import config as small
from tests.plan.conftest import planned

pytestmark = pytest.mark.gpu_compiler

NUM_CHUNKS = 4


def test_gradients_of_chunks_cross_data_beside_later_rows():
    """All but the last two, which are reduced outside of a loop: there the compiler begins late."""
    model = dataclasses.replace(small().model, num_layers=4 * NUM_CHUNKS, embed_dim=1024, mlp_dim=4096)
    given = small(
        {"data": 2, "pipeline": 4},
        model=model,
        batch_size=8,
        sequence_length=1024,
        precision=PrecisionOptions("bfloat16", reduce_dtype="bfloat16"),
        pipeline=PipelineOptions("interleaved_1f1b", num_microbatches=4, num_chunks=NUM_CHUNKS),
    )
    plan = planned("h100:1x8", given)
    assert (NUM_CHUNKS - 2) / NUM_CHUNKS <= plan.layer_gradients.overlapped_fraction <= 1
    assert "overlap products of later clock ticks" in text_report.text(plan)
    sent = {row.axis: row.wire_bytes for row in plan.traffic if row.kind == "all-reduce" and row.axis == "data"}
    assert sent["data"] == pytest.approx(plan.minimum["data"], rel=0.01)


def test_weights_that_replicas_store_in_shards_cross_data_in_16_bits():
    model = dataclasses.replace(small().model, num_layers=8, embed_dim=256, mlp_dim=1024)
    given = small(
        {"data": 2, "pipeline": 4},
        model=model,
        zero=ZeroOptions(1),
        precision=PrecisionOptions("bfloat16"),
        pipeline=PipelineOptions("1f1b", num_microbatches=4),
    )
    plan = planned("h100:1x8", given)
    gathered = sum(row.wire_bytes for row in plan.traffic if row.kind == "all-gather" and row.axis == "data")
    scattered = sum(row.wire_bytes for row in plan.traffic if row.kind == "reduce-scatter" and row.axis == "data")
    assert scattered + gathered == pytest.approx(plan.minimum["data"], rel=0.02)
    assert gathered < 0.6 * scattered
