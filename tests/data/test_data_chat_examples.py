import dataclasses
import json
import pathlib

import numpy as np
import pytest
import tokenizers

from meshtrain.data.chat import Tokens, Written, as_examples, in_spans, open_chat, tokenize
from meshtrain.data.corpus import open_whole
from meshtrain.data.sources import DataOptions, DataRequest
from meshtrain.data.tokenizer import byte_tokenizer, open_tokenizer
from meshtrain.errors import UserError

FOLDER = pathlib.Path(__file__).parents[1] / "hf" / "fixtures" / "chat"


def saved(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def sums(count):
    return [{"prompt": f"{n} + {n} = ", "completion": str(2 * n)} for n in range(count)]


def options(tmp_path, lines, **changes):
    return DataOptions(source="chat", path=saved(tmp_path / "a.jsonl", lines), **changes)


def opened(given, sequence_length=32, vocab_size=512):
    return open_chat(given, DataRequest({"weights": None}, {}, sequence_length, vocab_size, 0))


def num_targets(examples):
    return sum(int((examples[index]["weights"] > 0).sum()) for index in range(len(examples)))


def test_which_tokens_have_a_character_of_an_answer():
    places = np.asarray([[0, 2], [2, 4], [4, 4], [5, 7], [7, 7], [7, 9]])
    assert in_spans(places, ((2, 4),)).tolist() == [0, 1, 1, 0, 0, 0]  # an empty place is that of the blanks before it
    assert in_spans(places, ((3, 7),)).tolist() == [0, 1, 1, 1, 1, 0]
    assert in_spans(places, ((0, 1), (8, 9))).tolist() == [1, 0, 0, 0, 0, 1]
    assert in_spans(places, ((4, 4),)).tolist() == [0] * 6
    assert not in_spans(places, ()).any()
    assert in_spans(places[:0], ((0, 1),)).shape == (0,)


def test_blanks_of_an_answer_count_where_the_tokenizer_trims_places(tmp_path):
    """GPT-2's post-processor takes blanks out of places: an answer's indentation would be lost."""
    loaded = tokenizers.Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    loaded.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)
    loaded.save(str(tmp_path / "tokenizer.json"))
    tokenizer = open_tokenizer(str(tmp_path))
    [tokens] = tokenize(tokenizer, [Written("ab    cd  ef", ((2, 10),), ends=True)])
    answer = tokens.ids[tokens.counted].tolist()
    assert answer[-1] == tokenizer.end_id
    assert tokenizer.decode(answer) == "    cd  "


def test_bytes_of_one_character_belong_together():
    [tokens] = tokenize(byte_tokenizer(), [Written("größe", ((2, 3),), ends=False)])
    assert bytes(tokens.ids[tokens.counted].tolist()).decode() == "ö"


def test_answers_alone_count_and_documents_are_packed_whole(tmp_path):
    data = opened(options(tmp_path, sums(30), validation_fraction=0.0))
    seen = []
    for index in range(len(data.train)):
        row = data.train[index]
        for segment in range(1, row["segment_ids"].max() + 1):
            inside = row["segment_ids"] == segment
            assert row["positions"][inside].tolist() == list(range(inside.sum()))
            tokens, targets, counted = row["tokens"][inside], row["targets"][inside], row["weights"][inside] > 0
            assert tokens[1:].tolist() == targets[:-1].tolist()
            answer = targets[counted].tolist()
            assert answer[-1] == 256, "the end of the answer is learned"
            assert counted[-len(answer) :].all()
            seen.append(bytes(tokens.tolist()).decode() + "|" + bytes(answer[:-1]).decode())
        assert not row["weights"][row["segment_ids"] == 0].any()
    assert sorted(seen) == sorted(f"{n} + {n} = {2 * n}|{2 * n}" for n in range(30))
    assert row["tokens"].dtype == row["positions"].dtype == np.int32
    assert row["weights"].dtype == np.float32
    assert data.text.name == "bytes"
    assert data.prompts == ("0 + 0 = ",)


def test_of_a_conversation_all_answers_count_or_the_last_one(tmp_path):
    said = [("user", "one?"), ("assistant", "1."), ("user", "two?"), ("assistant", "2."), ("user", "thanks")]
    (tmp_path / "a.jinja").write_text("{% for one in messages %}{{ one.content }};{% endfor %}")
    lines = [{"messages": [{"role": role, "content": content} for role, content in said]}, *sums(1)]
    given = options(tmp_path, lines, validation_fraction=0.0, chat_template=str(tmp_path / "a.jinja"))
    last = dataclasses.replace(given, loss_on="last_answer")
    for one, wanted, prompt in ((given, "1.;2.;0", "one?;"), (last, "2.;0", "one?;1.;two?;")):
        data = opened(one)
        [row] = [data.train[index] for index in range(len(data.train))]
        answers = row["targets"][row["weights"] > 0]
        assert bytes(answers[answers < 256].tolist()).decode() == wanted
        assert data.prompts == (prompt,)
    [whole] = open_whole(last, DataRequest({"weights": None}, {}, 32, 512, 0)).values()
    assert num_targets(whole) == num_targets(data.train)
    assert opened(given).fingerprint != data.fingerprint


