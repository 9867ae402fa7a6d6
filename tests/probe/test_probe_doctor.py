"""The command: a healthy 2 x 4, a missing process, one that hangs in JAX, and what needs no JAX."""

import argparse
import os
import pathlib
import socket
import subprocess
import sys

import pytest

from meshtrain.probe import doctor
from meshtrain.probe.pairs import tournament
from meshtrain.words.errors import UserError

ROOT = pathlib.Path(__file__).parents[2]
# The part that needs JAX, replaced: what a process does in it is the value of DOES.
FAKE = """
import os, sys, time, types
fake = types.ModuleType("meshtrain.probe.exercise")
def exercised(options, begin):
    does = os.environ["DOES"].split(",")[int(os.environ["JAX_PROCESS_ID"])]
    begin("the start of JAX")
    if does == "hangs": time.sleep(600)
    if does == "dies": os._exit(9)
    if does == "raises": raise RuntimeError("no device")
    begin("an all-reduce on data")
    if does == "waits": time.sleep(600)
    return {"devices": (4, "H100"), "without_gpus": False, "times": {"data": (2, 1e-3)}, "wrong": [], "pairs": {}}
fake.exercised = exercised
sys.modules["meshtrain.probe.exercise"] = fake
sys.modules["jax"] = None
from meshtrain.probe.doctor import main
from meshtrain.words.errors import run
run(lambda: main(sys.argv[1:]))
"""


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def together(folder, does, *words, only=None, code=FAKE):
    """Starts a process for each word of `does`; returns (exit codes, lines of each)."""
    address = f"127.0.0.1:{free_port()}"
    processes = []
    for index in range(len(does)) if only is None else [only]:
        own = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(len(does)), "JAX_PROCESS_ID": str(index)}
        environment = {**os.environ, **own, "DOES": ",".join(does)}
        command = [sys.executable, "-c", code, f"--workdir={folder}", *words]
        processes.append(
            subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    try:
        said = [process.communicate(timeout=100) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert not any(errors for _, errors in said), said
    return [process.returncode for process in processes], [output.splitlines() for output, _ in said]


def problems(lines):
    return [line for line in lines if line.startswith(("error", "warning"))]


def test_a_healthy_2_x_4_has_nothing_to_do(tmp_path):
    command = ["-m", "meshtrain", "doctor", f"--workdir={tmp_path / 'run'}"]
    launcher = [sys.executable, "-m", "meshtrain", "launch", "--processes=2", "--devices=4", "--", *command]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(launcher, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    # Gloo, which connects CPUs, prints lines of its own.
    lines = [line.removeprefix("[0] ") for line in done.stdout.splitlines() if "[Gloo]" not in line]
    assert problems(lines) == []
    assert lines[-1] == "doctor: nothing is wrong with 2 processes on 1 machine"
    seen = {line[9:24].strip() for line in lines[:-1]}
    assert seen >= {"software", "coordinator", "port", "workdir", "disk", "memory", "registered", "versions"}
    assert seen >= {"environment", "clock", "shared", "devices", "values", "slow"}
    assert any("data of 2 in" in line and "fsdp of 4 in" in line for line in lines)
    assert list(tmp_path.iterdir()) == []


def test_processes_are_judged_without_jax_and_agree_on_the_code(tmp_path):
    codes, (first, second) = together(tmp_path, ["well", "well"])
    assert codes == [0, 0]
    assert problems(first) == []
    assert second == []


@pytest.mark.parametrize(
    ("does", "seen"),
    [
        (["waits", "hangs"], "process 1 (HOST): the start of JAX has not ended in 5 s; others wait for it"),
        (["well", "dies"], "process 1 (HOST): it ended, or says nothing more"),
        (["well", "raises"], "process 1 (HOST): RuntimeError: no device"),
    ],
)
def test_what_hangs_or_fails_in_jax_is_named(tmp_path, does, seen):
    codes, (lines, _) = together(tmp_path, does, "--limit=5")
    assert codes[0] == 2
    assert codes[1] == (9 if "dies" in does else 2)
    assert seen.replace("HOST", socket.gethostname()) in problems(lines)[0]


def test_a_process_that_never_comes_is_named_by_process_0(tmp_path):
    [code], [lines] = together(tmp_path, ["well"] * 3, "--limit=1", only=0)
    assert code == 2
    missing, others = problems(lines)
    assert "processes 1, 2 of 3 did not register in 1 s" in missing
    assert others.startswith("warning  collectives    not run"), "they would hang"


def test_without_process_0_the_others_say_so_themselves(tmp_path):
    [code], [lines] = together(tmp_path, ["well"] * 2, "--limit=1", only=1)
    assert code == 2
    [line] = problems(lines)
    assert "refuses the connection: nothing listens there" in line
    assert "this address is this machine itself" in line


def test_faults_of_several_processes_come_in_one_answer(tmp_path):
    """An interface that is not there, a variable of one process only, and workdirs that are not shared."""
    own = "os.environ['NCCL_SOCKET_IFNAME'] = 'nosuch'; os.environ['NCCL_ALGO'] = os.environ['JAX_PROCESS_ID']"
    own = f"{own}; sys.argv.append(f'--workdir={tmp_path}/' + os.environ['JAX_PROCESS_ID'])"
    code = FAKE.replace("fake.exercised =", f"{own}\nfake.exercised =")
    for name in ("0", "1"):
        (tmp_path / name).mkdir()
    codes, (lines, _) = together(tmp_path, ["well", "well"], code=code)
    assert codes == [2, 2]
    host = socket.gethostname()
    said = problems(lines)
    for index, seen in enumerate(
        [
            f"processes 0 ({host}), 1 ({host}): NCCL_SOCKET_IFNAME=nosuch matches none",
            f"process 1 ({host}): NCCL_ALGO is 1, and 0 in process 0",
            f"process 0 ({host}): {tmp_path}/0 has no file of process 1: it is not the same folder",
            f"process 1 ({host}): {tmp_path}/1 has no file of process 0: it is not the same folder",
        ]
    ):
        assert seen in said[index]
    assert len(said) == 4
    assert [list((tmp_path / name).iterdir()) for name in ("0", "1")] == [[], []]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--gpus=0", "--limit=-1"], "--gpus: got 0; allowed: a number above 0; nearest: leave it out"),
        (["--limit=nan"], "--limit: got nan; allowed"),
        (["--procesess=2"], "did you mean '--processes'"),
        (["--processes=2"], "--processes: got 2; allowed: the job's 1; nearest: 1"),
    ],
)
def test_wrong_words_are_one_line(words, line, monkeypatch):
    for name in [name for name in os.environ if name.startswith(("JAX_NUM", "JAX_PROCESS"))]:
        monkeypatch.delenv(name)
    with pytest.raises(UserError) as refusal:
        doctor.main(words)
    assert any(line in problem for problem in refusal.value.problems)


def test_a_mesh_that_does_not_fit_is_a_line(tmp_path, capsys):
    """In this process, whose eight devices are there."""
    words = [f"--workdir={tmp_path}", "--config.mesh.data=8"]
    assert doctor.main([*words, "--config.mesh.tensor=2"]) == 2
    [line] = problems(capsys.readouterr().out.splitlines())
    assert "mesh: got" in line
    assert doctor.main(words) == 0
    assert "data of 8 in" in capsys.readouterr().out


def test_the_slower_side_of_a_pair_counts_and_a_slow_process_is_named():
    """What four processes say of their exchanges: only process 2 itself finds its own slow."""

    def said(process):
        times = [4e-3, 5e-3] if process == 2 else [1e-3, 2e-3]
        pairs = {str(partner): times for partner in range(4) if partner != process}
        return {"devices": [8, "H100"], "without_gpus": False, "times": {}, "wrong": [], "pairs": pairs}

    words = argparse.Namespace(limit=60.0, gpus=8)
    found = doctor._judged({process: said(process) for process in range(4)}, [], words)
    assert [(each.check, each.process) for each in found if each.verdict != "ok"] == [("slow", 2)]
    assert "4.00 ms to exchange 1 MiB with any other, and 1.00 ms is the median" in found[-1].seen


def test_each_pair_meets_once_and_each_process_once_a_round():
    for count in (2, 3, 8, 9):
        rounds = tournament(count, 99)
        pairs = [frozenset(pair) for each in rounds for pair in each]
        assert len(pairs) == len(set(pairs)) == count * (count - 1) // 2
        for each in rounds:
            players = [player for pair in each for player in pair]
            assert len(players) == len(set(players)) == count - count % 2
    assert len(tournament(64)) == 7
