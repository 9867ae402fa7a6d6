"""The tokens that a tokenizer.json's post-processor puts before a text: found, chosen, recorded, and never a target."""

import dataclasses
import itertools
import json
import pathlib
import re

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from meshtrain.data.chat import open_chat
from meshtrain.data.corpus import open_corpus, open_parts, open_whole, tokenizer_for
from meshtrain.data.prepare import prepare
from meshtrain.data.sources import DataOptions, DataRequest
from meshtrain.data.token_files import read_sidecar, sidecar_path, token_file_tokenizer
from meshtrain.data.tokenizer import file_tokenizer, open_tokenizer, with_begin_token
from meshtrain.errors import UserError
from meshtrain.examples.preferences import PreferenceData, open_pairs
from meshtrain.models.task import token_batch

BEGIN, END, ASKED = 1, 2, DataRequest(token_batch(1, 16), {}, 16, 0, 0)


def template(single, **ids):
    return processors.TemplateProcessing(single, special_tokens=list(ids.items()))


START = template("<s> $A", **{"<s>": BEGIN})
PROCESSORS = {
    "none": (None, ()),
    "byte level": (processors.ByteLevel(), ()),
    "one token": (START, (BEGIN,)),
    "in a sequence": (processors.Sequence([processors.ByteLevel(), START]), (BEGIN,)),
    "two tokens": (template("<x> <s> $A", **{"<s>": BEGIN, "<x>": 3}), (3, BEGIN)),
    "the end token": (template("</s> $A", **{"</s>": END}), (END,)),
}
BEHIND = {
    "as BERT": (processors.BertProcessing(("</s>", END), ("<s>", BEGIN)), "data.begin_token=<s>"),
    "as RoBERTa": (processors.RobertaProcessing(("</s>", END), ("<s>", BEGIN)), "data.begin_token=<s>"),
    "as T5": (template("$A </s>", **{"</s>": END}), "data.begin_token=none"),
}


def words(path, processor=START, unknown="<unk>"):
    """Saves a tokenizer of the words w4 .. w40, whose ids are their numbers."""
    pieces = ["<unk>", "<s>", "</s>", "<x>", *(f"w{index}" for index in range(4, 41))]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    made = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token=unknown))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["<unk>", "<s>", "</s>", "<x>"])
    if processor is not None:
        made.post_processor = processor
    made.save(str(path))
    return str(path)


@pytest.mark.parametrize("unknown", ["<unk>", "missing"])
@pytest.mark.parametrize("name", PROCESSORS)
def test_the_tokens_before_a_text_are_those_of_the_post_processor(name, unknown, tmp_path):
    processor, begin = PROCESSORS[name]
    path = words(tmp_path / "tokenizer.json", processor, unknown)
    tokenizer = open_tokenizer(path)
    assert tokenizer.begin == begin
    assert tokenizer.encode("w5 w7") == [*begin, 5, 7]
    assert tokenizer.encode_templated("<s> w5") == [BEGIN, 5]
    assert open_tokenizer(path, begin_token="none").encode("w5") == [5]
    assert open_tokenizer(path, begin_token="<x>").encode("w5") == [3, 5]
    assert open_tokenizer(path, special_tokens="text", begin_token="<x>").encode("w5") == [3, 5]


@pytest.mark.parametrize("name", BEHIND)
def test_tokens_behind_a_text_are_one_line_whose_fix_is_accepted(name, tmp_path):
    processor, fix = BEHIND[name]
    path = words(tmp_path / "tokenizer.json", processor)
    with pytest.raises(
        UserError, match=r"data.begin_token: got '' .* adds </s> after a text.*; allowed: .*; nearest: "
    ) as told:
        open_tokenizer(path)
    assert str(told.value).endswith(fix)
    assert open_tokenizer(path, begin_token=fix.partition("=")[2]).encode("w5")[-1] == 5


