"""Tasks with logits and no cache: one pass over the last tokens for each new one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from meshtrain.generation import token_loop
from meshtrain.generation.sampling import Sampling, choose, row_keys
from meshtrain.generation.token_loop import Generator, Request
from meshtrain.generation.window import batch_of, by_window
from meshtrain.models.task import Decode, token_batch
from meshtrain.sharding.mesh import make_mesh
from meshtrain.sharding.rules import AXES, LayoutOptions, default_rules
from tests.quick import QUICK

VOCABULARY = 31


def logits(params, batch):
    """The next token is a number made of the ones up to here and of their places, seen from the window."""
    place = jnp.arange(1, batch["tokens"].shape[1] + 1) * batch["weights"].astype(jnp.int32)
    number = jnp.cumsum(batch["tokens"] * place + batch["positions"] * params, axis=1) % VOCABULARY
    return jax.nn.one_hot(number, VOCABULARY)


def written_out(prompt, num_tokens, length):
    tokens = list(prompt)[-max(length - 1, 1) :]
    for _ in range(num_tokens):
        recent = np.asarray(tokens[-length:])
        places = np.arange(1, len(recent) + 1)
        tokens.append(int((recent * places + (places - 1) * 3).sum() % VOCABULARY))
    return tokens[-num_tokens:]


def drawn(generator, requests, num_tokens, sampling=Sampling(), seed=0):  # noqa: B008  frozen
    """The tokens of each request."""
    tokens = [[] for _ in requests]

    def take(index, ids, is_last):
        tokens[index] += ids
        return False

    generator.draw(requests, num_tokens, sampling, seed, take)
    return tokens


@pytest.mark.parametrize("length", [1, 4, 8])
def test_each_token_follows_those_in_its_window(length):
    shape = dict.fromkeys(AXES, 1) | {"data": 2}
    mesh = make_mesh(shape, jax.devices()[:2])
    decode = by_window(logits, token_batch(8, length))
    generator = Generator(decode, jnp.int32(3), mesh, default_rules(LayoutOptions()), end_ids=(-1,))
    prompts = [[3, 1], [5, 2, 9, 4, 7, 7, 1, 2, 30], [11]]  # shorter and longer than a window
    found = drawn(generator, [Request(prompt) for prompt in prompts], 20)
    assert found == [written_out(prompt, 20, length) for prompt in prompts]
    assert any(len(set(tokens)) > 4 for tokens in found) or length == 1, "what repeats itself shows little"


def test_each_end_token_ends_a_text():
    """The most probable token is one more than the last: 3, 4, 5, ... up to the first of the ends."""

    def counting(params, batch):
        return jax.nn.one_hot(batch["tokens"] + 1, VOCABULARY)

    mesh = make_mesh(dict.fromkeys(AXES, 1), jax.devices()[:1])
    decode = by_window(counting, token_batch(2, 4))
    generator = Generator(decode, jnp.int32(0), mesh, default_rules(LayoutOptions()), (-1, 6, 3), QUICK)
    assert drawn(generator, [Request([3]), Request([1])], 8) == [[4, 5], [2]]


def test_a_cache_may_be_empty():
    """The next token is one more than the last: nothing else has to be kept."""

    def following(tokens):
        return jax.nn.one_hot(tokens + 1, VOCABULARY)

    decode = Decode(
        prefill=lambda params, tokens, lengths, cache: (following(tokens[jnp.arange(len(tokens)), lengths - 1]), cache),
        step=lambda params, tokens, cache: (following(tokens), cache),
        cache=lambda num_rows, prompt_length, num_steps: {},
    )
    mesh = make_mesh(dict.fromkeys(AXES, 1), jax.devices()[:1])
    generator = Generator(decode, jnp.int32(0), mesh, default_rules(LayoutOptions()), (6,), QUICK)
    assert drawn(generator, [Request([3]), Request([9, 1])], 3) == [[4, 5], [2, 3, 4]]


@pytest.mark.parametrize("most_bytes", [token_loop.MOST_CACHE_BYTES, 1], ids=["one batch", "a batch for each"])
def test_random_numbers_are_those_of_prompt_sample_and_position(monkeypatch, most_bytes):
    monkeypatch.setattr(token_loop, "MOST_CACHE_BYTES", most_bytes)
    flat = by_window(lambda params, batch: jnp.zeros((*batch["tokens"].shape, VOCABULARY)), token_batch(8, 4))
    mesh = make_mesh(dict.fromkeys(AXES, 1), jax.devices()[:1])
    generator = Generator(
        flat, jnp.int32(0), mesh, default_rules(LayoutOptions()), end_ids=(5,), compiler_options=QUICK
    )
    requests = [Request([1], prompt, sample) for prompt, sample in ((0, 0), (0, 1), (4, 2))]
    found = drawn(generator, requests, 20, Sampling(1.0), 8)
    keys = row_keys(jax.random.key(8), jnp.asarray([0, 0, 4]), jnp.asarray([0, 1, 2]))
    every = [choose(jnp.zeros((3, VOCABULARY)), keys, jnp.int32(index), Sampling(1.0)) for index in range(20)]
    assert generator.compiled.cache_info().currsize == 1
    expected = np.stack(every, axis=1).tolist()
    assert any(5 in row for row in expected)
    assert found == [row[: row.index(5)] if 5 in row else row for row in expected]


def test_weights_are_cast_before_the_loop_with_their_shardings():
    mesh = make_mesh(dict.fromkeys(AXES, 1) | {"fsdp": 2}, jax.devices()[:2])
    split = NamedSharding(mesh, PartitionSpec("fsdp"))
    cast = dataclasses.replace(by_window(logits, token_batch(8, 4)), cast=lambda weights: weights.astype(jnp.bfloat16))
    given = jax.device_put(np.ones(4, np.float32), split)
    generator = Generator(cast, given, mesh, default_rules(LayoutOptions()), end_ids=(-1,))
    assert generator.params.dtype == jnp.bfloat16
    assert generator.params.sharding == split


def test_a_window_is_one_document():
    batch = batch_of(jnp.zeros((2, 3), jnp.int32), ["tokens", "positions", "segment_ids"])
    assert sorted(batch) == ["positions", "segment_ids", "tokens"]
    assert batch["positions"].tolist() == [[0, 1, 2]] * 2
    assert batch["segment_ids"].tolist() == [[1, 1, 1]] * 2
