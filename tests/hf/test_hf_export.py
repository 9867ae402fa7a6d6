"""An import is exported byte by byte; a run of our own gets a config.json that is read back as the same model."""

import dataclasses
import errno
import hashlib
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshtrain import hugging_face
from meshtrain.assembly.assemble import assemble
from meshtrain.config.schema import Config
from meshtrain.data.chat_template import open_template
from meshtrain.data.prepare import prepare
from meshtrain.data.sources import DataOptions
from meshtrain.data.tokenizer import byte_tokenizer, file_tokenizer, open_tokenizer
from meshtrain.errors import UserError
from meshtrain.hf import export, folder, tensor_files
from meshtrain.hf.config_export import as_json, family_of
from meshtrain.hf.config_json import config_of_text, describe_model, differences
from meshtrain.models.decoder_options import NormOptions
from meshtrain.models.lora import LoraOptions
from meshtrain.models.transformer.decoder import DecoderOptions
from meshtrain.run import exporting
from meshtrain.sharding.rules import AXES
from tests.hf.models import FIXTURES, NAMES

PACKED = "gpt-oss-mxfp4"
# Families whose options an earlier one has as well.
SAME_OPTIONS = {"seed_oss": "qwen2", "phi3": "mistral"}
ONE = dict.fromkeys(AXES, 1)


@pytest.mark.parametrize("name", [name for name in NAMES if name != PACKED])
def test_an_import_is_exported_byte_by_byte(name, tmp_path, monkeypatch):
    """In files of 20 kB, and by way of float32 on two devices."""
    monkeypatch.setattr(export, "_FILE_BYTES", 20_000)
    opened = folder.open_folder(FIXTURES / name)
    config = Config(model=opened.model.options, batch_size=2, sequence_length=24)
    assembly = assemble(config, ONE | {"fsdp": 2}, jax.devices())
    params = folder.read(opened, assembly.states.kept.params)
    export.write_weights(tmp_path, opened.model.family, opened.model.options, params, opened.model.dtype, LoraOptions())
    written, problems = tensor_files.tensors(tmp_path)
    assert problems == []
    assert len({one.file for one in written.values()}) > 1
    before, after = tensor_files.open_tensors(opened.stored), tensor_files.open_tensors(written)
    before = {key.removeprefix("language_model."): tensor for key, tensor in before.items()}
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert (tensor.dtype, tensor.shape, tensor.tobytes()) == (
            after[key].dtype, after[key].shape, after[key].tobytes(),
        ), key  # fmt: skip


def test_a_full_disk_is_one_line_and_leaves_the_folder_empty(tmp_path, monkeypatch):
    def full(*given):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(export, "write_rest", full)
    run, out = tmp_path / "run", tmp_path / "out"
    hugging_face.main(["import", str(FIXTURES / "llama-tied-headdim"), f"--to={run}"])
    with pytest.raises(UserError, match=f"^--to: got '{out}', which cannot be written \\(No space left on device\\)"):
        hugging_face.main(["export", f"--workdir={run}", f"--to={out}"])
    assert list(out.iterdir()) == []


def test_experts_in_4_bits_leave_in_bfloat16(tmp_path, capsys):
    """With the bytes that transformers unpacks, where config.json says no dtype besides."""
    came = shutil.copytree(FIXTURES / PACKED, tmp_path / "came")
    given = json.loads((came / "config.json").read_text())
    (came / "config.json").write_text(json.dumps(given | {"dtype": None}))
    hugging_face.main(["import", str(came), f"--to={tmp_path / 'run'}"])
    hugging_face.main(["export", f"--workdir={tmp_path / 'run'}", f"--to={tmp_path / 'out'}"])
    assert " bytes of bfloat16 in " in capsys.readouterr().out
    out = folder.open_folder(tmp_path / "out")
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    unpacked = json.loads((came / "unpacked.json").read_text())
    before, after = tensor_files.open_tensors(folder.open_folder(came).stored), tensor_files.open_tensors(out.stored)
    assert {key for key in before if key in after} | unpacked.keys() == after.keys()
    for key, tensor in after.items():
        assert tensor.dtype == jnp.bfloat16
        if key in unpacked:
            assert hashlib.sha256(tensor.tobytes()).hexdigest() == unpacked[key], key
        else:
            assert tensor.tobytes() == before[key].tobytes(), key


