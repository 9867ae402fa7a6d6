"""What experts send and hold, by formula, and which sizes of their axis a search tries."""

import dataclasses

import pytest

from meshtrain.config.tasks import abstract_task
from meshtrain.hardware import accelerators
from meshtrain.models.decoder_options import MoeOptions
from meshtrain.models.moe import chunks
from meshtrain.models.remat import RematOptions
from meshtrain.plan import findings
from meshtrain.plan.cost import lower_bound
from meshtrain.plan.hlo.collectives import Traffic, sent_along
from meshtrain.plan.search import candidates, estimate
from meshtrain.step.precision import PrecisionOptions
from tests.plan.conftest import MODEL, assembled, shape_of

BFLOAT16 = PrecisionOptions("bfloat16")
EXPERTS = dataclasses.replace(MODEL, moe=MoeOptions(num_experts=8, experts_per_token=2, expert_dim=32))
ATTENTION, ROUTER, OF_EXPERTS = 2 * 4 * 64 * 64, 2 * 64 * 8, 2 * 8 * 3 * 64 * 32  # of both layers
TABLE_AND_HEAD = 2 * 256 * 64


@pytest.mark.parametrize(
    ("sizes", "remat", "tokens", "choices"),
    [
        ({"fsdp": 8}, RematOptions("none"), 0, 0),
        ({"expert": 2}, RematOptions("none"), 2 * 4, 2 * 3),
        ({"expert": 4}, RematOptions("none"), 2 * 4 * 3, 2 * 3 * 3),
        ({"expert": 2, "pipeline": 2}, RematOptions("none"), 4, 3),
        ({"expert": 2}, RematOptions("full"), 2 * 5, 2 * 5),
        ({"expert": 2}, RematOptions("selective", every=2), 2 * 4.5, 2 * 4),
    ],
    ids=str,
)
def test_tokens_are_gathered_and_results_scattered_in_each_pass(small, sizes, remat, tokens, choices):
    """A thousand tokens of 64 numbers in bfloat16, with two choices of 4 bytes each: layers x passes x (n - 1)."""
    config = small(model=EXPERTS, remat=remat, precision=BFLOAT16)
    found = abstract_task(config).cost(shape_of(**sizes), 1000).layer_bytes["expert"]
    assert found == tokens * 1000 * 64 * 2 + choices * 1000 * 2 * 4
    assert abstract_task(small(remat=remat)).cost(shape_of(**sizes), 1000).layer_bytes["expert"] == 0


def test_experts_are_gathered_over_fsdp_alone_and_other_weights_over_both(small):
    least = lower_bound.wire_bytes_minimum(assembled(small(model=EXPERTS, precision=BFLOAT16), fsdp=2, expert=4))
    of_layers = 3 * (2 * ATTENTION + 4 * ROUTER)  # routers compute in float32
    tokens = 2 * 3 * 2 * 32 * (4 * 64 * 2 + 3 * 2 * 4)  # two sequences of 32 on a device
    assert least == {
        "fsdp+expert": 7 / 8 * (of_layers + 2 * 2 * TABLE_AND_HEAD),
        "fsdp": 1 / 2 * 3 * 2 * OF_EXPERTS / 4,
        "expert": tokens,
    }
    assert list(least) == ["fsdp+expert", "fsdp", "expert"]


def test_where_only_the_expert_axis_stores_weights_they_and_tokens_are_one_entry(small):
    config = small(model=EXPERTS, precision=BFLOAT16)
    least = lower_bound.wire_bytes_minimum(assembled(config, data=2, expert=4))
    of_weights = 3 / 4 * (3 * (2 * ATTENTION + 4 * ROUTER) + 2 * 2 * TABLE_AND_HEAD)
    assert set(least) == {"data", "expert"}
    assert least["expert"] == of_weights + 2 * 3 * 2 * 32 * (4 * 64 * 2 + 3 * 2 * 4)
    one = lower_bound.wire_bytes_minimum(assembled(config, fsdp=8))
    assert one["fsdp"] == 7 / 8 * (3 * (2 * (ATTENTION + OF_EXPERTS) + 4 * ROUTER) + 2 * 2 * TABLE_AND_HEAD)