def test_a_token_that_is_not_there_is_one_line(tmp_path):
    path = words(tmp_path / "tokenizer.json")
    with pytest.raises(UserError, match=r"data.begin_token for .*: got '<S>'.*did you mean '<s>'"):
        open_tokenizer(path, begin_token="<S>")
    with pytest.raises(UserError, match=r"data.begin_token: got '<s>' with data.tokenizer=bytes, .*begin_token=none"):
        open_tokenizer("bytes", begin_token="<s>")


def options(tmp_path, processor=START, **changes):
    path = words(tmp_path / "tokenizer.json", processor)
    return DataOptions(**{"tokenizer": path, "end_token": "</s>", "validation_fraction": 0.0, **changes})


@pytest.mark.parametrize("packing", ["stream", "first_fit"])
@pytest.mark.parametrize("name", ["one token", "two tokens", "the end token"])
def test_no_document_predicts_the_first_token_of_the_next(name, packing, tmp_path):
    processor, begin = PROCESSORS[name]
    (tmp_path / "a.jsonl").write_text('{"text": "w5 w6 w7"}\n{"text": "w8 w9"}\n{"text": "w10"}\n')
    given = options(tmp_path, processor, source="text", path=str(tmp_path / "a.jsonl"), packing=packing)
    length = 3 * (len(begin) + 1) + 6 - 1 if packing == "stream" else 6
    data = open_corpus(given, dataclasses.replace(ASKED, sequence_length=length))
    learned = [
        (tokens, targets)
        for row in (data.train[index] for index in range(len(data.train)))
        for tokens, targets, weight in zip(row["tokens"].tolist(), row["targets"].tolist(), row["weights"], strict=True)
        if weight
    ]
    documents = ([*begin, 5, 6, 7, END], [*begin, 8, 9, END], [*begin, 10, END])
    assert sorted(learned) == sorted(pair for ids in documents for pair in itertools.pairwise(ids))


def test_pairs_begin_with_it_and_what_a_template_wrote_does_not(tmp_path):
    (tmp_path / "t.jinja").write_text("{% for m in messages %}w9 {{ m['content'] }} {% endfor %}")
    lines = [
        {"prompt": "w5 ", "completion": "w6"},
        {"messages": [{"role": "user", "content": "w7"}, {"role": "assistant", "content": "w8"}]},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = options(tmp_path, source="chat", path=str(tmp_path / "a.jsonl"), chat_template=str(tmp_path / "t.jinja"))
    data = open_chat(given, ASKED)
    row = data.train[0]
    assert [row["tokens"][row["segment_ids"] == segment].tolist() for segment in (1, 2)] == [[BEGIN, 5, 6], [9, 7, 9]]
    assert row["targets"][row["weights"] > 0].tolist() == [6, END, 9, 8]
    assert (data.prompts, data.are_templated) == (("w5 ",), False)


def test_preferences_begin_with_it(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "w5 ", "chosen": "w6", "rejected": "w7"}) + "\n")
    given = PreferenceData(tokenizer=words(tmp_path / "tokenizer.json"), end_token="</s>", validation_fraction=0.0,
                           path=str(tmp_path / "a.jsonl"), source="preferences")  # fmt: skip
    row = open_pairs(given, ASKED).train[0]
    assert row["tokens"][row["segment_ids"] > 0].tolist() == [BEGIN, 5, 6, BEGIN, 5, 7]
    assert row["targets"][row["weights"] > 0].tolist() == [6, END, 7, END]
    none = open_pairs(dataclasses.replace(given, begin_token="none"), ASKED).train[0]
    assert none["tokens"][none["segment_ids"] > 0].tolist() == [5, 6, 5, 7]