@pytest.mark.parametrize("spelling", ["config.json", "config.v4.json"])
@pytest.mark.parametrize("name", NAMES)
def test_every_key_of_the_original_keeps_its_value_in_both_spellings(name, spelling, tmp_path):
    shutil.copy(FIXTURES / name / spelling, tmp_path / "config.json")
    given, found = config_of_text(tmp_path), describe_model(FIXTURES / name)
    stated = as_json(found.options, found.family, found.dtype, 24, -1, given)
    assert given.keys() - stated.keys() == ({"quantization_config"} if name == PACKED else set())
    changed = {key for key, value in given.items() if key in stated and stated[key] != value}
    assert changed <= {"rope_scaling"} - {key for key in given if given[key] is not None}
    assert {"dtype", "torch_dtype"} <= stated.keys()
    if found.family != "gpt2":
        assert {"rope_parameters", "rope_theta", "rope_scaling"} <= stated.keys()
    (tmp_path / "config.json").write_text(json.dumps(stated))
    assert differences(found.options, describe_model(tmp_path).options, 32, tmp_path) == []


@pytest.mark.parametrize("name", NAMES)
def test_options_alone_make_a_config_that_is_read_back(name, tmp_path):
    found = describe_model(FIXTURES / name)
    wanted = SAME_OPTIONS[found.family] if found.family in SAME_OPTIONS else found.family
    assert family_of(found.options) == wanted
    stated = as_json(found.options, found.family, "float32", 64, 7, {})
    (tmp_path / "config.json").write_text(json.dumps(stated))
    assert differences(found.options, describe_model(tmp_path).options, 32, tmp_path) == []
    assert stated["eos_token_id"] == 7


@pytest.mark.parametrize("global_every", [1, 3])
def test_turns_of_which_two_layers_have_one_kind_alone_are_a_gemma(global_every):
    options = dataclasses.replace(describe_model(FIXTURES / "gemma2").options, num_layers=2, global_every=global_every)
    assert family_of(options) == "gemma2"


def test_options_that_no_family_has_are_refused():
    unlike = "which no Hugging Face model combines with the other options; .* nearest"
    with pytest.raises(
        UserError, match=rf"got model.norm.name=layernorm, {unlike}: model.norm.name=rmsnorm for llama$"
    ):
        family_of(DecoderOptions(norm=NormOptions(name="layernorm"), vocab_size=257))
    gpt2 = describe_model(FIXTURES / "gpt2").options
    with pytest.raises(UserError, match=rf"got model.num_kv_heads=2, {unlike}: model.num_kv_heads=4 for gpt2$"):
        family_of(dataclasses.replace(gpt2, num_kv_heads=2))  # no key of its config.json could say it


def test_the_byte_tokenizer_has_equal_ids(tmp_path):
    (tmp_path / "tokenizer.json").write_text(export.byte_tokenizer())
    own, exported = byte_tokenizer(), file_tokenizer(str(tmp_path / "tokenizer.json"))
    assert (exported.vocab_size, exported.end_id) == (own.vocab_size, own.end_id)
    for text in ("def f(x):\n\treturn 'é€😀'  # \x00\x7f\xad\r\n", "  ", "<|endof", ""):
        assert exported.encode(text) == own.encode(text)
        assert exported.decode(own.encode(text)) == text


CHAT = FIXTURES / "chat"
OF_BYTES, BESIDE = {"tokenizer.json", "tokenizer_config.json"}, {"chat_template.jinja", "generation_config.json"}
TEXTS = {
    "bytes": ({}, 257, OF_BYTES | {"generation_config.json"}, 256),
    "bytes with a template": ({"chat_template": f"{CHAT}/chat_template.jinja"}, 257, OF_BYTES | BESIDE, 256),
    "a folder": ({"tokenizer": str(CHAT)}, 1000, OF_BYTES | BESIDE, 2),
    "its file alone": ({"tokenizer": f"{CHAT}/tokenizer.json"}, 1000, {"tokenizer.json", "generation_config.json"}, 0),
    "no text": ({"source": "synthetic"}, 257, {"generation_config.json"}, -1),
}


