"""Broken workdirs and the other programs' command lines in bulk; and a sample of everything in processes of its own."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from tests.run import test_run_broken_configurations, test_run_broken_data
from tests.run.broken import (
    DAC_OVERRIDE,
    DAC_READ_SEARCH,
    Accepted,
    Case,
    assert_refused,
    assert_same,
    assert_speaks,
    odd_things,
    small,
    snapshot,
)

ROOT = pathlib.Path(__file__).parents[2]
ODD = ("loop", "dangling", "pipe", "folder", "missing", "below a file", "too long", "no such home")
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


def place_cases():
    for what in sorted(set(ODD) - {"folder", "missing"}):

        def prepare(folder, what=what):
            return [*small(folder), f"--workdir={odd_things(folder)[what]}"]

        yield Case(f"workdir: {what}", prepare, ("--workdir: ",))
    yield Case("workdir: a file", lambda folder: [*small(folder), "--workdir=words.txt"], ("--workdir: ",))
    for what in ODD:
        for module, words in {
            "checkpoint.verify": lambda path: [path],
            "generate": lambda path: [f"--workdir={path}"],
            "config": lambda path: [f"--config={path}"],
            "explain": lambda path: [f"--config={path}"],
            "plan.__main__": lambda path: ["--config=small.py", "--cluster=cpu:8", f"--calibrate={path}"],
            "data.prepare": lambda path: [f"--path={path}", "--output=out.bin"],
        }.items():

            def asked(folder, what=what, words=words):
                small(folder)
                return words(odd_things(folder)[what])

            name = "config.__main__" if module == "config" else module
            yield Case(f"{module}: {what}", asked, module=f"meshtrain.{name}")


PROGRAMS = {
    "pipeline.__main__": [
        ["--schedule"], ["--schedule="], ["--schedule=no.such:rows"], ["--schedule=json:"], ["--stages=x"],
        ["--stages=0"], ["--stages=-1"], ["--stages=99999999"], ["--stages=9999"],
        ["--microbatches=0"], ["--microbatches=99999999"], ["--chunks=0"], ["--chunks=99999999"], ["--schedule=zz"],
        ["--schedule=1f1bb"], ["--forward=x"], ["--forward=nan"], ["--forward=1e-999999999"], ["--backward=1e999999"],
        ["--transfer=-1"], ["--columns=3"], ["--columns=x"],
        ["--out=nowhere/x.png"], ["--out=x.zzz"], ["--out=pipe.png"], ["--table=words.txt"], ["stray"],
        ["--stage=3"], ["--stages", "--json"], ["--stages=\udcff"],
    ],
    "launch.__main__": [
        [], ["--"], ["--processes=x", "--", "x"], ["--processes", "--", "x"], ["--processes=0", "--", "x"],
        ["--processes=2", "--devices=0", "--", "x"], ["--zz", "--", "x"], ["stray", "--", "x"], ["--processes=2"],
        ["--processes=2", "--restarts=-1", "--", "x"], ["--processes=1.5", "--", "x"], ["--proc=2", "--", "x"],
    ],
    "plan.__main__": [
        [], ["--cluster="], ["--cluster"], ["--cluster=h100"], ["--cluster=x100:8x8"], ["--cluster=h100:0x8"],
        ["--cluster=cpu:0"], ["--cluster=cpu:x"], ["--cluster=cpu:99999999999"], [f"--cluster=cpu:{'9' * 5000}"],
        ["--cluster=cpu:8", f"--calibrate=-{'9' * 400}"], ["--cluster=cpu:8", f"--scaling=1,2,...,{'9' * 5000}"],
        ["--cluster=cpu:8", "--calibrate=long.jsonl"], ["--cluster=v5e:16"],
        ["--cluster=cpu:8", "--search=zzz"], ["--cluster=cpu:8", "--json=nowhere/x.json"],
        ["--cluster=cpu:8", "--json=folder"], ["--cluster=cpu:8", "--html=pipe"], ["--cluster=cpu:8", "--html=loop"],
        ["--cluster=cpu:8", "--calibrate=words.txt"], ["--cluster=cpu:8", "--calibrate=-1"],
        ["--cluster=cpu:8", "--calibrate=nan"], ["--clustr=cpu:8"], ["--cluster=cpu:8", "--config.seed=x"],
    ],
    "probe.doctor": [[f"--gpus=-{'9' * 400}"], [f"--limit=-{'9' * 400}"]],
    "checkpoint.verify": [[], ["x", "y"], ["--zz"], ["words.txt"], [""], ["\udcff"]],
    "generate": [
        ["--workdir=run"], ["--num-tokens=0"], ["--num-tokens=x"], ["--num-tokens=99999999999"], ["--temperature=nan"],
        ["--temperature=inf"], ["--temperature=-1"], ["--temperature=x"], ["--prompt="], ["--prompt=\udcff"],
        ["--promt=x"], ["--workdir=words.txt"], ["--config.seed=-1", "--num-tokens=0"],
    ],
    "evaluate": [
        ["--workdir=run"], ["--step=x"], ["--step=-1"], ["--step"], ["--json=x"], ["--jsn"], ["stray"],
        ["--workdir=words.txt"], ["--workdir=pipe"], ["--config.seed=-1", "--step=-1"], ["--config=small.py"],
        ["--config.data.path=words.txt"],
    ],
    "explain": [["x"], ["--draw"], ["--draw=nowhere/x.png"], ["--draw=x.zzz"], ["--draw=pipe"], ["--drw=x"]],
    "config.__main__": [["x"], ["--zz"], ["--config.seed=x"], ["--config.sed=1"]],
    "data.prepare": [
        [], ["--path=words.txt"], ["--output=out.bin"], ["--path=words.txt", "--output="], ["--path=", "--output=a"],
        ["--path=words.txt", "--output=."], ["--path=words.txt", "--output=nowhere/a"],
        ["--path=words.txt", "--output=words.txt", "--overwrite"], ["--path=words.txt", "--output=folder"],
        ["--path=words.txt", "--output=pipe", "--overwrite"], ["--path=words.txt", "--output=loop", "--overwrite"],
        ["--path=words.txt", "--output=dangling", "--overwrite"], ["--path=words.txt", f"--output={'x' * 300}"],
        ["--path=words.txt", "--output=~nosuchuser/a"], ["--path=words.txt", "--output=a", "--tokenizer=pipe"],
        ["--path=words.txt", "--output=a", "--tokenizer=words.txt"], ["--path=words.txt", "--output"],
        ["--path=words.txt", "--out=a"], ["--path=words.txt", "--output=a", "stray"],
    ],
}  # fmt: skip


def program_cases():
    for module, lines in PROGRAMS.items():
        for words in lines:

            def given(folder, words=words, module=module):
                first = small(folder)[:1]
                (folder / "long.jsonl").write_text('{"step": 1, "step_seconds": 1' + "0" * 400 + "}\n")
                odd_things(folder)
                os.mkfifo(folder / "pipe.png")
                return [*(first if module in ("plan.__main__", "explain") else []), *words]

            yield Case(f"{module} {str(words)[:60]}", given, module=f"meshtrain.{module}")


CASES = [*place_cases(), *program_cases()]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.encode("unicode_escape").decode())
def test_a_broken_command_line_is_refused(case, tmp_path, monkeypatch):
    assert_refused(case, tmp_path, monkeypatch)


def test_there_are_more_than_200():
    in_bulk = [*test_run_broken_configurations.CASES, *test_run_broken_data.CASES, *CASES]
    assert len({case.name for case in in_bulk}) == len(in_bulk)
    assert len(in_bulk) + len(RUNS) + len(FORBIDDEN) >= 200


WITHOUT_RIGHTS = f"""
import ctypes, os, sys
if os.geteuid() == 0:  # what is dropped from the bounding set does not come back with exec: prctl(2), 24
    for capability in ({DAC_OVERRIDE}, {DAC_READ_SEARCH}):
        assert ctypes.CDLL(None).prctl(24, capability, 0, 0, 0) == 0
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
SAMPLE = [
    "mesh.data=many",
    "file: syntax",
    "file: exits",
    "file: no permission",
    "words: misspelt flag",
    "across: more devices than can be simulated",
    "across: a pipeline beyond all bounds",
    "data.path: pipe",
    "description: pipe",
    "no permission: words.txt",
    "workdir: loop",
    "data.prepare: too long",
    "checkpoint.verify []",
]


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLE)
def test_a_process_says_the_same(name, tmp_path, monkeypatch):
    """Exit code, lines and time as the system sees them."""
    [case] = [
        case
        for case in [*test_run_broken_configurations.CASES, *test_run_broken_data.CASES, *CASES]
        if case.name == name
    ]
    folder = tmp_path / "cwd"
    folder.mkdir()
    monkeypatch.chdir(folder)
    words = case.prepare(folder)
    before = snapshot(folder)
    program = [sys.executable, "-c", WITHOUT_RIGHTS, "-m", case.module.removesuffix(".__main__"), *words]
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths, "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(program, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert_speaks(done.stderr.splitlines())
    assert_same(before, snapshot(folder))
