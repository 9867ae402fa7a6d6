"""A decoder's texts: the same on every mesh and in every batch, greedy ones those of the whole forward pass."""

import functools

import jax
import numpy as np
import pytest
from flax.core import meta

from meshtrain.assembly.assemble import assemble
from meshtrain.assembly.facts import stored_params
from meshtrain.config import default, resolve
from meshtrain.generation.sampling import Sampling
from meshtrain.generation.token_loop import NOTHING, Request, round_length
from meshtrain.run.generating import fold_pipeline, generator
from meshtrain.sharding.rules import AXES
from meshtrain.step.shardings import shardings
from tests.quick import QUICK

NUM_TOKENS, END = 20, 7  # more than one call
RANDOM = Sampling(temperature=1.0, top_k=12, top_p=0.9)
PROMPTS = ([3, 1, 4, 1, 5, 9], [2])
REQUESTS = [Request(ids, prompt, sample) for prompt, ids in enumerate(PROMPTS) for sample in range(2)]
MESHES = {
    "one device": {},
    "data 2 x fsdp 2 x context 2": {"data": 2, "fsdp": 2, "context": 2},
    "tensor 2, the sequence split in training": {"tensor": 2},
    "fsdp 4, weights gathered": {"fsdp": 4},
}


def assembled(**sizes):
    config = default()
    config.batch_size, config.sequence_length = 4, 32
    config.model.num_layers, config.model.embed_dim, config.model.mlp_dim = 4, 16, 32
    config.model.num_heads, config.model.num_kv_heads = 4, 2
    config.model.vocab_size, config.model.vocab_multiple, config.model.init_std = 40, 8, 0.3
    config.data.source = "synthetic"
    config.layout.sequence_parallel = "tensor" in sizes
    config.mesh.update(sizes)
    if "pipeline" in sizes:
        config.pipeline.schedule, config.pipeline.num_chunks, config.pipeline.num_microbatches = (
            "interleaved_1f1b",
            2,
            2,
        )
    resolved = resolve(config)
    shape = dict.fromkeys(AXES, 1) | sizes
    return assemble(resolved, shape, jax.devices()[: int(np.prod(list(shape.values())))])


@pytest.fixture(scope="module")
def weights():
    """The same weights for every mesh, as NumPy arrays in layer order."""
    init = jax.jit(assembled().task.init, compiler_options=QUICK)
    return jax.tree.map(np.asarray, meta.unbox(init(jax.random.key(1))))


@pytest.fixture(scope="module")
def generator_on(weights):
    """A function: name of a mesh -> the generator there."""

    @functools.cache
    def made(name):
        assembly = assembled(**MESHES[name])
        return generator(assembly, jax.device_put(weights, shardings(assembly.state.params)), (END,), QUICK)

    return made


def drawn(made, requests, sampling, num_tokens=NUM_TOKENS):
    tokens = {index: [] for index in range(len(requests))}
    ends = {}

    def take(index, ids, is_last):
        tokens[index] += ids
        ends[index] = is_last
        return False

    made.draw(requests, num_tokens, sampling, 11, take)
    assert all(ends.values())
    return list(tokens.values())


@pytest.fixture(scope="module")
def expected(generator_on):
    return drawn(generator_on("one device"), REQUESTS, RANDOM)


@pytest.mark.parametrize("name", list(MESHES)[1:])
def test_random_texts_are_the_same_on_every_mesh(generator_on, expected, name):
    assert drawn(generator_on(name), REQUESTS, RANDOM) == expected


def test_random_texts_differ_between_samples_and_end_with_the_end_token(expected):
    assert len({tuple(tokens) for tokens in expected}) == len(REQUESTS)
    assert {len(tokens) for tokens in expected} > {NUM_TOKENS}, "some are ended by the end token, some by their length"
    assert not any(END in tokens for tokens in expected)


def test_a_text_does_not_depend_on_its_batch(generator_on, expected):
    made = generator_on("fsdp 4, weights gathered")  # where the batch has four rows anyway
    assert [drawn(made, [request], RANDOM)[0] for request in REQUESTS] == expected


def test_greedy_texts_are_those_of_the_whole_forward_pass(generator_on, weights):
    made, length = generator_on("one device"), 32
    [tokens] = drawn(made, [Request(PROMPTS[0])], Sampling())
    text = [*PROMPTS[0], *tokens]
    filled = np.zeros((1, length), np.int32)
    filled[0, : len(text)] = text
    shape = filled.shape
    batch = {"tokens": filled, "positions": np.arange(length)[None], "segment_ids": np.ones(shape, np.int32)}
    logits = np.asarray(
        assembled().steps.logits(weights, {**batch, "targets": filled, "weights": np.ones(shape, np.float32)})
    )
    best = logits[0].argmax(axis=-1)[len(PROMPTS[0]) - 1 :]
    assert tokens == best[: len(tokens)].tolist()
    assert len(tokens) == NUM_TOKENS or best[len(tokens)] == END
    assert len(set(tokens)) > 4, "what repeats itself shows little"


def test_one_compiled_function_serves_all_positions_and_writes_over_its_cache(generator_on, expected):
    made, shape = generator_on("one device"), (len(REQUESTS), round_length(6))
    prefill, advance = made.compiled(RANDOM, *shape, round_length(NUM_TOKENS))
    numbers = np.ones(shape[0], np.int32)
    before, _ = prefill(made.params, np.zeros(shape, np.int32), numbers, numbers, numbers, np.zeros(2, np.uint32))
    after, drawn = advance(made.params, before, np.zeros(shape[0], bool), 9)
    assert advance._cache_size() == 1
    assert before.cache["keys"].is_deleted()
    assert int(after.index) == 9
    assert (np.asarray(drawn)[:, 8:] == NOTHING).all()


def test_a_text_stops_when_it_is_told_to(generator_on):
    calls = []

    def take(index, ids, is_last):
        calls.append(len(ids))
        return len(calls) == 2

    generator_on("one device").draw([Request([2])], 60, Sampling(), 0, take)
    assert calls == [1, 16]


def test_weights_of_a_pipeline_are_moved_to_a_mesh_without_one(weights):
    assembly = assembled(pipeline=2, data=2)
    in_chunks = jax.device_put(weights, shardings(assembly.states.kept.params))
    moved, move, line = fold_pipeline(assembly)
    params = move(stored_params(assembly, in_chunks))
    assert dict(moved.mesh.shape) == dict.fromkeys(AXES, 1) | {"data": 2, "tensor": 2}
    assert set(moved.mesh.devices.flat) == set(assembly.mesh.devices.flat)
    assert line == "the pipeline of 2 is folded into tensor: data 2 x tensor 2, on the same devices"
    jax.tree.map(np.testing.assert_array_equal, params, weights)