def test_what_is_truncated_or_dropped_is_counted(tmp_path, capsys):
    lines = [
        *sums(2),
        {"prompt": "x" * 40, "completion": "yes"},  # loses the beginning of its prompt
        {"prompt": "x" * 4, "completion": "y" * 60},  # and of its answer
        {"prompt": "nothing", "completion": ""},
        {"prompt": "", "completion": "z"},
    ]
    data = opened(options(tmp_path, lines, validation_fraction=0.0), sequence_length=16)
    assert capsys.readouterr().err == (
        "meshtrain: WARNING: data.path: 1 of 6 lines lose tokens of answers: sequence_length = 16, and the longest has "
        "65\n"
    )
    assert data.summary.endswith(
        "a.jsonl: 5 + 0 lines in 4 + 0 sequences; 25 of 56 tokens belong to answers; 2 lines truncated, "
        "1 dropped without a token of an answer"
    )
    rows = [data.train[index] for index in range(len(data.train))]
    [truncated] = [row for row in rows if row["tokens"][0] == ord("x")]
    assert bytes(truncated["tokens"].tolist()) == b"x" * 13 + b"yes"
    assert truncated["targets"][truncated["weights"] > 0].tolist() == [*b"yes", 256]
    with pytest.raises(UserError, match=r"got 1 lines for training, of which 1 have no token of an answer within"):
        opened(options(tmp_path, lines[4:5], validation_fraction=0.0))


def test_a_long_line_ends_with_its_last_answer():
    ids, counted = np.arange(40, dtype=np.uint16), np.zeros(40, bool)
    counted[20:24] = True
    fitted = as_examples([Tokens(ids, counted)], 15, byte_tokenizer())
    row = fitted.examples[0]
    assert row["targets"].tolist() == list(range(9, 24))
    assert row["weights"].tolist() == [0] * 11 + [1] * 4
    none = as_examples([Tokens(ids, np.zeros(40, bool))], 15, byte_tokenizer())
    assert (none.num_lines, none.num_truncated, none.num_dropped, len(none.examples)) == (0, 0, 1, 0)
    early = as_examples([Tokens(ids, np.arange(40) == 3)], 15, byte_tokenizer())
    assert early.examples[0]["targets"].tolist() == list(range(1, 16)), "no longer context is lost than must be"


def test_splits_and_the_fingerprint(tmp_path):
    few = opened(options(tmp_path, sums(10), validation_fraction=0.2))
    assert [num_targets(one) for one in (few.train, few.validation)] == [8 * 2 + 3, 2 * 3]
    many = opened(options(tmp_path, sums(300), validation_fraction=0.2))
    turned = opened(options(tmp_path, sums(300)[::-1], validation_fraction=0.2))

    assert 100 < num_targets(many.validation) == num_targets(turned.validation) < num_targets(many.train) / 2
    assert len({few.fingerprint, many.fingerprint, turned.fingerprint}) == 3
    assert opened(options(tmp_path, sums(10), validation_fraction=0.2)).fingerprint == few.fingerprint
    assert opened(options(tmp_path, sums(10), validation_fraction=0.1)).fingerprint != few.fingerprint
    longer = [*sums(9), {"prompt": "9 + 9 = 1", "completion": "8"}]  # the same text, another answer
    assert opened(options(tmp_path, longer, validation_fraction=0.2)).fingerprint != few.fingerprint


def test_conversations_with_a_tokenizers_folder(tmp_path):
    expected = json.loads((FOLDER / "expected.json").read_text())
    given = options(tmp_path, [{"messages": one["messages"]} for one in expected], tokenizer=str(FOLDER))
    data = opened(dataclasses.replace(given, validation_fraction=0.0), sequence_length=64)
    assert data.text.end_id == 2, "<|im_end|>, the folder's eos_token, not the better known <|endoftext|>"
    answers = [data.text.decode(data.train[i]["targets"][data.train[i]["weights"] > 0]) for i in range(len(data.train))]
    assert sorted(answers) == ["four.", "four.", "hello therethe mesh is one line"]
    with pytest.raises(UserError, match=r"model.vocab_size: got 300; allowed for tokenizer .* at least 310"):
        opened(given, vocab_size=300)


def test_broken_lines_of_all_files_and_a_missing_template_come_at_once(tmp_path):
    saved(
        tmp_path / "b.jsonl",
        [{"prompt": 1, "completion": "a"}, *sums(1), {"messages": [{"role": "user", "content": "a"}]}],
    )
    given = options(tmp_path, [{"text": "a"}, *sums(3)])
    with pytest.raises(UserError) as raised:
        opened(dataclasses.replace(given, path=f"{tmp_path}/*.jsonl"))
    assert [problem.split(": got")[0] for problem in raised.value.problems] == [
        f"data.path: {tmp_path}/a.jsonl, line 1",
        f"data.path: {tmp_path}/b.jsonl, line 1",
        "data.chat_template",
    ]


def test_each_file_is_evaluated_whole_and_what_is_lost_is_said(tmp_path, capsys):
    saved(tmp_path / "b.jsonl", [{"prompt": "x" * 40, "completion": "yes"}, {"prompt": "x", "completion": ""}])
    given = dataclasses.replace(options(tmp_path, sums(3)), path=f"{tmp_path}/*.jsonl")
    asked = DataRequest({}, {}, 16, 257, 0)
    parts = open_whole(given, asked)
    assert [num_targets(part) for part in parts.values()] == [3 * 2, 4]
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith("b.jsonl: 1 lines truncated, 1 dropped without a token of an answer")
    saved(tmp_path / "b.jsonl", [{"prompt": "x", "completion": ""}])
    with pytest.raises(UserError, match=r"b.jsonl' has no line with a token of an answer"):
        open_whole(given, asked)
