"""Broken workdirs in bulk: each is refused and left alone, and what is merely torn by a kill is no reason to refuse."""

import json
import os
import pathlib
import shutil
import subprocess

import pytest

from tests.messages.refused import Accepted, Case, assert_refused

FILES = ("config.json", "corpus.json", "metrics.jsonl", "layout.txt", ".lock")
FOLDERS = ("checkpoints", "tensorboard")


def replaced(name, make):
    """A function run -> None that puts something else in a part's place."""

    def broken(run):
        path = run / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        make(path)

    return broken


def written(name, content):
    return lambda run: (run / name).write_bytes(content)


def edited(name, **facts):
    return lambda run: (run / name).write_text(json.dumps(json.loads((run / name).read_text()) | facts))


RUNS = {
    **{f"{name} is a pipe": replaced(name, os.mkfifo) for name in FILES + FOLDERS},
    **{f"{name} is a folder": replaced(name, pathlib.Path.mkdir) for name in FILES},
    **{f"{name} is a file": replaced(name, pathlib.Path.touch) for name in FOLDERS},
    **{f"{name} is a loop": replaced(name, lambda path: path.symlink_to(path.name)) for name in FILES + FOLDERS},
    **{
        f"{name} is {what}": written(name, content)
        for name in ("config.json", "corpus.json")
        for what, content in {
            "empty": b"",
            "cut": b'{"seed": 0, ',
            "a list": b"[1]",
            "a number": b"3",
            "not UTF-8": b'{"seed": "\xff"}',
            "deep": b"[" * 200_000,
            "5000 digits": b'{"seed": "", "begun_seconds": ' + b"9" * 5000 + b"}",
        }.items()
    },
    "another seed": edited("config.json", seed=4),
    "an unknown field": edited("config.json", sead=4),
    "a group that is a number": edited("config.json", model=3),
    "a fingerprint that is a number": edited("corpus.json", fingerprint=3),
    "another fingerprint": edited("corpus.json", fingerprint="0" * 64),
    "begun in 400 digits": edited("corpus.json", begun_seconds=10**400),
    "a bigram loss of text": edited("corpus.json", bigram_loss_on_16="low"),
    "a field of 400 digits": edited("config.json", seed=10**400),
    "begun at no time": edited("corpus.json", begun_seconds="yesterday"),
    "metrics of garbage": written("metrics.jsonl", b"garbage\nand more\n"),
    "metrics of bytes": written("metrics.jsonl", bytes(range(256)) * 100),
    "metrics without a line's end": written("metrics.jsonl", b"x" * 5_000_000),
    "metrics without steps": written("metrics.jsonl", b'{"loss": 3}\n[1]\n'),
    "metrics too deep": written("metrics.jsonl", b"[" * 200_000 + b"\n"),
}


def forbidden(name, mode):
    return lambda run: (run / name).chmod(mode)


FORBIDDEN = {
    **{f"{name} cannot be read": forbidden(name, 0) for name in (*FILES, *FOLDERS)},
    **{f"{name} cannot be written": forbidden(name, 0o500) for name in FOLDERS},
    "the workdir cannot be written": forbidden(".", 0o500),
    "the workdir cannot be read": forbidden(".", 0),
}


@pytest.mark.parametrize("name", [*RUNS, *FORBIDDEN])
def test_a_broken_run_is_refused_and_left_alone(name, stopped, command, tmp_path, monkeypatch):
    (tmp_path / "cwd").mkdir()

    def prepare(folder):
        run = stopped("mesh.fsdp=2").rename(folder / "run")
        (RUNS | FORBIDDEN)[name](run)
        return command(run, "mesh.fsdp=2")

    try:
        assert_refused(Case(name, prepare, unprivileged=name in FORBIDDEN), tmp_path / "cwd", monkeypatch)
    finally:
        subprocess.run(["chmod", "-R", "u+rwX", tmp_path], check=True)


@pytest.mark.parametrize("torn", [b'{"step": 6, "lo', b'{"step": 6, "loss": 1}', b"\0\0\0"])
def test_a_torn_last_line_is_no_reason_to_refuse(torn, stopped, command, tmp_path, monkeypatch):
    def prepare(folder):
        run = stopped("mesh.fsdp=2").rename(folder / "run")
        with (run / "metrics.jsonl").open("ab") as file:
            file.write(torn)
        return command(run, "mesh.fsdp=2")

    with pytest.raises(Accepted):
        assert_refused(Case("torn", prepare), tmp_path, monkeypatch)