def test_idle_rows_send_tokens_as_well(small):
    assembly = assembled(small(model=EXPERTS), pipeline=2, fsdp=2, expert=2)
    least = lower_bound.wire_bytes_minimum(assembly)
    idle = lower_bound.idle_bytes(assembly, least)
    assert idle["expert"] == pytest.approx(least["expert"] / 3)
    assert idle["fsdp"] == pytest.approx(least["fsdp"] / 3)
    outer = 2 * 3 / 4 * 2 * 4 * TABLE_AND_HEAD / 2  # two microbatches; the pipeline has half of both tables, float32
    assert idle["fsdp+expert"] == pytest.approx((least["fsdp+expert"] - outer) / 3)


def test_what_runs_along_the_axis_alone_is_not_sent_for_weights():
    sizes = {"expert": 1.0, "fsdp": 2.0, "fsdp+expert": 4.0, "expert+context": 8.0, "fsdp+expert+context": 16.0}
    rows = [Traffic(axis, "all-gather", 1, size, size, 1.0, 1.0, ()) for axis, size in sizes.items()]
    entries = ("expert", "fsdp", "fsdp+expert", "fsdp+expert+context")
    assert [sent_along(rows, axes) for axes in entries] == [1.0, 2.0, 4.0, 4.0 + 8.0 + 16.0]


@pytest.mark.parametrize(
    ("sizes", "num_tokens", "blocks"),
    [
        ({"fsdp": 8}, 1024, 16 + 8),
        ({"expert": 2}, 1024, 20 + 4),
        ({"expert": 8}, 1024, 20 + 1),
        ({"expert": 8}, 4096, 2 * (40 + 1)),
    ],
    ids=str,
)
def test_room_for_rows_is_that_of_an_even_load_and_a_quarter_more(small, sizes, num_tokens, blocks):
    """Tokens of two choices, in blocks of 128 rows; one device has all choices in any case. The last go in halves."""
    given = [small(model=model, precision=BFLOAT16) for model in (EXPERTS, MODEL)]
    both = [abstract_task(one).cost(shape_of(**sizes), num_tokens).kept_bytes for one in given]
    tokens = num_tokens * shape_of(**sizes)["expert"] * 64
    assert both[0] - both[1] == pytest.approx(2 * 2 * (tokens + 128 * blocks * (64 + 3 * 32)), rel=1e-9)


def test_what_rows_keep_counts_in_the_guess(small):
    def guessed(policy, num_experts):
        model = dataclasses.replace(EXPERTS, moe=dataclasses.replace(EXPERTS.moe, num_experts=num_experts))
        config = small(model=model, remat=RematOptions(policy), precision=BFLOAT16)
        shape = shape_of(expert=8)
        weights = estimate.weights_of(config)
        return estimate.estimate_bytes(config, shape, weights) - estimate.state_bytes(config, shape, weights)

    rows, tokens = 4 * 64, 8 * 2 * 32  # four blocks, of which an even load has two; of all devices
    full = 1.6 * rows * 2 * (2 * 64 + 3 * 32)  # in bfloat16: two wide, three narrow
    selective = full + 2 * rows * 2 * (2 * 32)
    kept = {"full": full, "selective": selective, "none": selective + 2 * 2 * (tokens * 64 + rows * (64 + 32))}
    for policy, expected in kept.items():
        assert guessed(policy, 8) - guessed(policy, 0) == pytest.approx(expected, rel=1e-9)


def test_memory_of_a_step_is_that_of_an_even_load(small, monkeypatch):
    """The same program computes any load. With room for the worst one at once it takes far more."""

    def temporary_bytes():
        model = dataclasses.replace(EXPERTS, num_layers=1, moe=dataclasses.replace(EXPERTS.moe, expert_dim=256))
        assembly = assembled(small(model=model, batch_size=64, remat=RematOptions("full")), expert=8)
        compiled = assembly.steps.train.lower(assembly.state, assembly.batch).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    even = temporary_bytes()
    monkeypatch.setattr(chunks, "ROOM", 8.0)
    assert temporary_bytes() > 1.5 * even


