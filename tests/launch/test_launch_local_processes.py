"""The launcher with programs of one line: who is started with what, whose end is everybody's, what is started again."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from meshtrain.errors import UserError
from meshtrain.launch import local_processes
from meshtrain.launch.__main__ import job

ROOT = pathlib.Path(__file__).parents[2]


def launched(code, *words, processes=2):
    command = [sys.executable, "-m", "meshtrain.launch", f"--processes={processes}", *words, "--", "-c", code]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(code, *words, processes=2, timeout=60):
    process = launched(code, *words, processes=processes)
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


def test_each_gets_its_number_the_address_and_its_devices():
    names = ("JAX_PROCESS_ID", "JAX_NUM_PROCESSES", "JAX_NUM_CPU_DEVICES")
    code = f"import os; print(*(os.environ[name] for name in {names}))"
    returned, out, err = ended(code, "--devices=4", processes=3)
    assert (returned, err) == (0, "")
    assert sorted(out.splitlines()) == ["[0] 0 3 4", "[1] 1 3 4", "[2] 2 3 4"]


def test_on_gpus_each_gets_one():
    wanted = local_processes.Job(("-c", ""), 2, 0, ("5", "7"))
    found = [local_processes.environment(wanted, index, "127.0.0.1:9", {"A": "b"}) for index in range(2)]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in found] == ["5", "7"]
    assert all(each["JAX_COORDINATOR_ADDRESS"] == "127.0.0.1:9" and each["A"] == "b" for each in found)
    assert "JAX_NUM_CPU_DEVICES" not in found[0]


def test_the_coordinator_listens_on_this_machine_alone():
    own = local_processes.environment(
        local_processes.Job(("-c", ""), 2), 0, "127.0.0.1:9", {"JAX_COORDINATOR_BIND_ADDRESS": "[::]:9"}
    )
    assert own["JAX_COORDINATOR_BIND_ADDRESS"] == "127.0.0.1:9"


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "0,1"}, ()),
        ({"CUDA_VISIBLE_DEVICES": "2,3"}, ("2", "3")),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, ()),
        ({"PATH": ""}, ()),
    ],
)
def test_gpus_that_may_be_used(environ, expected):
    assert local_processes.gpus(environ) == expected


def test_one_that_fails_ends_all_with_its_code_and_last_words():
    code = "import os, sys, time\nif os.environ['JAX_PROCESS_ID'] == '1': sys.exit('out of luck')\ntime.sleep(600)"
    begun = time.monotonic()
    returned, _, err = ended(code)
    assert returned == 1
    assert time.monotonic() - begun < 30
    assert "[1] out of luck\n" in err
    assert err.endswith("process 1 ended first, with code 1; its last output:\n    out of luck\n")


def test_a_kill_is_told_as_shells_tell_it():
    code = "import os, time\nif os.environ['JAX_PROCESS_ID'] == '1': os.kill(os.getpid(), 9)\ntime.sleep(600)"
    returned, _, err = ended(code)
    assert returned == 137
    assert "process 1 ended first, with code 137" in err


@pytest.mark.parametrize(("code", "num_starts"), [(1, 3), (75, 3), (4, 3), (2, 1), (3, 1), (0, 1)])
def test_what_is_started_again(code, num_starts, tmp_path):
    program = f"import sys; open({str(tmp_path / 'starts')!r}, 'a').write('x'); sys.exit({code})"
    returned, _, _ = ended(program, "--restarts=2", processes=1)
    assert returned == code
    assert len((tmp_path / "starts").read_text()) == num_starts


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_are_passed_on_and_nothing_is_started_again(number):
    code = (
        "import signal, sys, time\n"
        f"signal.signal({int(number)}, lambda *_: sys.exit(75))\n"
        "print('ready', flush=True)\ntime.sleep(600)"
    )
    process = launched(code, "--restarts=5")
    assert sorted(process.stdout.readline() for _ in range(2)) == ["[0] ready\n", "[1] ready\n"]
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75
    assert "restarting" not in err


def test_a_signal_during_the_start_waits_until_all_are_there_to_get_it(tmp_path):
    ready = str(tmp_path / "ready")
    worker = (
        "import os, signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
        f"open({ready!r} + os.environ['JAX_PROCESS_ID'], 'w').close()\ntime.sleep(600)"
    )
    launcher = f"""if True:
        import os, pathlib, signal, sys, time
        from meshtrain.launch import local_processes
        start = local_processes._start
        def slow_start(job, index, address):
            process = start(job, index, address)
            while not pathlib.Path({ready!r} + str(index)).exists():
                time.sleep(0.05)
            if index == 0:
                os.kill(os.getpid(), signal.SIGTERM)
            return process
        local_processes._start = slow_start
        sys.exit(local_processes.run(local_processes.Job(("-c", {worker!r}), 2), num_restarts=5))
    """
    found = subprocess.run([sys.executable, "-c", launcher], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert found.returncode == 75
    assert "restarting" not in found.stderr


def test_a_signal_between_two_starts_is_the_end():
    launcher = """if True:
        import os, signal, sys
        from meshtrain.launch import local_processes
        def say(what):
            print(what)
            if "restarting" in what:
                os.kill(os.getpid(), signal.SIGTERM)
        local_processes._say = say
        sys.exit(local_processes.run(local_processes.Job(("-c", "import sys; sys.exit(1)"), 2), num_restarts=5))
    """
    found = subprocess.run([sys.executable, "-c", launcher], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert found.returncode == 1
    assert found.stdout.count("restarting") == 1


def test_nobody_is_left_where_the_launcher_is_killed():
    process = launched("import os, time; print(os.getpid(), flush=True); time.sleep(600)")
    workers = [int(process.stdout.readline().split()[1]) for _ in range(2)]
    process.kill()
    process.communicate(timeout=60)
    deadline = time.monotonic() + 30
    while (left := [pid for pid in workers if not is_gone(pid)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


def is_gone(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_more_processes_than_gpus_are_refused_and_fewer_take_the_first():
    with pytest.raises(UserError, match=r"--processes: got 3; allowed: at most the 2 GPUs .* nearest: 2"):
        job(["--processes=3", "--", "x"], ("0", "1"))
    assert job(["--", "x"], ("0", "1"))[0].num_processes == 2
    assert job(["--processes=3", "--devices=2", "--", "x"], ("0", "1"))[0].gpus == ()


# Writes who starts into a file; what the numbers of a start have to do stands before.
STARTS = """if True:
    import os, pathlib, signal, sys, time
    index, count = int(os.environ["JAX_PROCESS_ID"]), int(os.environ["JAX_NUM_PROCESSES"])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    address, starts = os.environ["JAX_COORDINATOR_ADDRESS"], pathlib.Path({starts!r})  # of another port each time
    if index == 0:
        with starts.open("a") as file:
            file.write(str(count) + os.environ["MESHTRAIN_FULL_PROCESSES"] + "@" + address + " ")
    while "@" + address + " " not in starts.read_text():
        time.sleep(0.01)
    number = len(starts.read_text().split())
    {then}
