"""What a search compiles: legal meshes, microbatches, remat policies and ZeRO levels, by guessed bytes and time."""

import dataclasses
import itertools
import time
from types import SimpleNamespace

import pytest

from meshtrain.config import smaller
from meshtrain.config.schema import LocalStepsOptions
from meshtrain.hardware import accelerators
from meshtrain.lab.compression import CompressionOptions
from meshtrain.models.remat import RematOptions
from meshtrain.optim.optimizers import OptimizerOptions
from meshtrain.pipeline.schedules import PipelineOptions
from meshtrain.plan.cluster import clusters
from meshtrain.plan.cost import lower_bound
from meshtrain.plan.search import candidates, estimate, ranking
from meshtrain.plan.timing.streams import Assumptions
from meshtrain.report import plan_pages
from meshtrain.sharding.mesh import MeshOptions
from meshtrain.sharding.param_sharding import ZeroOptions
from meshtrain.sharding.reduction import ReductionOptions
from meshtrain.sharding.rules import AXES
from meshtrain.step.device_memory import training_state_bytes
from meshtrain.step.precision import PrecisionOptions
from tests.plan.conftest import assembled, shape_of

# 12.9 billion parameters: 206 GB of training state on a device that has all of it, 26 GB on one of eight that share it.
LARGE = {"num_layers": 40, "embed_dim": 5120, "mlp_dim": 13824, "num_heads": 40, "num_kv_heads": 40}


def test_every_mesh_of_eight_devices_is_thought_of_once():
    found = list(candidates.meshes(8))
    assert len(found) == len({tuple(shape.values()) for shape in found}) == 20


def cluster_of(name, num_hosts, each):
    devices = clusters.open_cluster("cpu:8").devices
    accelerator = next(one for one in accelerators.ACCELERATORS if one.name == name)
    return clusters.Cluster(name, "cuda", devices[: num_hosts * each], num_hosts, accelerator, (9, 0))


def test_candidates_are_legal_and_keep_tensor_inside_a_host(small):
    found = candidates.candidates(small(), cluster_of("h100", 4, 2), only_mesh=True)
    assert found
    assert {one.shape["tensor"] for one in found} == {1, 2}
    assert all(set(one.change) == {f"mesh.{axis}" for axis in one.shape} for one in found)
    assert [one.guessed_seconds for one in found] == sorted(one.guessed_seconds for one in found)


def test_a_model_that_no_mesh_can_hold_has_no_candidates(small):
    huge = dataclasses.replace(small().model, num_layers=96, embed_dim=16384, mlp_dim=65536)
    assert candidates.candidates(small(model=huge), cluster_of("h100", 1, 8), only_mesh=False) == []


def test_wider_searches_change_microbatches_and_remat(small):
    found = candidates.candidates(small(), cluster_of("h100", 1, 8), only_mesh=False)
    policies = {one.change["remat.policy"] for one in found if "remat.policy" in one.change}
    assert policies == {"full", "selective", "none"}
    schedules = {one.change["pipeline.schedule"] for one in found if "pipeline.schedule" in one.change}
    assert "1f1b" in schedules


def test_pipelines_with_empty_places_are_candidates_and_take_the_memory_and_time_of_their_places(small):
    """Five layers on two stages are six places, on two stages of two chunks eight."""
    config = small(model=dataclasses.replace(small().model, num_layers=5))
    found = candidates.candidates(config, cluster_of("h100", 1, 8), only_mesh=False)
    kinds = {(one.shape["pipeline"], one.change["pipeline.num_chunks"]) for one in found if one.shape["pipeline"] > 1}
    assert {(2, 1), (2, 2)} <= kinds
    mesh = {"data": 2, "pipeline": 2, "tensor": 2}
    chunks = PipelineOptions(schedule="interleaved_1f1b", num_microbatches=4, num_chunks=2)
    for pipeline, num_places in ((PipelineOptions("1f1b", num_microbatches=4), 6), (chunks, 8)):
        uneven = dataclasses.replace(small(mesh), model=config.model, pipeline=pipeline)
        even = dataclasses.replace(uneven, model=dataclasses.replace(config.model, num_layers=num_places))
        assert_guessed(uneven, mesh)
        weights, shape = estimate.weights_of(uneven), shape_of(**mesh)
        assert estimate.state_bytes(uneven, shape, weights) == estimate.state_bytes(
            even, shape, estimate.weights_of(even)
        )
        idle = lower_bound.idle_share(assembled(uneven))
        assert 1 - idle == pytest.approx((1 - lower_bound.idle_share(assembled(even))) * 5 / num_places)


def test_at_most_two_of_each_mesh_are_compiled(small):
    found = candidates.candidates(small(), cluster_of("h100", 1, 8), only_mesh=False)
    chosen = ranking.diverse(found)
    shapes = [tuple(one.shape.values()) for one in chosen[: ranking.COMPILED]]
    assert max(map(shapes.count, shapes)) <= 2
    assert sorted(map(id, chosen)) == sorted(map(id, found))  # with more compilations the others follow


