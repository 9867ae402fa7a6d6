"""What is read of this machine, from files and programs of ours where they can be had."""

import time

from meshtrain.launch.cluster import Meeting
from meshtrain.probe.checks import machine_facts
from meshtrain.probe.checks.report import ERROR, OK


def test_a_read_that_blocks_is_given_up():
    start = time.monotonic()
    assert machine_facts.within(0.05, lambda: time.sleep(20), "given up") == "given up"
    assert time.monotonic() - start < 10
    assert machine_facts.within(20, lambda: "read", "given up") == "read"


def test_the_limit_of_a_container_is_its_memory(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal:       64 kB\nMemFree:  1 kB\nMemAvailable:   48 kB\n")
    assert machine_facts.memory(tmp_path / "meminfo", tmp_path) == (48 * 1024, 64 * 1024)
    (tmp_path / "memory.max").write_text("32768\n")
    (tmp_path / "memory.current").write_text("30000\n")
    assert machine_facts.memory(tmp_path / "meminfo", tmp_path) == (2768, 32768)
    (tmp_path / "memory.max").write_text("max\n")
    assert machine_facts.memory(tmp_path / "meminfo", tmp_path) == (48 * 1024, 64 * 1024)


def test_interfaces_are_up_or_down_by_flags_and_state(tmp_path):
    for name, flags, state in [
        ("lo", "0x9", "unknown"),
        ("eth0", "0x1003", "up"),
        ("ib0", "0x1003", "down"),
        ("eth1", "0x1002", "up"),
    ]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "flags").write_text(f"{flags}\n")
        (tmp_path / name / "operstate").write_text(f"{state}\n")
    (tmp_path / "bonding_masters").write_text("")
    assert machine_facts.interfaces(tmp_path) == {
        "lo": (True, True),
        "eth0": (True, False),
        "ib0": (False, False),
        "eth1": (False, False),
    }


def test_gpus_are_what_the_program_lists(tmp_path):
    program, environ = tmp_path / "nvidia-smi", {"PATH": str(tmp_path)}
    assert machine_facts.gpus(environ, 20) == ([], "")

    def answers(text):
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
        return machine_facts.gpus(environ, 1)

    listed = (
        "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-aa)\n  MIG 1g.10gb Device 0: (UUID: MIG-b)\nGPU 1: X (UUID: GPU-c)"
    )
    assert answers(f"echo '{listed}'") == (["GPU-aa", "GPU-c"], "")
    assert answers("echo 'No devices were found'; exit 6") == ([], "")
    assert answers("echo 'Failed to initialize NVML' >&2; exit 255") == ([], "Failed to initialize NVML")
    assert answers("exec /bin/sleep 20") == ([], "no answer in 1 s")


def test_slurm_says_how_many_gpus_a_process_has_where_it_is_alone_on_its_machine():
    count = {"SLURM_GPUS_ON_NODE": "8"}
    assert machine_facts._slurm_gpus({**count, "SLURM_STEP_TASKS_PER_NODE": "1(x4)"}) == 8
    assert machine_facts._slurm_gpus({**count, "SLURM_STEP_TASKS_PER_NODE": "8(x4)"}) is None
    assert machine_facts._slurm_gpus({"SLURM_STEP_TASKS_PER_NODE": "1"}) is None


def test_a_name_that_does_not_resolve_says_why():
    addresses, failure = machine_facts.resolve_host(Meeting("no-such-host.invalid:1", 2, 1))
    assert addresses == []
    assert failure
    assert machine_facts.resolve_host(Meeting("127.0.0.1:1", 2, 1)) == (["127.0.0.1"], "")


def test_the_facts_of_this_machine_are_judged(tmp_path):
    """A folder that no user may write, and a network that is not there, among checks that are well."""
    cache = str(tmp_path / "not" / "yet")
    environ = {"NCCL_SOCKET_IFNAME": "no-such", "JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": cache}
    (tmp_path / "file").write_text("")
    found = {each.check: each for each in machine_facts.findings(None, tmp_path / "file" / "x", None, environ, 20)}
    wrong = {check for check, each in found.items() if each.verdict == ERROR}
    assert wrong == {"workdir", "interface"}
    assert {"software", "cache", "memory"} <= {check for check, each in found.items() if each.verdict == OK}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


def test_libraries_are_the_driver_and_where_others_come_from(tmp_path):
    version = tmp_path / "version"
    version.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n")
    assert machine_facts.libraries({"LD_LIBRARY_PATH": "/a", "PATH": "/b"}, version) == {
        "NVIDIA driver": "550.54.15",
        "LD_LIBRARY_PATH": "/a",
    }
    assert machine_facts.libraries({"LD_PRELOAD": ""}, tmp_path / "missing") == {}


def test_a_changed_source_is_other_software(tmp_path, monkeypatch):
    monkeypatch.setattr(machine_facts, "_PACKAGE", tmp_path)
    (tmp_path / "a.py").write_text("x = 1\n")
    before = machine_facts.software()
    assert before == machine_facts.software()
    assert {"python", "jax", "jaxlib", "flax", "meshtrain"} <= set(before)
    (tmp_path / "a.py").write_text("x = 2\n")
    after = machine_facts.software()
    assert {name for name in before if before[name] != after[name]} == {"meshtrain's source"}
