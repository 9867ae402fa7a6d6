"""How much main memory a process may have: the machine's, its control groups' and the shell's limit."""

import resource

import pytest

from meshtrain.launch import host_memory

KIB = 1024
TABLE = "MemTotal:  64 kB\nMemFree:  1 kB\nMemAvailable:  48 kB\nSwapTotal:  16 kB\n"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A function (own groups, files) -> the arguments of a machine with 64 KiB of memory and 16 KiB of swap."""
    monkeypatch.setattr(host_memory.resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY,) * 2)

    def described(own="", **files):
        (tmp_path / "meminfo").write_text(TABLE)
        (tmp_path / "own").write_text(own)
        for path, text in files.items():
            file = tmp_path / "groups" / path.replace("__", "/").replace("_DOT_", ".")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{text}\n")
        return tmp_path / "meminfo", tmp_path / "groups", tmp_path / "own"

    return described


V2 = {"job__memory_DOT_max": 32 * KIB, "job__memory_DOT_current": 30 * KIB}
V1 = {
    "memory__job__memory_DOT_limit_in_bytes": 16 * KIB,
    "memory__job__memory_DOT_usage_in_bytes": 4 * KIB,
    "memory__memory_DOT_limit_in_bytes": 9223372036854771712,
    "memory__memory_DOT_usage_in_bytes": 5,
}


@pytest.mark.parametrize(
    "own, files, available, total",
    [
        ("", {}, 48, 64),
        ("0::/\n", {"memory_DOT_max": "max", "memory_DOT_current": 1}, 48, 64),
        ("0::/\n", V2, 48, 64),  # another group's
        ("0::/job\n", V2, 2, 32),
        ("0::/job/step\n", V2 | {"job__step__memory_DOT_max": "max"}, 2, 32),
        ("0::/job/step\n", V2 | {"job__step__memory_DOT_max": 8 * KIB, "job__step__memory_DOT_current": 0}, 2, 8),
        ("8:pids:/\n4:memory:/job\n0::/\n", V1, 12, 16),
        ("4:memory:/not/seen/here\n", V1, 48, 64),
    ],
)
def test_the_lowest_limit_of_a_process_and_the_groups_above_counts(machine, own, files, available, total):
    given = machine(own, **files)
    assert host_memory.memory(*given) == (available * KIB, total * KIB)
    assert host_memory.most_bytes(*given) == (total + 16) * KIB  # with the swap


def test_a_limit_of_the_shell_counts(machine, monkeypatch):
    limits = {resource.RLIMIT_AS: 70 * KIB, resource.RLIMIT_DATA: resource.RLIM_INFINITY}
    monkeypatch.setattr(host_memory.resource, "getrlimit", lambda kind: (limits[kind],) * 2)
    assert host_memory.most_bytes(*machine()) == 70 * KIB
    limits[resource.RLIMIT_DATA] = 12 * KIB
    assert host_memory.most_bytes(*machine()) == 12 * KIB


def test_a_machine_without_the_kernels_table_has_unknown_memory(tmp_path):
    assert host_memory.most_bytes(tmp_path / "meminfo", tmp_path, tmp_path / "own") is None
