"""What a user can get wrong: one line each, exit code 2, before anything is compiled or written.

The mistakes that a configuration shows by itself stand in tests/config; here are those that need the machine, the data
or an earlier run.
"""

import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from meshtrain import generate
from meshtrain.errors import UserError
from meshtrain.main import main

ROOT = pathlib.Path(__file__).parents[2]
FSDP = ("mesh.fsdp=2",)


@pytest.fixture
def refused(command, written):
    """A function (directory, changes) -> the lines that `main` refuses with, nothing compiled and nothing written."""

    def lines(directory, *changes):
        compiled = []

        def note(name, seconds, **what):
            if name == "/jax/core/compile/jaxpr_to_mlir_module_duration":
                compiled.append(what["fun_name"])

        before = written(directory)
        jax.monitoring.register_event_duration_secs_listener(note)
        try:
            with pytest.raises(UserError) as caught:
                main(command(directory, *changes))
        finally:
            jax.monitoring.unregister_event_duration_listener(note)
        assert not compiled
        assert written(directory) == before
        return list(caught.value.problems)

    return lines


def test_more_devices_than_there_are(refused, tmp_path):
    [line] = refused(tmp_path, "mesh.data=16", "batch_size=16")
    assert line.startswith("mesh: got 16 devices; allowed: at most the 8 available CPU devices; nearest: ")


def test_what_the_devices_make_of_an_open_axis(refused, tmp_path):
    """-1 becomes 8 here, which the batch does not divide by and the layers neither."""
    [line] = refused(tmp_path, "mesh.data=-1", "batch_size=12")
    assert line.startswith("batch_size: got 12; allowed: a multiple of 8 = mesh.data 8")
    [line] = refused(tmp_path, "mesh.pipeline=-1")
    assert line.startswith("model.num_layers: got 4, so that a stage of mesh.pipeline 8 x")


@pytest.mark.parametrize(
    "content, words",
    [
        (None, ["does not exist"]),
        (b"", ["empty"]),
        (b"\xff\xfe\x00binary", ["UTF-8"]),
        (b"short", ["data: only 6 tokens for", "nearest: "]),
    ],
)
def test_data_that_cannot_be_read(refused, tmp_path, content, words):
    path = tmp_path / "data.txt"
    if content is not None:
        path.write_bytes(content)
    lines = refused(tmp_path / "run", f"data.path={path}")
    assert all(word in lines[0] for word in words), lines
    assert not (tmp_path / "run").exists()


def test_token_ids_past_the_vocabulary(refused, tmp_path):
    path = tmp_path / "ids.bin"
    (np.arange(1000) % 300).astype("<u2").tofile(path)
    described = {"dtype": "uint16", "vocab_size": 300, "num_tokens": 1000, "num_documents": 1, "end_id": 256}
    described |= {"tokenizer": "bytes", "tokenizer_sha256": "", "end_token": ""}
    path.with_name("ids.bin.json").write_text(json.dumps(described))
    [line] = refused(tmp_path / "run", "data.source=tokens", f"data.path={path}", "model.vocab_size=257")
    assert "contains id 257 at token 257; allowed: ids below model.vocab_size, 257; nearest: set it to 300" in line


def test_a_tracker_that_is_not_there(refused, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    [line] = refused(tmp_path / "run", "observe.tracker=wandb")
    assert line.startswith("observe.tracker: got 'wandb', whose package is not installed; allowed: none, or wandb with")
    [line] = refused(tmp_path / "run", "observe.tracker=wand")
    assert (
        line == "observe.tracker: got 'wand'; allowed: none, wandb, or package.module:function; did you mean 'wandb'?"
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("directory", ["file", "file/below", "/proc/run"])
def test_a_workdir_that_is_not_writable(refused, tmp_path, directory):
    (tmp_path / "file").write_text("in the way")
    lines = refused(tmp_path / directory, "seed=-1")
    assert [line.partition(":")[0] for line in lines] == ["--workdir", "seed"]
    assert "allowed: a folder that can be written" in lines[0]


def test_another_runs_workdir(refused, stopped):
    directory = stopped(*FSDP)
    lines = refused(directory, "seed=4", "model.mlp_dim=128", "mesh.tensor=2", "num_steps=3")
    assert lines == [
        f"workdir {directory} contains another run: seed: was 0, now 4",
        f"workdir {directory} contains another run: model.mlp_dim: was 64, now 128",
        f"workdir {directory}: allowed: the run's own configuration; nearest: another --workdir",
        "num_steps: got 3, but the run in the workdir is at step 5; allowed: at least 5; nearest: 5",
    ]


def test_a_workdir_whose_configuration_is_no_json(refused, stopped):
    directory = stopped(*FSDP)
    (directory / "config.json").write_text("{")
    [line] = refused(directory)
    assert "config.json: not a JSON object; allowed: " in line


def test_weights_that_are_not_there(refused, tmp_path):
    [line] = refused(tmp_path / "run", f"init_from={tmp_path / 'nowhere'}")
    assert line.startswith(f"init_from: {tmp_path / 'nowhere'}: got nothing there; allowed: a workdir of meshtrain")
    [line] = refused(tmp_path / "run", f"init_from={tmp_path}")
    assert line.startswith(f"init_from: {tmp_path}: got an empty directory; allowed: a workdir with at least one")
    assert not (tmp_path / "run").exists()


def test_weights_of_another_model(refused, stopped, tmp_path):
    lines = refused(tmp_path / "run", f"init_from={stopped(*FSDP)}", "model.mlp_dim=128")
    assert not (tmp_path / "run" / "config.json").exists()
    assert any("params/layers/mlp" in line and "64" in line and "128" in line for line in lines)
    assert lines[-1].startswith("nearest: ")


@pytest.mark.parametrize(
    "words, lines",
    [
        (["--num-tokens=0", "--temperature=-1", "--prompt="], ["--num-tokens", "--temperature", "--prompt"]),
        (["--config.mesh.tensor=3", "--num-tokens=0"], ["--num-tokens", "model.num_kv_heads", "model.num_heads"]),
        (["--promt=x"], ["arguments"]),
        (["--num-tokens=many"], ["--num-tokens"]),
    ],
)
def test_wrong_words_for_generate(stopped, words, lines):
    with pytest.raises(UserError) as caught:
        generate.main([f"--workdir={stopped(*FSDP)}", *words])
    assert [line.partition(":")[0] for line in caught.value.problems][: len(lines)] == lines


def test_generate_without_a_run(tmp_path, command):
    with pytest.raises(UserError, match=r"run: got nothing there; allowed: a workdir of meshtrain"):
        generate.main(command(tmp_path / "run"))


@pytest.mark.parametrize(
    "module, changes, starts",
    [
        ("main", ["mesh.data=-1", "batch_size=12"], ["batch_size: got 12"]),
        (
            "explain",
            ["mesh.tensor=3", "mesh.pipelin=2"],
            ["mesh.pipelin: unknown", "model.num_heads: ", "model.num_kv"],
        ),
        ("generate", [], [""]),
    ],
)
def test_a_program_says_one_line_each_and_exits_with_2(command, tmp_path, module, changes, starts):
    program = [sys.executable, "-m", f"meshtrain.{module}", *command(tmp_path / "run", *changes)]
    environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True)
    lines = done.stderr.splitlines()
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    for start in starts:
        assert any(line.startswith(f"meshtrain: error: {start}") for line in lines), done.stderr
    assert all(line.startswith("meshtrain: error: ") and len(line) > 40 for line in lines), done.stderr
    assert not (tmp_path / "run").exists()