def test_token_files_record_it_and_older_ones_have_none(tmp_path):
    (tmp_path / "a.txt").write_text("w5 w6")
    tokenizer = words(tmp_path / "tokenizer.json")
    for name, begin_token in (("a", ""), ("b", "none"), ("c", "<x>")):
        prepare(str(tmp_path / "a.txt"), str(tmp_path / f"{name}.bin"), tokenizer=tokenizer, begin_token=begin_token)
    ids = {name: np.fromfile(tmp_path / f"{name}.bin", np.uint16).tolist() for name in "abc"}
    assert ids == {"a": [BEGIN, 5, 6, END], "b": [5, 6, END], "c": [3, 5, 6, END]}
    for name in "abc":
        path = tmp_path / f"{name}.bin"
        described = read_sidecar(path)
        assert described.begin == ids[name][:-3]
        of_file = token_file_tokenizer(path, described)
        assert of_file.encode("w5 w6") == ids[name][:-1], "generate continues a prompt as the file's documents begin"
        assert tokenizer_for(DataOptions(source="tokens", path=str(path)), 0).begin == of_file.begin
    of_text = open_whole(options(tmp_path, source="text", path=str(tmp_path / "a.txt")), ASKED)
    of_file = open_whole(DataOptions(source="tokens", path=str(tmp_path / "a.bin")), ASKED)
    np.testing.assert_array_equal(next(iter(of_text.values()))[0]["tokens"], next(iter(of_file.values()))[0]["tokens"])
    both = DataOptions(source="tokens", path=str(tmp_path / "[ab].bin"), validation_fraction=0.0)
    with pytest.raises(
        UserError, match=r"b.bin' has begin \[\], but the first file has \[1\]; allowed: files prepared"
    ):
        open_corpus(both, ASKED)
    mixed = dataclasses.replace(both, path=f"{tmp_path / 'a.bin'}:1,{tmp_path / 'b.bin'}:1")
    small = dataclasses.replace(ASKED, sequence_length=2)
    with pytest.raises(UserError, match="prepared with another tokenizer than"):
        open_parts(open_corpus, mixed, small)
    content = json.loads(sidecar_path(tmp_path / "b.bin").read_text())
    for name in ("begin", "special_tokens", "num_special", "inner_ends"):
        del content[name]
    sidecar_path(tmp_path / "b.bin").write_text(json.dumps(content))
    assert token_file_tokenizer(tmp_path / "b.bin", read_sidecar(tmp_path / "b.bin")).encode("w5") == [5]


def test_an_end_token_that_also_begins_texts_ends_each_document_once(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "w5"}\n{"text": ""}\n{"text": "w6"}\n')
    tokenizer = words(tmp_path / "tokenizer.json", PROCESSORS["the end token"][0])
    path = tmp_path / "a.bin"
    described = prepare(str(tmp_path / "a.jsonl"), str(path), tokenizer=tokenizer)
    assert np.fromfile(path, np.uint16).tolist() == [END, 5, END, END, END, END, 6, END]
    assert described.inner_ends == [0, 3, 5]
    [examples] = open_whole(DataOptions(source="tokens", path=str(path)), ASKED).values()
    row = examples[0]
    assert row["segment_ids"][:5].tolist() == [1, 1, 2, 3, 3]
    assert file_tokenizer(tokenizer).begin == (END,)


@pytest.mark.parametrize("name", [*PROCESSORS, *BEHIND])
def test_an_export_puts_the_chosen_token_before_a_text(name, tmp_path):
    processor = PROCESSORS[name][0] if name in PROCESSORS else BEHIND[name][0]
    path = words(tmp_path / "tokenizer.json", processor)
    assert with_begin_token(path, "") == "", "the file as it is"
    for chosen, begin in (("none", ()), ("<x>", (3,))):
        content, exported = with_begin_token(path, chosen), tmp_path / f"{chosen}.json"
        if name in ("none", "byte level") and not begin:
            assert content == ""
            continue
        exported.write_text(content)
        tokenizer = open_tokenizer(str(exported))
        assert tokenizer.begin == begin
        assert tokenizer.encode("w5") == [*begin, 5]
        assert with_begin_token(str(exported), chosen) == ""


def test_a_file_that_only_the_package_tokenizers_reads_is_one_line(tmp_path):
    path = tmp_path / "tokenizer.json"
    text = pathlib.Path(words(path, None)).read_text()
    path.write_text(re.sub(r'"version":\s*"1.0",', '"ver1.0",', text))
    assert open_tokenizer(str(path)).vocab_size
    with pytest.raises(UserError, match=r"cannot be read .*; allowed: a JSON object in UTF-8; nearest: bytes"):
        with_begin_token(str(path), "<x>")