"""


def starts_of(folder, then, *words):
    """(exit code, starts, messages) of four processes; a start is the number of processes, and 4 for all."""
    path = folder / "starts"
    path.write_text("")
    code, _, err = ended(STARTS.format(starts=str(path), then=then), *words, processes=4)
    return code, [start.partition("@")[0] for start in path.read_text().split()], err


def test_one_that_is_killed_is_left_out_until_it_is_there_again(tmp_path):
    # The first start loses its third process; the second one runs until it is told to end; the third one finishes.
    then = "(number == 1 and index == 2 and os.kill(os.getpid(), 9)); number < 3 and time.sleep(90)"
    words = ("--min-processes=2", "--restarts=1", "--back-seconds=10")
    code, starts, err = starts_of(tmp_path, then, *words)
    assert (code, starts) == (0, ["44", "34", "44"]), err
    assert "starting 3 of 4 processes, without 2\n" in err
    assert err.endswith("all processes are restarted\n")


def test_where_a_number_does_not_fit_one_less_is_started(tmp_path):
    then = "(number == 1 and index == 0 and os.kill(os.getpid(), 9)); sys.exit(0 if count == 2 else 69)"
    words = ("--min-processes=2", "--restarts=1", "--back-seconds=99")
    code, starts, err = starts_of(tmp_path, then, *words)
    assert (code, starts) == (0, ["44", "34", "24"]), err
    assert "starting 2 of 4 processes, without 0, 3\n" in err


def test_where_no_number_fits_it_ends(tmp_path):
    then = "(number == 1 and index == 0 and os.kill(os.getpid(), 9)); sys.exit(69)"
    words = ("--min-processes=2", "--restarts=1", "--back-seconds=99")
    code, starts, err = starts_of(tmp_path, then, *words)
    assert (code, starts) == (69, ["44", "34", "24"]), err
    assert "--min-processes: got 2, but this run fits neither 2 processes nor more of the remaining processes; " in err


def test_on_gpus_each_that_is_left_keeps_its_own():
    left = local_processes.JobMembers(local_processes.Job(("-c", ""), 3, 0, ("5", "7", "9"), min_processes=1))
    left.failed(0, 4)  # it lost another one, and is itself there
    assert left.part([]).num_processes == 3
    left.failed(1, 137)
    part = left.part([])
    assert (part.num_processes, part.gpus, part.full) == (2, ("5", "9"), 3)
    assert left.until is not None


def test_too_few_that_are_left_wait_for_another():
    left = local_processes.JobMembers(local_processes.Job(("-c", ""), 2, min_processes=2, back_seconds=0.2))
    begun = time.monotonic()
    left.failed(0, 1)
    assert left.part([]).num_processes == 2
    assert time.monotonic() - begun >= 0.2
    left.failed(0, 1)
    assert left.part([signal.SIGTERM]).num_processes == 1, "a signal ends the wait"
