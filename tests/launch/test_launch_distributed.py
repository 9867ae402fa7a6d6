"""How processes find each other, how many devices each one has, and what a user is told about it."""

import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from meshtrain.cli.flags import load
from meshtrain.errors import UserError
from meshtrain.hardware.accelerators import FRACTION_VARIABLE
from meshtrain.launch import cluster, distributed, peers

ROOT = Path(__file__).parents[2]
SLURM = {"SLURM_STEP_NODELIST": "node[1-4]", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2"}
MEET = {"JAX_COORDINATOR_ADDRESS": "host:1234", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.0.0.1:1",
}


def launch(code, **environ):
    """Starts Python on `code`, with what `start` prints or raises made visible."""
    keep = {name: os.environ[name] for name in ("PATH", "HOME", "VIRTUAL_ENV") if name in os.environ}
    modules = ("errors", "launch.distributed", "launch.peers")
    text = "\n".join(["import jax", *(f"from meshtrain.{module} import *" for module in modules), code])
    command = [sys.executable, "-W", "error", "-c", text]
    return subprocess.Popen(
        command, cwd=ROOT, env={**keep, **environ}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process, code=0):
    try:
        output, errors = process.communicate(timeout=120)
    finally:
        process.kill()  # of two that wait for each other, neither stays behind
    assert process.returncode == code, errors
    return output, errors


def processes(environ):
    return cluster.processes(environ, "cpu")


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"},
        {**MEET, "JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"},
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"},  # inside a batch script, outside srun
        {**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "8"},  # a shell inside an allocation
        {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1"},
        {"KUBERNETES_SERVICE_HOST": "10.0.0.1"},
    ],
)
def test_a_process_that_is_alone_meets_nobody(environ):
    assert processes(environ) is None


def test_the_three_variables_win_over_every_scheduler():
    assert processes({**SLURM, **OPEN_MPI, **MEET}) == {
        "coordinator_address": "host:1234",
        "num_processes": 2,
        "process_id": 1,
        "cluster_detection_method": "deactivate",
    }


def test_slurm_gives_each_process_its_share_of_a_hosts_devices():
    method = {"cluster_detection_method": "slurm"}
    one_on_each_host = {**SLURM, "SLURM_STEP_NUM_TASKS": "2"}
    assert processes(SLURM) == {**method, "num_processes": 8}
    assert processes(one_on_each_host) == {**method, "num_processes": 2, "local_device_ids": []}
    bound = {**SLURM, "CUDA_VISIBLE_DEVICES": "3"}
    assert processes(bound) == {**method, "num_processes": 8, "local_device_ids": []}
    assert processes({**SLURM, "CUDA_VISIBLE_DEVICES": "0,1,2,3"}) == {**method, "num_processes": 8}
    by_hand = {**one_on_each_host, "JAX_LOCAL_DEVICE_IDS": "0,1"}
    assert processes(by_hand) == {**method, "num_processes": 2}