@pytest.mark.parametrize("data, size, names, end_id", TEXTS.values(), ids=TEXTS)
def test_the_tokenizer_of_the_data_goes_out_with_its_template(data, size, names, end_id, tmp_path):
    config = Config(model=DecoderOptions(vocab_size=size), data=DataOptions(**data))
    of_text, written, found = exporting.text_files(config, None)
    export.write_rest(tmp_path, {}, None, of_text, written)
    assert found == end_id
    assert {path.name for path in tmp_path.iterdir()} == names | {"config.json"}
    if "chat_template.jinja" in names:
        assert open_tokenizer(str(tmp_path)).end_id == end_id
        asked = open_template(str(tmp_path), "").prompt([{"role": "user", "content": "hello"}])
        assert asked.startswith("<|im_start|>user\nhello")


def ends(folder_or_data, end_token=""):
    """The ids that end a generated text."""
    tokenizer = file_tokenizer(str(folder_or_data), end_token)
    return {tokenizer.end_id, *tokenizer.also_end}


def chat_folder(target, eos=2, template=None, **stated):
    """A model with a tokenizer of 1,000 ids, of which 2 is <|im_end|> and 0 is <|endoftext|>."""
    target = shutil.copytree(FIXTURES / "llama", target)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(CHAT / name, target)
    if template is not None:
        (target / "chat_template.jinja").write_text(template)
    given = json.loads((target / "config.json").read_text())
    given |= {"vocab_size": 1000, "eos_token_id": eos, "bos_token_id": 1, "pad_token_id": 3}
    (target / "config.json").write_text(json.dumps(given))
    if stated:
        (target / "generation_config.json").write_text(json.dumps({"eos_token_id": eos, **stated}))
    return target


# What a run chose -> options of its data, and what the files of its export record.
CHOICES = {
    "nothing": ({}, {"config.json": 2, "tokenizer_config.json": "<|im_end|>"}),
    "an end token": (
        {"end_token": "<|endoftext|>"},
        {"config.json": [0, 2], "generation_config.json": [0, 2], "tokenizer_config.json": "<|endoftext|>"},
    ),
    "an end token with a template's file": (
        {"end_token": "<|endoftext|>", "chat_template": f"{CHAT}/chat_template.jinja"},
        {"config.json": [0, 2], "generation_config.json": [0, 2], "tokenizer_config.json": "<|endoftext|>"},
    ),
    "a tokenizer's file": (
        {"tokenizer": f"{CHAT}/tokenizer.json", "end_token": "<|endoftext|>"},
        {"config.json": 0, "generation_config.json": 0, "tokenizer_config.json": "<|endoftext|>"},
    ),
    "a begin token": ({"begin_token": "<|endoftext|>"}, {"config.json": 2, "tokenizer_config.json": "<|im_end|>"}),
    "other tokens": (
        {"source": "text", "tokenizer": "bytes"},
        {"config.json": 256, "generation_config.json": 256, "tokenizer_config.json": "<|endoftext|>"},
    ),
}


@pytest.mark.parametrize("case", CHOICES)
def test_what_ends_a_text_of_the_run_ends_it_in_the_export(case, tmp_path):
    given, recorded = CHOICES[case]
    came, out = chat_folder(tmp_path / "came", top_k=3, eos=2), tmp_path / "out"
    data = DataOptions(**{"source": "chat", "tokenizer": str(came), **given})
    config = Config(model=describe_model(came).options, data=data)
    of_text, written, end_id = exporting.text_files(config, came)
    ids = exporting.special_ids(config, came, end_id)
    stated = json.loads((came / "config.json").read_text()) | ids
    chosen = exporting.tokenizer_settings(config, of_text, written, end_id)
    out.mkdir()
    export.write_rest(out, stated, came, of_text, written | export.special_token_files(ids, chosen, came, of_text))
    files = {path.name: json.loads(path.read_text()) for path in out.glob("*.json")}
    assert files["generation_config.json"]["top_k"] == 3
    for name, value in recorded.items():
        assert files[name]["eos_token" if name == "tokenizer_config.json" else "eos_token_id"] == value
    if data.tokenizer == "bytes":
        assert ends(out) == {256}
        assert {files["config.json"][key] for key in ("bos_token_id", "pad_token_id")} == {None}
    else:
        assert ends(out) == ends(data.tokenizer, data.end_token)
        assert files["config.json"]["pad_token_id"] == 3
    assert open_tokenizer(str(out)).begin == open_tokenizer(data.tokenizer, data.end_token, data.begin_token).begin
    if case == "a begin token":
        assert files["tokenizer_config.json"]["bos_token"] == "<|endoftext|>"
    if case == "nothing":
        assert (came / "generation_config.json").read_bytes() == (out / "generation_config.json").read_bytes()


