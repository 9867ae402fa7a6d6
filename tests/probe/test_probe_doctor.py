"""The command: a healthy 2 x 4, a process that dies in JAX, what needs no JAX, and a job of this process."""

import os
import pathlib
import socket
import subprocess
import sys

from meshtrain.probe import doctor
from meshtrain.probe.checks.pairwise_times import tournament

ROOT = pathlib.Path(__file__).parents[2]
# The part that needs JAX, replaced: what a process does in it is the value of DOES.
FAKE = """
import os, sys, types
fake = types.ModuleType("meshtrain.probe.checks.job")
def exercised(arguments, begin):
    if os.environ["DOES"].split(",")[int(os.environ["JAX_PROCESS_ID"])] == "dies": os._exit(9)
    return {"devices": (4, "H100"), "without_gpus": False, "times": {"data": (2, 1e-3)}, "wrong": [], "pairs": {}}
fake.compared, fake.exercised = lambda arguments: {"seed": "0"}, exercised
sys.modules["meshtrain.probe.checks.job"] = fake
sys.modules["jax"] = None
from meshtrain.probe.doctor import main
from meshtrain.errors import run
run(lambda: main(sys.argv[1:]))
"""


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def together(folder, does, *words):
    """Starts a process for each word of `does`; returns (exit codes, lines of each)."""
    address = f"127.0.0.1:{free_port()}"
    processes = []
    for index in range(len(does)):
        own = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(len(does)), "JAX_PROCESS_ID": str(index)}
        environment = {**os.environ, **own, "DOES": ",".join(does)}
        command = [sys.executable, "-c", FAKE, f"--workdir={folder}", *words]
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
    assert lines[-1] == "doctor: no problems in 2 processes on 1 machine"
    seen = {line[9:24].strip() for line in lines[:-1]}
    assert seen >= {"software", "coordinator", "port", "workdir", "disk", "memory", "registered", "versions"}
    assert seen >= {"environment", "clock", "shared", "devices", "values", "slow"}
    assert any("data of 2 in" in line and "fsdp of 4 in" in line for line in lines)
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_dies_in_jax_is_named_and_leaves_nobody_waiting(tmp_path):
    codes, (lines, _) = together(tmp_path, ["well", "dies"], "--limit=5")
    assert codes == [2, 9]
    assert f"process 1 ({socket.gethostname()}): it has ended or does not answer" in problems(lines)[0]


def test_the_job_is_judged_on_its_mesh_and_in_its_workdir(tmp_path, capsys):
    """In this process, whose eight devices are there."""
    words = [f"--workdir={tmp_path}", "--config.mesh.data=8"]
    assert doctor.main([*words, "--config.mesh.tensor=2"]) == 2
    [line] = problems(capsys.readouterr().out.splitlines())
    assert line.startswith("error    job ")
    assert "mesh: got 16 devices; allowed: at most the 8" in line
    assert doctor.main(words) == 0
    assert "data of 8 in" in capsys.readouterr().out
    (tmp_path / "config.json").write_text('{"version": "0.3.0", "seed": 7}')
    words = [f"--workdir={tmp_path}", "--config=configs/tiny.py", "--config.mesh.data=-1", "--config.batch_size=12"]
    assert doctor.main(words) == 2
    batch, *others = problems(capsys.readouterr().out.splitlines())
    assert "batch_size: got 12; allowed: " in batch
    assert any(f"workdir {tmp_path} contains another run: seed: " in line for line in others)


def test_the_slower_side_of_a_pair_counts_and_a_slow_process_is_named():
    """What four processes say of their exchanges: only process 2 itself finds its own slow."""

    def said(process):
        times = [4e-3, 5e-3] if process == 2 else [1e-3, 2e-3]
        pairs = {str(partner): times for partner in range(4) if partner != process}
        return {"devices": [8, "H100"], "without_gpus": False, "times": {}, "wrong": [], "pairs": pairs}

    found = doctor._judge({process: said(process) for process in range(4)}, 8)
    assert [(each.check, each.process) for each in found if each.verdict != "ok"] == [("slow", 2)]
    assert "at least 4.00 ms to exchange 1 MiB with another process; the median is 1.00 ms" in found[-1].seen


def test_each_pair_meets_once_and_each_process_once_a_round():
    for count in (2, 3, 8, 9):
        rounds = tournament(count, 99)
        pairs = [frozenset(pair) for each in rounds for pair in each]
        assert len(pairs) == len(set(pairs)) == count * (count - 1) // 2
        for each in rounds:
            players = [player for pair in each for player in pair]
            assert len(players) == len(set(players)) == count - count % 2
    assert len(tournament(64)) == 7


STUCK = """
import sys, threading, types
fake = types.ModuleType("meshtrain.probe.checks.job")
class Import:  # of JAX, on a slow machine
    def __getattr__(self, name):
        threading.Event().wait()
sys.modules["meshtrain.probe.checks.job"] = Import()
from meshtrain.errors import run
from meshtrain.probe import doctor
def left(code):
    print(f"left at once with {code}", flush=True)
    raise SystemExit(code)
doctor.leave_at_once = left
run(lambda: doctor.main(sys.argv[1:]))
"""


def test_a_thread_that_still_imports_is_left_at_once_and_the_advice_is_about_the_import(tmp_path):
    environment = {**os.environ, "JAX_PLATFORMS": "junk"}
    words = [sys.executable, "-c", STUCK, f"--workdir={tmp_path}", "--limit=0.5"]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2, done.stderr
    assert "left at once with 2" in done.stdout
    assert "JAX_PLATFORMS: got 'junk'; allowed: cpu, cuda, gpu, rocm, tpu; nearest: JAX_PLATFORMS=cpu" in done.stdout
    assert "the import of JAX has not ended in 0 s" in done.stdout
    assert "do: --limit=1 or more" in done.stdout