def test_a_search_with_few_programs_takes_as_many_that_surely_fit():
    cluster = cluster_of("h100", 1, 8)
    capacity = accelerators.usable_bytes(cluster.accelerator)
    shares = (1.1, 1.0, 0.9, 0.7, 0.5)  # of the capacity, the fastest first
    found = [candidates.Candidate({}, {"data": at}, share * capacity, at) for at, share in enumerate(shares)]
    chosen = {most: [one.shape["data"] for one in ranking.chosen_of(found, most, cluster)] for most in (1, 2, 3, 5)}
    assert chosen == {1: [3], 2: [3, 0], 3: [3, 4, 0], 5: [0, 1, 2, 3, 4]}
    assert [one.shape["data"] for one in ranking.chosen_of(found[:2], 1, cluster)] == [1]  # the one of least memory


@pytest.fixture
def search(small, monkeypatch):
    """(share of H100s' memory -> fits, most) -> (result of a search, its candidates as compiled)."""
    cluster, config, real = cluster_of("h100", 1, 8), small(), candidates.candidates
    capacity = accelerators.usable_bytes(cluster.accelerator)
    ways = real(config, cluster, only_mesh=False)[:20]
    shares = [1.1, 0.95, 0.85, 0.76, 0.7, 0.5] + [0.9] * 14  # the fastest first
    ways = [dataclasses.replace(one, guessed_bytes=by * capacity) for one, by in zip(ways, shares, strict=True)]
    by_change = {tuple(one.change.items()): one for one in ways}
    monkeypatch.setattr(ranking, "candidates", lambda *_, **__: ways)
    monkeypatch.setattr(ranking, "with_change", lambda config, change: change)
    monkeypatch.setattr(ranking, "microbatch_reason", lambda plan: [])

    def run(fits, most):
        compiled = []

        def plan(change, *_):
            compiled.append(by_change[tuple(change.items())])
            held = SimpleNamespace(fits=fits(compiled[-1].guessed_bytes / capacity), compiler=None, capacity_bytes=1)
            return SimpleNamespace(memory=held, timing=None, mfu=None)

        monkeypatch.setattr(ranking.planner, "plan", plan)
        found = ranking.search(config, cluster, Assumptions(), only_mesh=False, most=most)
        return found, [ways.index(one) for one in compiled]

    return run


def test_a_search_compiles_the_same_on_a_machine_where_each_compilation_takes_an_hour(search, monkeypatch):
    expected = search(lambda share: share < 0.9, 12)[1]
    hours = itertools.count(step=3600)
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(hours)))
    assert search(lambda share: share < 0.9, 12)[1] == expected
    assert len(expected) == 12


def test_a_search_compiles_first_what_surely_fits_and_last_what_takes_least_if_nothing_has_fitted(search):
    assert search(lambda share: True, 1)[1] == [4]
    assert search(lambda share: False, 1)[1] == [4]
    assert search(lambda share: True, 2)[1] == [4, 0]
    assert search(lambda share: False, 2)[1] == [4, 5]
    assert search(lambda share: None, 2)[1] == [4, 0]  # too close to say


def test_a_search_says_nothing_about_candidates_that_it_has_not_compiled(search):
    for most in (1, 12, 19):
        said = ranking.text(search(lambda share: False, most)[0])
        assert f"compiled {most} of 20 candidates; --search-compiles=N compiles more" in said
        assert said.endswith(f"none of the {most} compiled candidates fits")
    said = ranking.text(search(lambda share: False, 1000)[0])
    assert "compiled 20 of 20 candidates\n" in said


def test_a_mesh_option_of_its_own_is_what_a_candidate_names(small):
    (one, *_) = candidates.candidates(small(), cluster_of("h100", 1, 8), only_mesh=True)
    assert MeshOptions(**{key.partition(".")[2]: value for key, value in one.change.items()})
    assert ranking.describe(one)


def assert_guessed(config, mesh):
    assembly, weights = assembled(config), estimate.weights_of(config)
    assert (
        estimate.state_bytes(config, shape_of(**mesh), weights)
        == training_state_bytes(assembly.state, assembly.states.sums).total
    )


@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("mesh", "optimizer"),
    [
        ({"data": 8}, OptimizerOptions()),
        ({"data": 2, "fsdp": 4}, OptimizerOptions(name="adafactor")),
        ({"data": 2, "fsdp": 2, "tensor": 2}, OptimizerOptions(name="sgd", trainable="attention")),
        ({"data": 2, "pipeline": 2, "tensor": 2}, OptimizerOptions()),
    ],
    ids=str,
)
def test_guessed_state_is_what_the_assembled_step_holds(small, mesh, optimizer, level):
    reduction = CompressionOptions("topk") if level == 1 else ReductionOptions()
    config = small(mesh, zero=ZeroOptions(level), optimizer=optimizer, reduction=reduction)
    assert_guessed(config, mesh)
    if "pipeline" in mesh:
        assert_guessed(dataclasses.replace(config, precision=PrecisionOptions("bfloat16")), mesh)


