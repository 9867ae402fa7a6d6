"""Pairs of answers: what lines become, which are refused, and what the loss is, computed from logits by NumPy."""

import dataclasses
import json
import pathlib

import jax
import numpy as np
import pytest

from meshtrain.assembly.assemble import assemble
from meshtrain.config.resolve import resolve
from meshtrain.data.sources import DataRequest
from meshtrain.data.tokenizer import byte_tokenizer
from meshtrain.errors import UserError
from meshtrain.examples.preferences import PreferenceData, generate_pairs, open_each, open_pairs
from meshtrain.examples.preferences_task import policy_of, reference_of
from meshtrain.hf.config_json import describe_model
from meshtrain.models.task import SEQUENCE_INDEX
from meshtrain.run.initial_state import initial_state
from tests.parity.runs import by_path, sizes

FIXTURES = pathlib.Path(__file__).parents[1] / "hf" / "fixtures"
SIZES = {"num_layers": 2, "embed_dim": 16, "mlp_dim": 24, "num_heads": 2, "num_kv_heads": 2, "init_std": 0.5}
PAIR = {"prompt": "a: ", "chosen": "yes", "rejected": "not at all"}


def options(tmp_path, *lines, **changes):
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return PreferenceData(source="preferences", path=str(path), **changes)


def opened(given, sequence_length=32):
    return open_pairs(given, DataRequest({}, {}, sequence_length, 300, 0))


def test_a_row_has_both_texts_and_counts_their_answers(tmp_path):
    data = opened(options(tmp_path, PAIR, PAIR | {"prompt": "b: "}, validation_fraction=0.5))
    assert (len(data.train), len(data.validation)) == (1, 1)
    row, end = data.train[0], byte_tokenizer().end_id
    chosen, rejected = (row["segment_ids"] == one for one in (1, 2))
    assert bytes(row["tokens"][chosen].tolist()) == b"a: yes"
    assert bytes(row["tokens"][rejected].tolist()) == b"a: not at all"
    assert row["targets"][chosen & (row["weights"] > 0)].tolist() == [*b"yes", end]
    assert row["targets"][rejected & (row["weights"] > 0)].tolist() == [*b"not at all", end]
    assert row["positions"][rejected].tolist() == list(range(13))
    assert data.prompts == ["b: "]


def test_of_messages_the_last_answer_counts(tmp_path):
    before = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    turns = [*before, {"role": "user", "content": "three"}]
    last = [[{"role": "assistant", "content": text}] for text in ("four", "five")]
    given = (
        {"prompt": turns, "chosen": last[0], "rejected": last[1]},
        {"prompt": "what a list below begins with", "chosen": turns + last[0], "rejected": turns + last[1]},
    )
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}")
    both = options(tmp_path, *given, chat_template=str(template), validation_fraction=0.0)
    for row in (examples := opened(both, 64).train)[0], examples[1]:
        assert bytes(row["targets"][row["weights"] > 0].tolist()) == b"a:four;a:five;"


BROKEN = [
    (PAIR | {"chosen": "not at all"}, "line 2: got equal answers"),
    (PAIR | {"chosen": "y" * 30}, "line 2: got 46 tokens of both answers with their prompt; allowed: at most "
     "sequence_length=32; nearest: sequence_length=46"),
    (PAIR | {"rejected": ""}, "line 2: got \"\" for 'rejected'"),
    (PAIR | {"rejected": ["no"]}, "line 2: got [\"no\"] for 'rejected'"),
    ({"prompt": "a", "chosen": "b", "reject": "c"}, "did you mean 'reject'?"),
    ({"chosen": "b", "rejected": "c"}, "line 2: got null for 'prompt'"),
    ({"prompt": [{"role": "user", "content": "a"}], "chosen": [], "rejected": [{"role": "assistant", "content": "c"}]},
     "line 2: got no assistant message for 'chosen'"),
    ("{", "line 2: got not JSON in UTF-8"),
    ([], "line 2: got list; allowed: a JSON object with 'prompt', 'chosen' and 'rejected'"),
]  # fmt: skip


@pytest.mark.parametrize("line, said", BROKEN, ids=[said[:30] for _, said in BROKEN])
def test_a_line_that_is_no_pair_is_one_line_with_its_number(tmp_path, line, said):
    with pytest.raises(UserError) as error:
        opened(options(tmp_path, PAIR, line))
    [problem] = error.value.problems
    assert said in problem
    assert "pairs.jsonl, line 2: " in problem


def test_ten_lines_are_said_and_the_others_counted(tmp_path):
    with pytest.raises(UserError) as error:
        opened(options(tmp_path, *[PAIR | {"chosen": number} for number in range(13)]))
    assert len(error.value.problems) == 11
    assert error.value.problems[-1] == "... and 3 more like these"


def test_an_evaluation_has_every_pair_of_a_file(tmp_path):
    parts = open_each(options(tmp_path, *[PAIR] * 5), DataRequest({}, {}, 32, 300, 0))
    assert {path.rpartition("/")[2]: len(one) for path, one in parts.items()} == {"pairs.jsonl": 5}


