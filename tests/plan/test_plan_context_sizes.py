"""Where it is worth trying to split sequences: sizes for a search, changes that save memory, advice."""

import dataclasses
from types import SimpleNamespace

import pytest

from meshtrain.pipeline.schedules import PipelineOptions
from meshtrain.plan import findings, text_report
from meshtrain.plan.cost import context_sizes
from meshtrain.plan.cost.memory import Memory
from meshtrain.plan.search import candidates, changes, estimate
from meshtrain.step.device_memory import StateBytes, Statistics
from tests.plan.conftest import H100, shape_of
from tests.plan.test_plan_candidates import cluster_of, shapes

GIB = 2**30


@pytest.mark.parametrize(
    ("tokens", "num_devices", "expected"),
    [
        (8_192, 64, [1]),
        (32_768, 64, [1, 2, 4]),
        (131_072, 64, [1, 2, 4, 8, 16]),
        (131_072, 24, [1, 2, 4, 8]),
        (1_048_576, 64, [1, 8, 16, 32, 64]),
        (98_305, 64, [1]),
    ],
)
def test_long_sequences_alone_are_split_in_a_search(small, tokens, num_devices, expected):
    assert context_sizes.sizes_to_try(small(sequence_length=tokens), num_devices) == expected


def test_a_search_has_the_sizes_of_long_sequences_and_few_of_them(small):
    assert {shape["context"] for shape in candidates.meshes(64, [1, 4, 8])} == {1, 4, 8}
    assert len(list(candidates.meshes(64, [1]))) == 84
    assert len(list(candidates.meshes(64, [1, 2, 4, 8, 16]))) == 84 + 56 + 35 + 20 + 10
    cluster = cluster_of("h100", 1, 8)
    short, long = (
        shapes(candidates.candidates(small(sequence_length=tokens, batch_size=8), cluster, only_mesh=True))
        for tokens in (4_096, 32_768)
    )
    assert not any("context" in one for one in short)
    assert {"fsdp": 2, "context": 4} in long
    assert {"context": 2, "fsdp": 2, "tensor": 2} in long


def test_half_of_the_batch_axis_becomes_twice_the_parts_and_the_microbatches(small):
    config = small(sequence_length=65_536, accumulation_steps=2)
    assert context_sizes.in_more_parts(config, shape_of(data=2, fsdp=4, context=2)) == {
        "mesh.fsdp": 2, "mesh.context": 4, "accumulation_steps": 4,
    }  # fmt: skip
    assert context_sizes.in_more_parts(config, shape_of(data=2, context=4))["mesh.data"] == 1
    assert context_sizes.in_more_parts(config, shape_of(data=2, expert=2))["mesh.data"] == 1  # experts stay split
    in_pipeline = small(sequence_length=65_536, pipeline=PipelineOptions("1f1b", num_microbatches=4))
    change = context_sizes.in_more_parts(in_pipeline, shape_of(fsdp=2, pipeline=2))
    assert change == {"mesh.fsdp": 1, "mesh.context": 2, "pipeline.num_microbatches": 8}
    assert context_sizes.in_more_parts(config, shape_of(context=8)) == {}
    assert context_sizes.in_more_parts(small(sequence_length=4_096), shape_of(fsdp=8)) == {}


def held(activations, capacity=70 * GIB):
    return SimpleNamespace(activations_bytes=activations, capacity_bytes=capacity, compiler=None)


@pytest.mark.parametrize(
    ("memory", "expected"),
    [(held(36 * GIB), True), (held(34 * GIB), False), (held(None), True), (held(36 * GIB, None), False)],
)
def test_activations_dominate_from_half_of_the_capacity_on(memory, expected):
    assert context_sizes.activations_dominate(memory) is expected


def test_more_parts_are_tried_where_activations_do_not_fit(small):
    config, shape = small(sequence_length=65_536), shape_of(fsdp=8)
    parts = {"mesh.fsdp": 4, "mesh.context": 2, "accumulation_steps": 2}
    assert parts in list(changes.candidates(config, shape, held(36 * GIB)))
    assert parts in list(changes.candidates(config, shape, held(None)))  # the compiler gave up
    assert parts not in list(changes.candidates(config, shape, held(34 * GIB)))


def test_advice_names_the_axis_where_activations_dominate(small):
    assembly = SimpleNamespace(
        config=small(sequence_length=65_536), mesh=SimpleNamespace(shape=shape_of(fsdp=4, context=2))
    )
    compiled = SimpleNamespace(assembly=assembly)
    (found,) = findings._long_sequences(compiled, held(48 * GIB))
    assert found.line() == (
        "activations take 48 GiB of 70 GiB: a device has 32,768 tokens of each sequence; "
        "mesh.fsdp=2, mesh.context=4, accumulation_steps=2"
    )
    assert findings._long_sequences(compiled, held(20 * GIB)) == []


def test_the_longest_sequence_is_what_growing_temporaries_leave_room_for(small):
    stats = Statistics(2 * GIB, 11 * GIB, 0, 0, 13 * GIB, 0)
    memory = Memory(StateBytes(0, GIB, 0, 0), 0, stats, 0, 10 * GIB, None, 73 * GIB, GIB, (), (), fits=True)
    config = small(sequence_length=131_072)
    # 73 - 2 of arguments - 1 of gradients, over 11 + 1 of doubt - 1 of gradients
    assert context_sizes.longest(config, memory) == int(70 / 11 * 131_072)
    assert context_sizes.longest(small(sequence_length=8_192), memory) is None
    assert context_sizes.longest(config, dataclasses.replace(memory, compiler=None)) is None
    assert context_sizes.longest(config, dataclasses.replace(memory, capacity_bytes=None)) is None
    assert text_report._two_digits(834_094) == 830_000


def test_guesses_of_a_device_fall_with_its_part_of_a_sequence(small):
    """Twice the parts, half as many shards of the batch, twice the microbatches: the same weights, half the rest."""
    model = dataclasses.replace(small().model, vocab_size=128)
    config = small(sequence_length=65_536, model=model, accumulation_steps=1, batch_size=8)
    weights = estimate.weights_of(config)
    before, after = shape_of(fsdp=8), shape_of(fsdp=4, context=2)
    changed = dataclasses.replace(config, accumulation_steps=2)

    def beyond_state(config, shape):
        return estimate.estimate_bytes(config, shape, weights) - estimate.state_bytes(config, shape, weights)

    assert estimate.state_bytes(config, before, weights) == estimate.state_bytes(changed, after, weights)
    assert beyond_state(changed, after) == pytest.approx(beyond_state(config, before) / 2, rel=0.01)


def test_a_guess_of_time_has_the_exchange_on_the_links_that_it_crosses(small):
    config = small(sequence_length=65_536)
    weights = estimate.weights_of(config)
    inside, across = (
        estimate._sending_seconds(config, shape_of(context=4), weights, H100, each)["context"] for each in (8, 2)
    )
    assert across / inside == pytest.approx(H100.link_bytes_per_second / H100.network_bytes_per_second)
    assert "context" not in estimate._sending_seconds(config, shape_of(fsdp=4), weights, H100, 8)
