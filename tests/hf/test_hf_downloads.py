"""Folders as downloads leave them: names instead of paths, caches, pointers, missing files, leftover statements."""

import gc
import json
import os
import re
import shutil

import pytest

from meshtrain import evaluate, generate, hugging_face
from meshtrain.config.schema import Config
from meshtrain.data.tokenizer import file_problems, file_tokenizer
from meshtrain.errors import UserError
from meshtrain.files import download_command, pointer_problem
from meshtrain.hf import folder, tensor_files
from meshtrain.hf.config_json import describe_model
from meshtrain.main import main as train
from meshtrain.run.weights import weights_problems
from tests.hf.models import DATA, FIXTURES

NAME = "Qwen/Qwen3-0.6B"
FIX = f"nearest: `hf download {NAME} --local-dir models/Qwen3-0.6B`, then models/Qwen3-0.6B"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b\nsize 9\n"
# Command -> its words, and the key that its line begins with.
COMMANDS = {
    "train from": (train, ["--config=tiny", "--workdir=run", f"--config.init_from={NAME}"], "init_from: "),
    "train on": (train, ["--config=tiny", "--workdir=run", f"--config.data.tokenizer={NAME}"], "data.tokenizer: "),
    "evaluate": (evaluate.main, [f"--workdir={NAME}"], NAME),
    "generate": (generate.main, [f"--workdir={NAME}"], NAME),
    "config": (hugging_face.main, ["config", NAME], NAME),
    "import": (hugging_face.main, ["import", NAME, "--to=run"], NAME),
    "export": (hugging_face.main, ["export", f"--workdir={NAME}", "--to=out"], NAME),
}


def lines_of(call, *given):
    with pytest.raises(UserError) as caught:
        call(*given)
    return list(caught.value.problems)


@pytest.mark.parametrize("case", COMMANDS)
def test_a_name_of_hugging_face_in_place_of_a_path_gives_the_command_that_downloads_it(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command, words, start = COMMANDS[case]
    [line] = lines_of(command, words)
    assert line.startswith(start)
    assert line.endswith(FIX)
    assert "Hugging Face folder" in line or "data.tokenizer" in line


def test_a_path_that_is_no_such_name_is_not_downloaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen").mkdir()
    for path in (NAME, "runs/base", "a/b/c", "base", "./a/b", "~/a", "a/", "gs://a/b", "a b/c", "../x"):
        assert download_command(path) == "", path
    assert FIX.endswith(download_command("Qwen2/x").replace("Qwen2/x", NAME).replace("models/x", "models/Qwen3-0.6B"))


def test_the_cache_of_the_hub_names_its_snapshot(tmp_path):
    cache = tmp_path / f"models--{NAME.replace('/', '--')}"
    for name, time in (("old", 1), ("new", 2)):
        snapshot = shutil.copytree(FIXTURES / "llama", cache / "snapshots" / name)
        shutil.copy(FIXTURES / "chat" / "tokenizer.json", snapshot)
        os.utime(snapshot, (time, time))
    wanted = f"nearest: {cache / 'snapshots' / 'new'}"
    [line] = weights_problems(Config(data=DATA), cache)
    assert line.endswith(wanted)
    assert "a Hugging Face folder" in line
    assert lines_of(hugging_face.main, ["config", str(cache)])[0].endswith(wanted)
    assert file_problems(str(cache))[0].endswith(wanted)
    assert folder.open_folder(cache / "snapshots" / "new").model.family == "llama"


SHARDED = [f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3)]


@pytest.mark.parametrize("with_index", [True, False])
@pytest.mark.parametrize("gone", [SHARDED[:1], SHARDED[1:]])
def test_a_missing_shard_is_named_in_one_line(with_index, gone, tmp_path):
    copied = shutil.copytree(FIXTURES / "llama-bf16-sharded", tmp_path / "copy")
    if not with_index:
        (copied / tensor_files.INDEX_FILE).unlink()
    for name in gone:
        (copied / name).unlink()
    lines = lines_of(folder.open_folder, copied)
    assert len(lines) == (len(gone) if with_index else 1)
    assert all(name in " ".join(lines) for name in gone)