def test_pairs_made_here_prefer_the_digits_of_the_prompt_in_order():
    kinds = set()
    for pair in list(generate_pairs())[:50]:
        (prompt, chosen), (_, rejected) = (line.pair for line in pair.texts)
        digits = prompt.removesuffix(" sorted: ")
        assert list(chosen) == sorted(digits)
        assert rejected != chosen
        kinds.add((sorted(rejected) == sorted(digits), list(rejected) == sorted(rejected)))
    assert kinds == {(True, False), (False, True)}


def configured(**changes):
    given = {"task": "preferences", "batch_size": 2, "sequence_length": 64, "data": {"source": "preferences"}}
    model = SIZES | {"dropout_rate": 0.0, "vocab_size": 300, "beta": 0.3} | changes.pop("model", {})
    return resolve(given | {"model": model} | changes)


def log_probability(assembly, params, row, segment):
    """The log-probability of an answer whose text stands alone in its row, and its number of tokens."""
    inside = row["segment_ids"] == segment
    alone = {name: np.pad(array[inside], (0, 64 - inside.sum())) for name, array in row.items()}
    batch = {name: np.stack([array, array]) for name, array in alone.items()}
    logits = np.asarray(assembly.task.logits(params, {**batch, SEQUENCE_INDEX: np.arange(2)}))[0].astype(np.float64)
    of_tokens = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return of_tokens[np.arange(64), alone["targets"]] @ alone["weights"], alone["weights"].sum()


@pytest.mark.parametrize("kind", ["sigmoid", "ipo"])
def test_the_loss_is_that_of_the_papers(tmp_path, kind):
    config = configured(model={"preference_loss": kind})
    assembly = assemble(config, sizes(), jax.devices()[:1])
    state = assembly.steps.init(jax.random.key_data(jax.random.key(0)))
    # The policy is another model than the reference.
    generator = np.random.default_rng(1)
    moved = jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf if "frozen" in str(path) else leaf + 0.05 * generator.normal(size=leaf.shape),
        state.params,
    )
    row = opened(options(tmp_path, PAIR, validation_fraction=0.0), 64).train[0]
    empty = {name: np.zeros_like(array) for name, array in row.items()}  # what fills up an evaluation's last batch
    batch = {name: np.stack([row[name], empty[name]]) for name in row} | {SEQUENCE_INDEX: np.arange(2)}
    loss, weight, metrics = assembly.task.loss(moved, batch, jax.random.key(0), False)
    pairs = [[log_probability(assembly, params, row, one) for one in (1, 2)] for params in (moved, state.params)]
    gains = [pairs[0][number][0] - pairs[1][number][0] for number in (0, 1)]
    means = [gains[number] / pairs[0][number][1] for number in (0, 1)]
    margin = gains[0] - gains[1]
    wanted = np.log1p(np.exp(-0.3 * margin)) if kind == "sigmoid" else (means[0] - means[1] - 1 / 0.6) ** 2
    assert abs(margin) > 0.1
    assert float(loss) == pytest.approx(wanted, rel=1e-5)
    assert float(weight) == 1
    assert float(metrics["reward_margin"]) == pytest.approx(0.3 * margin, rel=1e-4)
    assert float(metrics["accuracy"]) == float(margin > 0)


def test_the_reference_is_what_a_run_begins_with():
    folder = FIXTURES / "llama"
    model = dataclasses.asdict(describe_model(folder, "").options)
    config = configured(model=model, init_from=str(folder), sequence_length=24, data={"source": "json:loads"})
    params = by_path(initial_state(assemble(config, sizes(), jax.devices()[:1])).params)
    copies = {path: leaf for path, leaf in params.items() if "frozen" in path}
    assert len(copies) == len(params) / 2
    for path, leaf in copies.items():
        np.testing.assert_array_equal(leaf, params[path.replace("frozen/", "")], err_msg=path)
    embeddings = np.asarray(params["embedding/table"])
    other = initial_state(assemble(dataclasses.replace(config, init_from=""), sizes(), jax.devices()[:1])).params
    assert not np.array_equal(embeddings, other["embedding"]["table"])


def test_beneath_adapters_is_the_reference():
    group = {"attention": {"query": 1, "query_lora_a": 2, "query_lora_b": 3}, "norm": 4}
    assert reference_of(group) == {"attention": {"query": 1}, "norm": 4}
    assert policy_of(group) == group


def test_what_would_spoil_the_reference_is_refused(tmp_path):
    with pytest.raises(UserError) as error:
        configured(model={"within_documents": False}, lora={"rank": 2}, optimizer={"trainable": "norm"})
    assert [line.partition(":")[0] for line in error.value.problems] == [
        "model.within_documents", "optimizer.trainable"
    ]  # fmt: skip
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="init_from: got adapters to be merged; allowed with task=preferences: weights"):
        configured(init_from=str(tmp_path))