def test_open_mpi_without_an_address_says_what_to_do(monkeypatch):
    assert processes(OPEN_MPI) == {"cluster_detection_method": "ompi", "num_processes": 4}
    newer = {name: value for name, value in OPEN_MPI.items() if name != "OMPI_MCA_orte_hnp_uri"}
    monkeypatch.setattr(cluster.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install mpi4py"):
        processes(newer)
    monkeypatch.setattr(cluster.importlib.util, "find_spec", lambda name: name)
    assert processes(newer) == {"cluster_detection_method": "mpi4py", "num_processes": 4}
    indexed_job = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"}
    assert processes(indexed_job) == {"cluster_detection_method": "k8s"}


@pytest.mark.parametrize(
    ("needed", "processes", "each"), [(8, 1, 8), (8, 4, 2), (1, 1, 1), (None, 1, 8), (None, 2, 4), (None, 16, 1)]
)
def test_simulated_devices_are_shared_among_processes(needed, processes, each):
    assert distributed.devices_each(needed, processes) == each


@pytest.mark.parametrize(("needed", "processes", "each"), [(8, 3, 2), (8, 16, 1), (6, 1, 6)])
def test_an_open_axis_leaves_no_process_without_devices(needed, processes, each):
    assert distributed.devices_each(needed, processes, is_open=True) == each


def test_devices_asked_for_before_stay(monkeypatch):
    asked = []
    monkeypatch.setattr(type(jax.config), "update", lambda config, name, value: asked.append((name, value)))
    distributed._simulate(4)  # the tests themselves asked for 8
    assert asked == []
    distributed._simulate(16)
    assert asked == [("jax_num_cpu_devices", 16)]


@pytest.mark.parametrize(("needed", "processes", "nearest"), [(3, 2, 4), (9, 4, 8), (1, 2, 2)])
def test_devices_that_do_not_divide_are_refused(needed, processes, nearest):
    with pytest.raises(UserError, match=f"got {needed} devices; .* {processes} processes; nearest: {nearest}$"):
        distributed.devices_each(needed, processes)


def test_one_process_takes_the_first_devices_and_says_so():
    devices = jax.devices()
    assert distributed.choose(devices, None, 1) == (devices, [])
    assert distributed.choose(devices, 8, 1) == (devices, [])
    assert distributed.choose(devices, 3, 1) == (devices[:3], ["the mesh uses the first 3 of 8 devices"])


class Card:
    platform, device_kind = "gpu", "NVIDIA H100"


def test_too_few_devices_are_refused_with_a_way_out():
    with pytest.raises(UserError, match=r"got 16 devices; .* 8 .*CPU .*meshtrain\.simulate\(16\)"):
        distributed.choose(jax.devices(), 16, 1)
    with pytest.raises(
        UserError, match=r"got 16 devices; .* at most the 4 available NVIDIA H100 GPU .*JAX_PLATFORMS=cpu"
    ):
        distributed.choose([Card()] * 4, 16, 1)


@pytest.mark.parametrize("needed", [4, 16])
def test_several_processes_must_have_exactly_as_many(needed):
    with pytest.raises(UserError, match=rf"got {needed} devices; allowed: exactly the 8 .* devices of the 2 processes"):
        distributed.choose(jax.devices(), needed, 2)
    assert distributed.choose(jax.devices(), 8, 2) == (jax.devices(), [])


def test_an_nvidia_driver_is_looked_for_without_loading_it(tmp_path):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nexit 0\n")
    program.chmod(0o755)
    assert distributed.nvidia_answers({"PATH": str(tmp_path)})
    assert not distributed.nvidia_answers({"PATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""})
    program.write_text("#!/bin/sh\nexit 9\n")
    assert distributed.nvidia_answers({"PATH": str(tmp_path)}) == Path("/proc/driver/nvidia/version").exists()


def test_start_simulates_says_so_keeps_compilations_and_may_be_called_again(tmp_path):
    code = """
devices, lines = start(6)
assert len(devices) == 6 and lines == ["6 devices are simulated on this machine's CPU"], lines
assert is_main_process() and jax.config.jax_platforms == "cpu"
jax.jit(lambda x: x + 1)(1)
assert len(start(6)[0]) == 6
assert start(4)[1][-1] == "the mesh uses the first 4 of 6 devices"
assert len(start(None)[0]) == len(start(8, is_open=True)[0]) == 6
assert len(start(3, is_open=True)[0]) == 3
run(lambda: start(7) and 1)
"""
    _, errors = finish(launch(code, HOME=str(tmp_path), CUDA_VISIBLE_DEVICES=""), code=2)
    assert errors.startswith("meshtrain: error: mesh: got 7 devices; allowed: at most the 6 available CPU devices")
    assert len(errors.splitlines()) == 1
    assert list((tmp_path / ".cache/meshtrain/jax").glob("jit_*"))


def test_processes_that_are_counted_only_when_they_meet_share_the_devices(monkeypatch):
    """Kubernetes and Cloud TPU: a host of 512 asked for the simulated devices of all of them."""
    met, asked = [], []

    def stop(num_devices):
        asked.append(num_devices)
        raise InterruptedError

    monkeypatch.setattr(cluster, "processes", lambda *_: {"cluster_detection_method": "k8s"})
    monkeypatch.setattr(jax.distributed, "initialize", lambda **how: met.append(how))
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: bool(met))
    monkeypatch.setattr(peers.distributed.global_state, "num_processes", 512)
    monkeypatch.setattr(distributed.endings, "end_together", lambda: None)  # its thread would outlive the test
    monkeypatch.setattr(distributed, "_simulate", stop)
    with pytest.raises(InterruptedError):
        distributed.start(4096)
    assert met == [{"cluster_detection_method": "k8s"}]
    assert asked == [8]


def test_a_notebook_reserves_its_devices_in_one_call():
    code = """
import meshtrain
meshtrain.simulate(4)
meshtrain.simulate(3)  # nothing has started yet
assert len(jax.devices()) == 3 and jax.devices()[0].platform == "cpu"
meshtrain.simulate(3)
assert len(start(2)[0]) == 2
run(lambda: meshtrain.simulate(4))
"""
    _, errors = finish(launch(code, CUDA_VISIBLE_DEVICES=""), code=2)
    assert errors == (
        "meshtrain: error: simulate: got 4 devices, but JAX has already started with 3 x cpu; allowed: a call "
        "before anything uses JAX; nearest: restart Python, and call simulate(4) first\n"
    )


@pytest.mark.parametrize("path", sorted(Path("configs").glob("*.py")), ids=lambda path: path.stem)
def test_the_devices_of_every_configuration_can_be_simulated_for_explain(path):
    assert 1 <= math.prod(load(str(path), []).mesh.values()) <= distributed.MAX_SIMULATED


@pytest.mark.parametrize(("number", "near"), [(0, 1), (-3, 1), (10**6, 8192)])
def test_a_number_of_devices_that_jax_does_not_start_with_is_refused(number, near):
    with pytest.raises(UserError, match=rf"^simulate: got {number}; allowed: 1 to 8192 devices; nearest: {near}$"):
        distributed.simulate(number)


def test_start_takes_what_a_notebook_has_and_goes_on_without_a_cache(tmp_path):
    (tmp_path / "file").write_text("")
    cache = str(tmp_path / "file" / "cache")
    code = """
jax.devices()
devices, lines = start(None)
assert len(devices) == 1, devices
assert len(lines) == 1 and lines[0].startswith("compilation cache off: "), lines
jax.jit(lambda x: x + 1)(1)
"""
    _, errors = finish(launch(code, JAX_PLATFORMS="cpu", JAX_COMPILATION_CACHE_DIR=cache))
    # The first line of a notebook is JAX's alone: compilers of GPUs that are not there may complain to it.
    assert "cache" not in errors, errors


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("junk", 'Could not open file "junk" to read flags'),
        ("--xla_no_such_flag=1 --xla_cpu_enable_fast_math=false", "Unknown flag in XLA_FLAGS: --xla_no_such_flag=1"),
        ("--xla_cpu_enable_fast_math=junk", "Couldn't interpret value junk for flag xla_cpu_enable_fast_math"),
    ],
)
def test_flags_that_xla_would_end_the_process_for_are_a_line(flags, said, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", flags)
    with pytest.raises(UserError) as refusal:
        distributed.start(8)
    [line] = refusal.value.problems
    assert line.startswith(f"XLA_FLAGS: got {flags}; allowed: flags that XLA accepts ({said}")


def test_two_processes_meet_and_share_the_devices(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    code = """
devices, lines = start(8)
print(len(devices), len(jax.local_devices()), is_main_process(), *lines)
assert len(start(8)[0]) == 8
"""
    environ = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2", "JAX_PLATFORMS": "cpu"}
    started = [launch(code, HOME=str(tmp_path), JAX_PROCESS_ID=str(i), **environ) for i in range(2)]
    printed = [finish(process)[0].strip() for process in started]
    assert printed == [f"8 4 {main} 8 devices are simulated on 2 processes" for main in (True, False)]


def test_one_that_is_left_of_a_job_keeps_its_number_of_devices(tmp_path):
    code = "devices, _ = start(8, is_open=True)\nprint(len(devices))"
    environ = {"HOME": str(tmp_path), "JAX_PLATFORMS": "cpu", "MESHTRAIN_FULL_PROCESSES": "4"}
    found = [launch(code, **environ, **more) for more in ({"JAX_NUM_CPU_DEVICES": "1"}, {})]
    assert [finish(process)[0].strip() for process in found] == ["1", "2"]


def test_of_two_processes_with_one_number_each_says_so_in_a_line_and_no_stack():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    code = "from meshtrain.launch import rendezvous; rendezvous.LINE_SECONDS = 3; run(lambda: start(3) and None)"
    environ = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "3", "JAX_PLATFORMS": "cpu"}
    started = [launch(code, JAX_PROCESS_ID=index, **environ) for index in "011"]
    ended = [process.communicate(timeout=120)[1].splitlines() for process in started]
    assert sorted(process.returncode for process in started) == [2, 2, 4]
    assert ended[0][-1] == (
        "meshtrain: error: processes: 127.0.0.1 and another process both report that they are process 1; "
        "allowed: each number once; nearest: start each process once, with its own JAX_PROCESS_ID"
    )
    assert {line.split(": ")[1] for lines in ended for line in lines} <= {"error", "lost", "waiting"}, ended


@pytest.mark.parametrize(
    "models, platforms, environ, expected",
    [
        (["NVIDIA H100 80GB HBM3"] * 2, "", {}, "0.94"),
        (["NVIDIA H200"], "cuda,cpu", {"PATH": "/bin"}, "0.94"),
        (["NVIDIA H200"], "cpu", {}, None),
        (["NVIDIA H200"], "", {FRACTION_VARIABLE: "0.5"}, "0.5"),
        (["NVIDIA H200"], "", {"XLA_CLIENT_MEM_FRACTION": "0.5"}, None),  # JAX refuses both
        (["NVIDIA H200", "NVIDIA GeForce RTX 2060"], "", {}, None),  # which may draw a screen
        ([], "", {}, None),
    ],
)
def test_jax_takes_of_known_gpus_what_plans_assume_unless_the_user_says_otherwise(
    tmp_path, models, platforms, environ, expected
):
    for number, model in enumerate(models):
        folder = tmp_path / "gpus" / f"0000:{number}"
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t\t {model}\nIRQ:   \t\t 16\n")
    distributed.take_memory(platforms, environ, tmp_path)
    assert (environ[FRACTION_VARIABLE] if FRACTION_VARIABLE in environ else None) == expected


def test_jax_has_not_started_when_its_share_of_a_gpu_is_set(monkeypatch):
    asked = []
    monkeypatch.setattr(distributed, "take_memory", lambda platforms, environ: asked.append(environ))
    monkeypatch.setattr(distributed.cluster, "processes", lambda *_: pytest.fail("in time") if not asked else None)
    assert distributed.start(2)[0]
    assert asked == [os.environ]