@pytest.mark.parametrize("tokenizer", ["bytes", "own", "another"])
def test_a_run_on_token_files_leaves_with_their_tokenizer_and_end_token(tokenizer, tmp_path):
    came = chat_folder(tmp_path / "came")
    if tokenizer == "another":
        (came / "tokenizer.json").write_text((came / "tokenizer.json").read_text() + "\n")
    (tmp_path / "a.txt").write_text("a text")
    name = "bytes" if tokenizer == "bytes" else str(CHAT)
    end_token = "" if name == "bytes" else "<|endoftext|>"
    prepare(str(tmp_path / "a.txt"), str(tmp_path / "a.bin"), tokenizer=name, end_token=end_token)
    data = DataOptions(source="tokens", path=str(tmp_path / "a.bin"))
    config = Config(model=describe_model(came).options, data=data)
    found = exporting.with_text_source(config, came).data
    assert (found.source, found.end_token) == ("text", end_token)
    assert found.begin_token == ("" if name == "bytes" else "none")
    assert ends(found.tokenizer, found.end_token) >= {0} if name != "bytes" else found.tokenizer == "bytes"
    assert (found.tokenizer == str(came)) == (tokenizer == "own")
    (tmp_path / "a.bin").unlink()
    assert exporting.with_text_source(config, came) == config


def test_a_template_that_writes_the_end_token_keeps_the_value_of_training(tmp_path):
    """Only the ids then say what ends a text."""
    came = chat_folder(tmp_path / "came", template="{{ messages[0]['content'] + eos_token }}")
    run, out = tmp_path / "run", tmp_path / "out"
    data = {"source": "chat", "path": "x.jsonl", "end_token": "<|endoftext|>", "tokenizer": came}
    words = [f"--config.data.{key}={value}" for key, value in data.items()]
    hugging_face.main(["import", str(FIXTURES / "llama"), f"--to={run}"])
    hugging_face.main(["export", f"--workdir={run}", f"--to={out}", "--config.init_ignore=tokenizer.json", *words])
    settings = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert settings["eos_token"] == "<|im_end|>"
    assert ends(tmp_path / "out") >= {0, 2}


def test_a_folder_goes_in_and_out(tmp_path, capsys):
    """With the files of a tokenizer, which are copied as they are."""
    came = shutil.copytree(FIXTURES / "llama-bf16-sharded", tmp_path / "came")
    beside = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    for name in beside:
        shutil.copy(CHAT / name, came)
    (came / "generation_config.json").write_text('{"top_k": 3}')
    hugging_face.main(["import", str(came), f"--to={tmp_path / 'run'}"])
    hugging_face.main(["export", f"--workdir={tmp_path / 'run'}", f"--to={tmp_path / 'out'}"])
    assert capsys.readouterr().out.splitlines()[-1].endswith(f" bytes of bfloat16 in {tmp_path / 'out'}, a llama")
    out = folder.open_folder(tmp_path / "out")
    assert out.model == folder.open_folder(came).model
    before, after = tensor_files.open_tensors(folder.open_folder(came).stored), tensor_files.open_tensors(out.stored)
    assert all(before[key].tobytes() == after[key].tobytes() for key in before)
    given, stated = (json.loads((one / "config.json").read_text()) for one in (came, tmp_path / "out"))
    assert given.items() <= stated.items()
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"config.json", "generation_config.json", tensor_files.ONE_FILE, tensor_files.INDEX_FILE, *beside}
    for name in (*beside, "generation_config.json"):
        assert (came / name).read_bytes() == (tmp_path / "out" / name).read_bytes()
    half = tmp_path / "half"
    hugging_face.main(["export", f"--workdir={tmp_path / 'run'}", f"--to={half}", "--dtype=float16"])
    assert (
        np.asarray(tensor_files.open_tensors(folder.open_folder(half).stored)["model.norm.weight"]).dtype == jnp.float16
    )