def test_a_search_splits_experts_inside_a_host_and_only_where_there_are_some(small):
    def tried(model, devices_each):
        return candidates.expert_sizes(estimate.weights_of(small(model=model)), 64, devices_each)

    assert tried(MODEL, 8) == [1]
    assert tried(EXPERTS, 8) == [1, 2, 4, 8]
    assert tried(EXPERTS, 4) == [1, 2, 4]
    assert tried(dataclasses.replace(EXPERTS, moe=dataclasses.replace(EXPERTS.moe, num_experts=6)), 8) == [1, 2]
    sizes = {shape["expert"] for shape in candidates.meshes(16, [1], [1, 2, 8])}
    assert sizes == {1, 2, 8}


def test_a_search_tries_experts_without_gathers_in_one_microbatch_and_in_pipelines(small):
    """Sixteen sequences on each of eight devices."""
    config = small(model=EXPERTS, batch_size=128)
    found = list(candidates.ways(config, shape_of(data=2, expert=4), only_mesh=False, has_experts=True))
    assert {way["accumulation_steps"] for way in found} == {16, 8, 4, 1}
    assert {way["remat.policy"] for way in found} == {"none", "selective", "save_attention", "full"}
    plain = list(candidates.ways(config, shape_of(fsdp=8), only_mesh=False))
    assert {way["accumulation_steps"] for way in plain} == {16, 8, 4}
    assert "save_attention" not in {way["remat.policy"] for way in plain}
    piped = list(candidates.ways(config, shape_of(pipeline=2, expert=4), only_mesh=False, has_experts=True))
    assert {way["remat.policy"] for way in piped} == {"selective", "save_attention", "full"}


def test_the_guess_knows_what_save_attention_keeps_and_computes_again(small):
    weights, h100 = estimate.weights_of(small(model=EXPERTS)), accelerators.ACCELERATORS[0]
    shape = shape_of(expert=8)

    def guesses(policy):
        config = small(model=EXPERTS, remat=RematOptions(policy), precision=BFLOAT16)
        seconds = estimate.estimate_seconds(config, shape, weights, h100, 8)
        return estimate.estimate_bytes(config, shape, weights), seconds

    none, some, full = (guesses(policy) for policy in ("none", "save_attention", "full"))
    assert some[0] - full[0] == 2 * 2 * 32 * 64 * 2  # the heads of two layers
    assert none[1] < some[1] < full[1]


def test_the_guess_gathers_experts_over_the_axes_that_store_them_alone(small):
    """On hosts of four devices, each of a host gathers its own experts, over its own network adapter."""
    h100 = accelerators.ACCELERATORS[0]

    def seconds(expert_dim, **sizes):
        config = small(
            model=dataclasses.replace(EXPERTS, moe=dataclasses.replace(EXPERTS.moe, expert_dim=expert_dim)),
            precision=BFLOAT16,
        )
        sent = estimate._sending_seconds(config, shape_of(**sizes), estimate.weights_of(config), h100, 4)
        return sent[estimate.STORED]

    assert seconds(64, expert=4) == pytest.approx(seconds(32, expert=4))
    added = seconds(64, fsdp=2, expert=4) - seconds(32, fsdp=2, expert=4)
    assert added == pytest.approx(3 * 2 * OF_EXPERTS / 4 / h100.network_bytes_per_second)


def test_the_guess_adds_gradients_up_once_a_microbatch(small):
    weights, h100, shape = estimate.weights_of(small(model=EXPERTS)), accelerators.ACCELERATORS[0], shape_of(expert=2)

    def seconds(parts):
        config = small(model=EXPERTS, precision=BFLOAT16, accumulation_steps=parts)
        sent = sum(estimate._sending_seconds(config, shape, weights, h100, 8).values())
        return estimate.estimate_seconds(config, shape, weights, h100, 8) - sent / 2

    added = 12 * weights.num_parameters / 2 / h100.memory_bytes_per_second
    assert seconds(4) - seconds(2) == pytest.approx(2 * added)
    assert seconds(2) - seconds(1) == pytest.approx(2 * added)


def test_a_plan_says_what_forces_microbatches():
    fits = findings.fewer_microbatches(4, 10 * 2**30, 30 * 2**30)
    assert fits.change == "accumulation_steps=2"
    said = "gathered for each of 4 microbatches, and fewer fit: with 2, activations would take about 20 GiB"
    assert said in fits.what
    forced = findings.fewer_microbatches(4, 10 * 2**30, 19 * 2**30)
    assert forced.what.startswith("memory requires 4 microbatches")
    assert "zero.level=1 with mesh.fsdp=1" in forced.change
