"""A folder's weights read and continue text as transformers: with the token that its post-processor puts before it."""

import json
import pathlib
import shutil

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from meshtrain import evaluate, generate, harness
from meshtrain.config import resume

LLAMA = pathlib.Path(__file__).parents[1] / "hf" / "fixtures" / "llama"
DOCUMENTS = ["w5 w17 w17 w90 w3", "w8 </s> w99 w12", "w60"]
# Of transformers 5.24 (float32): (loss, targets) of DOCUMENTS with `</s>` behind each, one by one, with and without
# <s>; and the eight most probable tokens behind "<s> w5 w17", which are others without <s>.
LOSSES = {"": (5.585527, 13), "none": (5.220896, 10)}
GREEDY = "w21 w79 w53 w21 w7 w101 w112 w80"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("folder") / "llama"
    shutil.copytree(LLAMA, path)
    words = ["<unk>", "<s>", "</s>", *(f"w{index}" for index in range(3, 119))]
    vocab = {word: index for index, word in enumerate(words)}
    made = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    made.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    made.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    (path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    return path


@pytest.mark.parametrize("begin_token", ["", "none"])
def test_evaluate_has_the_loss_of_transformers(begin_token, folder, capsys):
    evaluate.main([
        f"--workdir={folder}", "--json", "--config.sequence_length=32", "--config.data.source=text",
        f"--config.data.path={folder / 'text.jsonl'}", f"--config.data.begin_token={begin_token}",
    ])  # fmt: skip
    found = json.loads(capsys.readouterr().out)["all"]
    loss, num_targets = LOSSES[begin_token]
    assert found["tokens"] == num_targets
    assert found["loss"] == pytest.approx(loss, rel=1e-5)


def test_generate_has_the_text_of_transformers(folder, capsys):
    generate.main([f"--workdir={folder}", "--prompt=w5 w17", "--num-tokens=8", "--temperature=0"])
    assert capsys.readouterr().out.split() == ["w5", "w17", *GREEDY.split()]


def test_the_harness_begins_with_it(folder):
    asked = harness.open_requests(folder)
    assert asked.encode_pair("w5 w17", " w21") == ([1, 5, 17], [21])
    assert asked.encode_pair("", "w5") == ([1], [5])
    assert asked.encode_pair(" ", "w5") == ([1], [5])
    none = harness.open_requests(folder, "--config.data.begin_token=none")
    assert none.encode_pair("w5 w17", " w21") == ([5, 17], [21])
    assert none.encode_pair("", "w5") == ([2], [5])
    [rolled], [alone] = asked.rolling(["w5 w17"]), asked.likelihoods([("", "w5 w17")])
    assert rolled == pytest.approx(alone.log_probability, rel=1e-6)


def test_a_run_of_version_0_2_has_none():
    content = {"data": {"source": "text", "path": "a.txt"}}
    assert resume.from_json(json.dumps(content)).data.begin_token == "none"
    assert resume.from_json(json.dumps(content), {"data.begin_token": "<s>"}).data.begin_token == "<s>"
    content["data"]["begin_token"] = ""
    assert resume.from_json(json.dumps(content)).data.begin_token == ""