def test_numbers_in_names_of_files_are_not_counted_to(tmp_path):
    for name in ("x-00001-of-999999999.safetensors", "y-1-of-0.safetensors", f"{'9' * 100}-of-2.safetensors"):
        shutil.copytree(FIXTURES / "llama", tmp_path / name)
        (tmp_path / name / tensor_files.ONE_FILE).rename(tmp_path / name / name)
        assert len(folder.open_folder(tmp_path / name).stored) == 21


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", tensor_files.INDEX_FILE])
def test_a_pointer_of_git_lfs_is_named_with_the_command(name, tmp_path):
    fixture = "llama-bf16-sharded" if name == tensor_files.INDEX_FILE else "llama"
    copied = shutil.copytree(FIXTURES / fixture, tmp_path / "a copy")
    (copied / name).write_text(POINTER)
    lines = lines_of(file_tokenizer, str(copied)) if name == "tokenizer.json" else lines_of(folder.open_folder, copied)
    line = f"{copied / name}: got a Git LFS pointer; allowed: the file's content; nearest: "
    assert f"{line}git -C '{copied}' lfs pull" in lines[0]
    gc.collect()  # an open file would be a warning, and so an error


def test_a_pipe_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert pointer_problem(tmp_path / "pipe") is None
    assert pointer_problem(tmp_path) is pointer_problem(tmp_path / "gone") is None


def stated(target, **changes):
    content = json.loads((target / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps(content))


QUANTIZATION = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.parametrize("name", ["llama-bf16-sharded", "mixtral", "gpt2"])
def test_a_leftover_statement_of_quantization_is_a_warning(name, tmp_path, capsys):
    came, run, out = (tmp_path / part for part in ("came", "run", "out"))
    shutil.copytree(FIXTURES / name, came)
    stated(came, quantization_config=QUANTIZATION)
    assert folder.open_folder(came).model.is_unquantized
    assert describe_model(came).options == describe_model(FIXTURES / name).options
    if name != "llama-bf16-sharded":
        return
    hugging_face.main(["import", str(came), f"--to={run}"])
    warning = f"{came}: config.json has quantization_config, but no tensor is quantized; this key is ignored"
    assert capsys.readouterr().err.count(warning) == 1
    hugging_face.main(["export", f"--workdir={run}", f"--to={out}"])
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    assert " bytes of bfloat16 in " in capsys.readouterr().out


@pytest.mark.parametrize("change", ["dtype", "more", "none"])
def test_other_tensors_are_still_a_quantized_copy(change, tmp_path):
    came = shutil.copytree(FIXTURES / "llama", tmp_path / "came")
    stated(came, quantization_config=QUANTIZATION)
    raw = (came / "model.safetensors").read_bytes()
    if change == "dtype":
        raw = raw.replace(b'"dtype":"F32"', b'"dtype":"I32"', 1)
    if change == "more":
        raw = re.sub(rb"model\.norm\.weight", b"model.norm.scales", raw)
    (came / "model.safetensors").write_bytes(raw)
    if change == "none":
        (came / "model.safetensors").unlink()
    assert any("quantization_config: got {'quant_method': 'fp8'" in line for line in lines_of(folder.open_folder, came))


def test_the_configuration_of_a_folder_without_weights_states_that_there_are_none(tmp_path, capsys):
    shutil.copy(FIXTURES / "llama" / "config.json", tmp_path)
    hugging_face.main(["config", str(tmp_path)])
    printed = capsys.readouterr()
    assert "init_from" not in printed.out
    assert (
        f"WARNING: {tmp_path}: got no safetensors file, so a run starts with random weights; nearest: " in printed.err
    )
