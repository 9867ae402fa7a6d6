"""Plans for a task of one's own, which has no option of the decoder and states little about itself."""

import dataclasses

import pytest

from docs.guide import own_images, own_model
from meshtrain.config import resolve, smaller
from meshtrain.pipeline.schedules import PipelineOptions
from meshtrain.plan import text_report
from meshtrain.plan.findings import _attention
from meshtrain.plan.search import candidates, estimate, ranking
from meshtrain.sharding.mesh import MeshOptions
from tests.plan.test_plan_candidates import cluster_of, shapes


@pytest.fixture(scope="module")
def own(request):
    """The configuration of a page's example; of `own_model` unless a test asks for another."""
    given = (request.param if hasattr(request, "param") else own_model).get_config()
    if given.task.startswith("docs.guide.own_model"):
        given.data.source, given.batch_size, given.sequence_length = "synthetic", 16, 16
    return resolve(given)


def test_a_step_is_planned_from_the_command_line_s_configuration(plan, own):
    made = plan("cpu:8", dataclasses.replace(own, zero=dataclasses.replace(own.zero, level=3)))
    size = 4 * (384 * 64 + 8 * 64 * 256 + 256 * 64)
    assert made.memory.state.parameters == made.memory.state.gradients == size // 8
    assert made.memory.compiler.arguments_bytes == made.memory.arguments_expected_bytes
    # Level 3: every matrix is split over data and fsdp besides tensor. Along tensor a device sends what the cost says.
    assert made.minimum == {"data+fsdp": 2 * 3 / 4 * size / 2, "tensor": 4 * (16 * 16 / 4) * 11 * 64}
    assert text_report.sent_along(made, "tensor") == pytest.approx(made.minimum["tensor"], rel=0.01)
    assert made.model_flops is made.mfu is None
    text = text_report.text(made)
    assert "172,032 parameters; 16 sequences of 16 tokens a step, 256 tokens" in text
    assert text_report.to_json(made)["wire_bytes_minimum"] == made.minimum
    assert _attention(dataclasses.replace(made, cluster=cluster_of("h100", 1, 8))) == []


def test_a_plan_names_a_schedule_of_one_s_own(plan, small):
    pipeline = PipelineOptions(schedule="docs.guide.own_schedule:in_groups", num_microbatches=2)
    made = plan("cpu:2", small({"pipeline": 2}, pipeline=pipeline))
    assert "\nschedule     docs.guide.own_schedule:in_groups, 2 microbatches, 1 chunks a stage\n" in text_report.text(
        made
    )


@pytest.mark.parametrize("own", [own_model, own_images], indirect=True)
@pytest.mark.parametrize("level", [0, 1, 3])
@pytest.mark.parametrize("mesh", [MeshOptions(data=2, fsdp=4), MeshOptions(data=2, fsdp=2, tensor=2)], ids=str)
def test_what_crosses_data_and_fsdp_at_once_counts_for_both(plan, own, mesh, level):
    made = plan("cpu:8", dataclasses.replace(own, mesh=mesh, zero=dataclasses.replace(own.zero, level=level)))
    assert next(iter(made.minimum)) == "data+fsdp"
    assert text_report.sent_along(made, "data+fsdp") >= made.minimum["data+fsdp"]


@pytest.mark.parametrize("own", [own_model, own_images], indirect=True)
def test_without_a_cost_a_plan_says_what_it_cannot_know(plan, own):
    on_tensor = dataclasses.replace(own, mesh=MeshOptions(data=2, fsdp=2, tensor=2))
    made = plan("cpu:8", on_tensor)
    is_stated = own.task.startswith("docs.guide.own_model")
    assert ("tensor" in made.minimum) == is_stated
    [line] = [line for line in text_report.text(made).splitlines() if line.startswith("tensor ") and "all-" not in line]
    assert ("not known" in line) != is_stated
    weights, shape = estimate.weights_of(on_tensor), dict(made.compiled.assembly.mesh.shape)
    guessed, d, f = estimate.estimate_bytes(on_tensor, shape, weights), 64, 256
    kept = 4 * (16 * 16 / 4) * (9 * d + (f + 2 * 384) / 2) if is_stated else 0
    assert guessed == estimate.state_bytes(on_tensor, shape, weights) + kept


def test_a_search_has_the_meshes_that_its_own_weights_fit(own):
    found = candidates.candidates(own, cluster_of("h100", 1, 8), only_mesh=False)
    assert {"fsdp": 8} in shapes(found)
    assert {"data": 2, "fsdp": 2, "tensor": 2} in shapes(found)
    assert not any("pipeline" in shape for shape in shapes(found))  # it has no stages
    assert {type(smaller.with_change(own, one.change).model) for one in found} == {own_model.Options}
    assert all(ranking.describe(one) for one in found)
    odd = dataclasses.replace(own, model=own_model.Options(width=60))
    assert {"fsdp": 8} not in shapes(candidates.candidates(odd, cluster_of("h100", 1, 8), only_mesh=False))
