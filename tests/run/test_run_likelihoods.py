"""Likelihoods of continuations, packed and batched, are those of each text by itself; each token counts once."""

import dataclasses

import jax
import numpy as np
import pytest

from meshtrain.assembly.assemble import assemble
from meshtrain.assembly.facts import stored_params
from meshtrain.checkpoint.other_runs import restore_params
from meshtrain.config.tasks import abstract_task
from meshtrain.run import likelihoods
from meshtrain.run.likelihoods import Window, scorer, windows
from meshtrain.sharding.rules import AXES

T = 32
DATA_AND_TENSOR = dict.fromkeys(AXES, 1) | {"data": 2, "tensor": 2}


def ids(text):
    return list(text.encode())


# Of all lengths around a row's; the last continuations are longer than a row.
TEXTS = [
    (ids("def f1(x"), ids("):\n")),
    (ids("d"), ids("ef f2(x):\n    return x + 4\n")),
    (ids("def f3(x):\n    return x + 9\n") * 2, ids("def")),
    (ids("x" * 40), ids("y" * 30)),
    (ids("a"), []),
    *((ids("r"), ids("eturn x"[:number])) for number in range(1, 8)),
    ([256], ids("def f4(x):\n    return x + 3\n") * 3),
    (ids("def f5"), ids("(x):\n    return x + 12\n") * 3),
]


def plainly(assembly, params, context, continuation):
    """The same by one forward pass for each token, which sees the T tokens before it or fewer."""
    whole, total, is_greedy = [*context, *continuation], 0.0, True
    for start in range(len(context), len(whole), T):
        stop = min(start + T, len(whole))
        inputs = whole[max(stop - T - 1, 0) : stop - 1]
        batch = {name: np.zeros(entry.shape, entry.dtype) for name, entry in assembly.batch.items()}
        for name, row in (("tokens", inputs), ("positions", range(len(inputs))), ("segment_ids", [1] * len(inputs))):
            batch[name][0, : len(inputs)] = list(row)
        logits = np.asarray(assembly.steps.logits(params, batch), np.float64)[0, : len(inputs)][start - stop :]
        targets = whole[start:stop]
        logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        total += logs[np.arange(len(targets)), targets].sum()
        is_greedy &= logits.argmax(-1).tolist() == targets
    return total, is_greedy


@pytest.fixture(scope="module")
def scored(straight):
    """Assembly, weights and likelihoods of the texts, and how often batches were scored."""
    assembly, params = straight.result.assembly, straight.result.state.params
    score, calls = scorer(assembly), []

    def counted(params, batch):
        calls.append(jax.tree.map(np.asarray, batch))
        return score(params, batch)

    return assembly, params, likelihoods.likelihoods(assembly, counted, params, TEXTS), calls, score


def test_packed_texts_are_as_probable_as_alone(scored):
    assembly, params, found, calls, _ = scored
    wanted = [plainly(assembly, params, *pair) for pair in TEXTS]
    np.testing.assert_allclose([one.log_probability for one in found], [total for total, _ in wanted], rtol=1e-5)
    assert [one.is_greedy for one in found] == [is_greedy for _, is_greedy in wanted]
    for batch in calls:
        starts = np.diff(batch["segment_ids"], axis=1, prepend=0) > 0
        counted = np.diff(batch["positions"], axis=1, prepend=-1)
        assert (batch["positions"][starts] == 0).all()
        assert (counted[~starts & (batch["segment_ids"] > 0)] == 1).all()
    assert len(calls) == 2, "seventeen windows, one in each row, would be three batches"


def test_other_texts_compile_nothing(scored):
    assembly, params, _, _, score = scored
    compiled = []

    def note(name, seconds, **what):
        if name == "/jax/core/compile/jaxpr_to_mlir_module_duration":
            compiled.append(what)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        likelihoods.likelihoods(assembly, score, params, TEXTS[:1])
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    assert not compiled


def test_a_text_that_the_model_would_write_is_greedy(scored):
    assembly, params, _, _, score = scored
    text = ids("def f1(x):")
    for _ in range(6):
        batch = {name: np.ones(entry.shape, entry.dtype) for name, entry in assembly.batch.items()}
        batch["tokens"][0, : len(text)], batch["positions"][0] = text, range(T)
        text.append(int(np.asarray(assembly.steps.logits(params, batch))[0, len(text) - 1].argmax()))
    other = [*text[:-1], (text[-1] + 1) % 256]
    pairs = [(text[:10], text[10:]), (other[:10], other[10:]), (text[:15], text[15:])]
    found = likelihoods.likelihoods(assembly, score, params, pairs)
    assert [one.is_greedy for one in found] == [True, False, True]


def test_a_mesh_changes_no_likelihood(straight, scored):
    config = dataclasses.replace(scored[0].config, mesh=dataclasses.replace(scored[0].config.mesh, fsdp=1))
    other = assemble(config, DATA_AND_TENSOR, jax.devices()[:4])
    params = stored_params(other, restore_params(straight.directory, None, other.states.kept.params)[0])
    found = likelihoods.likelihoods(other, scorer(other), params, TEXTS)
    own = [one.log_probability for one in scored[2]]
    np.testing.assert_allclose([one.log_probability for one in found], own, rtol=1e-5)


def test_texts_share_rows_only_where_they_do_not_see_each_other(scored):
    config = scored[0].config
    assert scored[0].task.attends_within_segments
    blind = abstract_task(dataclasses.replace(config, model=dataclasses.replace(config.model, within_documents=False)))
    assert not blind.attends_within_segments
    placed = dataclasses.replace(scored[0].placed, task=blind)
    assembly, calls = dataclasses.replace(scored[0], placed=placed), []

    def score(params, batch):
        calls.append(batch)
        assert np.asarray(batch["segment_ids"]).max() <= 1
        return np.zeros((8, T)), np.zeros((8, T))

    likelihoods.likelihoods(assembly, score, None, [(ids("a"), ids("bc"))] * 20)
    assert len(calls) == 3


def test_windows_hold_as_much_context_as_fits():
    digits = list(range(10))
    assert list(windows(0, [99], digits, 4)) == [
        Window([99, 0, 1, 2, 3], 4, 0),
        Window([3, 4, 5, 6, 7], 4, 0),
        Window([5, 6, 7, 8, 9], 2, 0),
    ]
    assert list(windows(1, digits[:8], digits[8:], 4)) == [Window([5, 6, 7, 8, 9], 2, 1)]
    assert list(windows(2, [0], [1], 4)) == [Window([0, 1], 1, 2)]
    assert list(windows(3, digits, [], 4)) == []


def test_a_task_without_logits_or_with_another_batch_is_one_line(scored):
    assembly = scored[0]
    assert likelihoods.problems_of_task(assembly) == []
    mute = dataclasses.replace(assembly.placed, task=dataclasses.replace(assembly.task, logits=None))
    [line] = likelihoods.problems_of_task(dataclasses.replace(assembly, placed=mute))
    assert line.startswith("task: got a task without logits; allowed for likelihoods: ")
    other = dataclasses.replace(assembly.states, batch={"tokens": None, "images": None})
    [line] = likelihoods.problems_of_task(dataclasses.replace(assembly, states=other))
    assert line.startswith("task: got a batch of tokens, images; allowed for likelihoods: tokens, targets, ")
