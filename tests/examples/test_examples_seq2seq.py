"""An encoder-decoder: what a token sees, that packed pairs do not see each other, and what exact match counts."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import meta

from meshtrain.examples.pairs import pack_pairs
from meshtrain.examples.seq2seq import SOURCE, TARGET, Seq2SeqOptions, side_keys, sinusoids
from meshtrain.examples.seq2seq_task import seq2seq
from meshtrain.models.task import SEQUENCE_INDEX
from meshtrain.plan.cluster.traced_flops import traced_flops

S, T, VOCABULARY = 18, 16, 20
OPTIONS = Seq2SeqOptions(
    num_encoder_layers=1,
    num_layers=2,
    embed_dim=16,
    mlp_dim=32,
    num_heads=2,
    source_length=S,
    vocab_size=VOCABULARY,
    vocab_multiple=8,
    dropout_rate=0.0,
)
OTHER = dataclasses.replace(
    OPTIONS,
    positions="rotary",
    norm="rmsnorm",
    norm_placement="post",
    activation="swiglu",
    tied_embeddings=False,
    biases=False,
)
PAIRS = [([3, 4, 5], [6, 7]), ([8, 9], [10, 11, 12, 13]), ([14, 14, 15, 16], []), ([17], [18, 19, 1])]


@pytest.fixture(scope="module", params=[OPTIONS, OTHER], ids=["vaswani", "others"])
def model(request):
    """(task, random parameters, jitted logits)."""
    task, generator = seq2seq(request.param, batch_size=2, sequence_length=T), np.random.default_rng(0)
    shapes = meta.unbox(jax.eval_shape(task.init, jax.random.key(0)))
    params = jax.tree.map(lambda leaf: 0.3 * generator.standard_normal(leaf.shape, np.float32), shapes)
    return task, params, jax.jit(task.logits)


def batch_of(*examples):
    stacked = {name: np.stack([example[name] for example in examples]) for name in examples[0]}
    return {**stacked, SEQUENCE_INDEX: np.arange(len(examples), dtype=np.int32)}


def example_of(pairs, source_length=S, target_length=T):
    [example] = pack_pairs(pairs, source_length=source_length, target_length=target_length)
    return example


def test_packed_pairs_do_not_see_each_other(model):
    _, params, logits = model
    together, alone = example_of(PAIRS), example_of(PAIRS[1:2])
    both = np.asarray(logits(params, batch_of(together, alone)))[..., :VOCABULARY]
    first, length = len(PAIRS[0][1]) + 1, len(PAIRS[1][1]) + 1
    np.testing.assert_allclose(both[0, first : first + length], both[1, :length], rtol=2e-5, atol=2e-5)


def test_a_target_sees_all_of_its_source_and_the_targets_before_it(model):
    _, params, logits = model
    usual = example_of(PAIRS)
    other_source = example_of([*PAIRS[:1], ([8, 1], PAIRS[1][1]), *PAIRS[2:]])  # its last token
    other_target = example_of([*PAIRS[:1], (PAIRS[1][0], [10, 11, 1, 13]), *PAIRS[2:]])  # its third of four
    a, b = np.asarray(logits(params, batch_of(usual, other_source)))[..., :VOCABULARY]
    c, _ = np.asarray(logits(params, batch_of(other_target, usual)))[..., :VOCABULARY]
    by_source, by_target = (np.abs(a - other).max(axis=-1) > 1e-4 for other in (b, c))
    assert list(np.flatnonzero(by_source)) == [3, 4, 5, 6, 7], "all targets of the pair, and no other's"
    assert list(np.flatnonzero(by_target)) == [6, 7], "the inputs from that token on"


def test_tokens_of_a_source_see_each_other(model):
    task, params, _ = model
    encode = functools.partial(task.loss.__self__.encode, train=False)
    batch = batch_of(example_of(PAIRS), example_of([*PAIRS[:1], ([8, 1], PAIRS[1][1]), *PAIRS[2:]]))
    states, _ = jax.jit(encode)(params, batch, jax.random.split(jax.random.key(0), 2))
    differs = np.abs(states[0] - states[1]).max(axis=-1) > 1e-4
    assert list(np.flatnonzero(differs)) == [4, 5, 6], "those of the source, and no others"


def greedily(task, params, logits, sources, num_tokens):
    """The target that each source gets, one token after the other, from the whole forward pass."""
    targets = [[] for _ in sources]
    for _ in range(num_tokens):
        examples = [example_of([pair]) for pair in zip(sources, targets, strict=True)]
        scores = np.asarray(logits(params, batch_of(*examples)))
        for row, target in enumerate(targets):
            target.append(int(scores[row, len(target), :VOCABULARY].argmax()))
    return targets


def test_exact_match_is_what_greedy_decoding_gets_right(model):
    task, params, logits = model
    sources = [[3, 4, 5], [8, 9]]
    decoded = greedily(task, params, logits, sources, 4)
    loss = jax.jit(functools.partial(task.loss, train=False))

    def right(*targets):
        # The last token of a pair is the one that the data end it with: here, whatever the model says.
        rows = []
        for pairs in targets:
            row = example_of([(sources[number], target[:-1]) for number, target in pairs])
            ends = np.cumsum([len(target) for _, target in pairs]) - 1
            row["targets"][ends] = [target[-1] for _, target in pairs]
            rows.append(row)
        _, _, metrics = loss(params, batch_of(*rows), jax.random.key(0))
        return tuple(float(part) for part in metrics["exact_match"])

    wrong = [decoded[0][0], (decoded[0][1] + 1) % VOCABULARY, *decoded[0][2:]]
    assert right([(0, decoded[0]), (1, decoded[1])], [(0, decoded[0][:2])]) == (3, 3)
    assert right([(0, wrong), (1, decoded[1])], [(0, decoded[0])]) == (2, 3)


def test_cached_logits_are_those_of_the_whole_pairs(model):
    task, params, logits = model
    sources, targets = [PAIRS[0][0], PAIRS[1][0]], np.array([[6, 7, 5, 4], [10, 11, 12, 13]])
    rows = [example_of([(source, target)]) for source, target in zip(sources, targets.tolist(), strict=True)]
    expected = np.asarray(logits(params, batch_of(*rows)))
    prompts = np.array([[*source, *[19] * (4 - len(source))] for source in sources], np.int32)
    lengths, num_steps = np.array([len(source) for source in sources], np.int32), targets.shape[1]
    cache = {name: jnp.zeros(e.shape, e.dtype) for name, e in task.decode.cache(2, 4, num_steps).items()}
    shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), cache)
    got, cache = jax.jit(task.decode.prefill)(params, prompts, lengths, cache)
    step = jax.jit(task.decode.step)
    for place in range(num_steps + 1):
        wanted = expected[:, place]
        real = np.isfinite(wanted)
        assert np.array_equal(np.isfinite(got), real)
        np.testing.assert_allclose(got[real], wanted[real], rtol=0, atol=1e-5 * np.abs(wanted[real]).max())
        if place < num_steps:
            got, cache = step(params, targets[:, place].astype(np.int32), cache)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), cache) == shapes
    assert step._cache_size() == 1, "one compiled step serves all positions"


def test_a_cache_begins_with_the_begin_token_and_weights_are_cast_once():
    options = dataclasses.replace(OPTIONS, begin_id=3, positions="learned")
    task = seq2seq(options, batch_size=2, sequence_length=T, dtype=jnp.bfloat16)
    entries = task.decode.cache(2, 5, 7)
    assert entries["keys"].shape == (2, 2, 8, 2, 8)
    assert entries["memory_keys"].shape == (2, 2, 6, 2, 8)
    assert {entries[f"{side}{name}"].dtype for side in ("", "memory_") for name in ("keys", "values")} == {jnp.bfloat16}
    assert (task.decode.max_prompt, task.decode.max_positions, task.decode.continues) == (S - 1, T, False)
    cast = jax.eval_shape(task.decode.cast, abstract_inputs(task)[0])
    dtypes = {jax.tree_util.keystr(path): leaf.dtype for path, leaf in jax.tree_util.tree_leaves_with_path(cast)}
    assert {dtype for path, dtype in dtypes.items() if "norm" in path} == {jnp.dtype(jnp.float32)}
    assert {dtype for path, dtype in dtypes.items() if "norm" not in path} == {jnp.dtype(jnp.bfloat16)}


def abstract_inputs(task):
    """(parameters, batch) of a task, as shapes."""
    batch = {name: jax.ShapeDtypeStruct(entry.shape, entry.dtype) for name, entry in task.batch.items()}
    batch[SEQUENCE_INDEX] = jax.ShapeDtypeStruct((2,), jnp.int32)
    return meta.unbox(jax.eval_shape(task.init, jax.random.key(0))), batch


def test_exact_match_costs_nothing_in_training():
    task = seq2seq(OPTIONS, batch_size=2, sequence_length=T)
    losses = [
        jax.eval_shape(functools.partial(task.loss, train=train), *abstract_inputs(task), jax.random.key(0))
        for train in (True, False)
    ]
    assert [list(metrics) for _, _, metrics in losses] == [[], ["exact_match"]]


def test_the_sides_of_a_sequence_drop_out_different_numbers():
    keys = jax.random.split(jax.random.key(0), 3)
    found = [jax.random.key_data(side_keys(keys, side)) for side in (SOURCE, TARGET)]
    assert len(np.unique(np.concatenate(found), axis=0)) == 6


def test_sinusoids_are_those_of_the_paper():
    positions, embed_dim = np.arange(7)[None], 6
    found = np.asarray(sinusoids(jnp.asarray(positions), embed_dim))
    for position in range(7):
        for i in range(3):
            angle = position / 10000 ** (2 * i / embed_dim)
            np.testing.assert_allclose(found[0, position, 2 * i : 2 * i + 2], [np.sin(angle), np.cos(angle)], atol=1e-6)


def leaves(options, target_length=T):
    task = seq2seq(options, batch_size=2, sequence_length=target_length)
    shapes = meta.unbox(jax.eval_shape(task.init, jax.random.key(0)))
    flat, _ = jax.tree.flatten_with_path(shapes)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf.shape for path, leaf in flat}


def test_each_option_has_its_weights():
    usual, other = leaves(OPTIONS), leaves(OTHER)
    learned = leaves(dataclasses.replace(OPTIONS, positions="learned"))
    assert usual["embedding/table"] == (24, 16)
    assert {path for path in usual if path.split("/")[1] != "layers"} == {
        "embedding/table",
        *(f"{stack}/end/norm/{name}" for stack in ("encoder", "decoder") for name in ("bias", "scale")),
    }
    assert {path for path in other if path.split("/")[1] != "layers"} == {
        "embedding/source_table", "embedding/target_table", "head/kernel"
    }  # fmt: skip
    assert other["head/kernel"] == (16, 24)
    assert "decoder/layers/mlp/gate" in other
    assert not any("bias" in path for path in other)
    assert learned.keys() - usual.keys() == {"embedding/source_positions", "embedding/target_positions"}
    assert (learned["embedding/source_positions"], learned["embedding/target_positions"]) == ((S, 16), (T, 16))


def test_the_stated_flops_are_those_of_the_products():
    options = dataclasses.replace(OPTIONS, vocab_multiple=1, tied_embeddings=False, activation="swiglu")
    task = seq2seq(options, batch_size=2, sequence_length=T)
    params, batch = abstract_inputs(task)
    loss = lambda params, batch: task.loss(params, batch, jax.random.key(0), True)[0]  # noqa: E731
    traced = traced_flops(jax.make_jaxpr(jax.grad(loss))(params, batch).jaxpr, {})
    assert traced == task.flops_per_token * task.num_units
    num_weights = sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(params))
    assert task.num_parameters == num_weights