@pytest.mark.parametrize(
    "options",
    [{"local_steps": LocalStepsOptions(period=5, groups=8)},
     {"local_steps": LocalStepsOptions(period=5, groups=4, outer_momentum=0.0)},
     {"reduction": ReductionOptions("one_step_late")}],
    ids=str,
)  # fmt: skip
def test_guessed_state_of_groups_is_what_the_assembled_step_holds(small, options):
    optimizer = OptimizerOptions(trainable="attention|mlp")
    config = small({"data": 4, "fsdp": 2}, optimizer=optimizer, batch_size=16, **options)
    assert_guessed(config, {"data": 4, "fsdp": 2})


def shapes(found):
    return [{axis: size for axis, size in one.shape.items() if size > 1} for one in found]


def test_a_mesh_that_fits_at_level_three_only_is_compiled_at_level_three(small):
    large = dataclasses.replace(small().model, **LARGE)
    cluster = cluster_of("h100", 1, 8)
    whole, split = (
        candidates.candidates(small(model=large, zero=ZeroOptions(level)), cluster, only_mesh=True) for level in (0, 3)
    )
    assert {"data": 8} not in shapes(whole)
    assert {"data": 8} in shapes(split)


def test_a_search_raises_the_level_only_where_the_one_asked_for_does_not_fit(small):
    large = dataclasses.replace(small().model, **LARGE)
    found = candidates.candidates(small(model=large), cluster_of("h100", 1, 8), only_mesh=False)
    levels = {
        (one.shape["data"], one.change["accumulation_steps"]): one.change["zero.level"]
        for one in found
        if "zero.level" in one.change and one.shape["pipeline"] == one.shape["tensor"] == one.shape["fsdp"] == 1
    }
    assert levels == {(8, 2): 2, (8, 1): 3}  # without microbatches there are no sums of gradients for level 2 to split
    alone = [one for one in found if one.shape["fsdp"] == 8]
    assert alone
    assert not any("zero.level" in one.change for one in alone)
    small_ones = candidates.candidates(small(), cluster_of("h100", 1, 8), only_mesh=False)
    assert not any("zero.level" in one.change for one in small_ones)


def test_the_first_level_within_the_capacity_is_taken_and_else_the_first_near_it():
    guesses = [candidates.Candidate({"zero.level": level}, {}, size, 0.0) for level, size in enumerate((120, 110, 90))]
    taken = [candidates._first_that_fits(guesses, capacity) for capacity in (130, 100, 80, 70)]
    assert [one and one.change["zero.level"] for one in taken] == [0, 2, 2, None]
    assert candidates._first_that_fits(guesses[:2], 100).change["zero.level"] == 1


def test_a_level_takes_the_place_of_a_strategy(small):
    config = small({"data": 8}, zero=ZeroOptions(strategy="no_shard"))
    changed = smaller.with_change(config, smaller.with_level(config, 2))
    assert (changed.zero.effective_level, changed.zero.strategy) == (2, "")


def test_no_way_is_compiled_twice(small):
    found = candidates.candidates(small(), cluster_of("h100", 1, 8), only_mesh=False)
    ways = [tuple(sorted(one.change.items())) for one in found]
    assert len(ways) == len(set(ways))


def test_a_search_whose_candidates_are_all_refused_says_why(small):
    cluster = cluster_of("h100", 1, 8)
    one = candidates.candidates(small(), cluster, only_mesh=True)[0]
    result = ranking.Found(cluster, (), 1, ((one, "batch_size: got 1"),))
    said = ranking.text(result)
    assert "batch_size: got 1" in said
    assert said.endswith("none of the 0 compiled candidates fits")
    assert "batch_size: got 1" in plan_pages.search_page(result)


def test_what_a_pipeline_keeps_is_guessed_by_policy_and_schedule(small):
    """Of four microbatches and eight layers on two stages: gpipe keeps all four, 1f1b at most three."""
    shape = dict.fromkeys(AXES, 1) | {"pipeline": 2}

    def kept(policy, schedule="1f1b", num_chunks=1):
        options = PipelineOptions(schedule=schedule, num_microbatches=4, num_chunks=num_chunks)
        model = dataclasses.replace(small().model, num_layers=8)
        config = small(shape, model=model, remat=RematOptions(policy), pipeline=options)
        weights = estimate.weights_of(config)
        return estimate.estimate_bytes(config, shape, weights) - estimate.state_bytes(config, shape, weights)

    assert kept("none") > kept("selective") > kept("full")
    assert kept("full", "gpipe") > kept("full") > kept("full", "interleaved_1f1b", 2)
