"""Faults of one machine, planted as facts: each is one line that says what was seen and what to do."""

import pytest

from meshtrain.launch.cluster import Meeting
from meshtrain.probe.checks import one_machine
from meshtrain.probe.checks.report import ERROR, OK, WARNING, lines

GIB = 2**30
PARTS = {"meshtrain": "0.1.0", "jax": "0.10.2", "jaxlib": "0.10.2", "flax": "0.12.8"}
ON_GPUS = {**PARTS, "jax-cuda12-plugin": "0.10.2"}
NODE = Meeting("node1:61000", 2, 1, 2)
OWN = Meeting("node1:61000", 2, 0, 2)
SAME_MACHINE = Meeting("localhost:61000", 2, 1)
GPUS = [f"GPU-{i}" for i in range(8)]
NETS = {"lo": (True, True), "eth0": (True, False), "ib0": (False, False), "docker0": (True, False)}
LOOP_ONLY = {"lo": (True, True), "eth0": (False, False)}

OLD, NEW = "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"
FAULTS = [
    # what, the finding, verdict, what is seen, what to do
    (
        "a package is missing",
        one_machine.software({**PARTS, "flax": None}, "3.11.7"),
        ERROR,
        "flax is not",
        "pip install",
    ),
    (
        "jaxlib",
        one_machine.software({**PARTS, "jaxlib": "0.12.0"}, "3.11.7"),
        ERROR,
        "0.12.0 is newer",
        "pip install jax==",
    ),
    (
        "plugin",
        one_machine.software({**PARTS, "jax-cuda12-plugin": "0.9.1"}, "3.11.7"),
        ERROR,
        "0.9.1 does not fit jaxlib 0.10.2",
        "jax-cuda12-plugin==0.10.2",
    ),
    (
        "unknown name",
        one_machine.coordinator(NODE, [], "Name or service not known"),
        ERROR,
        "node1: Name",
        "an IP address",
    ),
    ("loopback name", one_machine.coordinator(NODE, ["127.0.1.1"]), ERROR, "node1:61000 is 127.0.1.1", "/etc/hosts"),
    ("loopback at process 0", one_machine.coordinator(OWN, ["127.0.1.1"]), WARNING, "only this machine", "/etc/hosts"),
    (
        "proxy",
        one_machine.proxy(NODE, {"https_proxy": "http://p:3128", "no_proxy": "x"}),
        WARNING,
        "https_proxy",
        "no_proxy=",
    ),
    (
        "driver hangs",
        one_machine.gpus([], "no answer in 20 s", None, None, ON_GPUS),
        ERROR,
        "no answer in 20 s",
        "restart",
    ),
    (
        "lost GPU",
        one_machine.gpus(GPUS[:7], "", None, 8, ON_GPUS),
        ERROR,
        "7 of 7 visible, 8 expected",
        "from the scheduler",
    ),
    (
        "bound GPU",
        one_machine.gpus(GPUS, "", "3", 8, ON_GPUS),
        ERROR,
        "CUDA_VISIBLE_DEVICES=3, 8 expected",
        "scheduler",
    ),
    (
        "ordinal",
        one_machine.gpus(GPUS[:1], "", "3", None, ON_GPUS),
        ERROR,
        "has 1 GPUs, counted from 0",
        "let the scheduler set",
    ),
    (
        "identifier",
        one_machine.gpus(GPUS, "", "GPU-9", None, ON_GPUS),
        ERROR,
        "has GPU-9, which is not a GPU",
        "nvidia-smi -L",
    ),
    ("no plugin", one_machine.gpus(GPUS, "", None, 8, PARTS), ERROR, "this JAX cannot use them", "meshtrain[cuda12]"),
    (
        "no interface",
        one_machine.interface("ens", NETS, 2),
        ERROR,
        "matches none of the interfaces docker0, eth0",
        "=docker0",
    ),
    ("whole name", one_machine.interface("=eth", NETS, 2), ERROR, "matches none", "NCCL_SOCKET_IFNAME="),
    ("interface down", one_machine.interface("ib", NETS, 2), ERROR, "ib0 is down", "NCCL_SOCKET_IFNAME="),
    ("loopback", one_machine.interface("lo", NETS, 2), ERROR, "selects lo", "NCCL_SOCKET_IFNAME="),
    (
        "loopback left",
        one_machine.interface("^docker0", NETS, 2),
        ERROR,
        "selects lo",
        "NCCL_SOCKET_IFNAME=^docker0,lo",
    ),
    (
        "loopback only",
        one_machine.interface("", LOOP_ONLY, 2),
        ERROR,
        "only loopback is up, for 2 machines",
        "start a network interface",
    ),
    (
        "unwritable",
        one_machine.folder("workdir", "/s", 0.0, "Permission denied"),
        ERROR,
        "/s: Permission",
        "every process can",
    ),
    ("full disk", one_machine.disk("/s", GIB - 1, 100), ERROR, "/s has 1.00 GiB left", "free some space"),
    ("no inodes", one_machine.disk("/s", 9 * GIB, 0), ERROR, "no file can be created", "inodes"),
    (
        "cache",
        one_machine.folder("cache", "/c", 0.0, "Read-only file system"),
        WARNING,
        "each start compiles again",
        "JAX_COMPILATION_",
    ),
    ("memory", one_machine.memory(GIB - 1, 64 * GIB), ERROR, "1.00 GiB of 64 GiB available", "end other programs"),
    (
        "fraction",
        one_machine.memory_fraction({OLD: "0.75"}, 8),
        WARNING,
        f"{OLD}=0.75: plan assumes 0.94",
        f"{OLD}=0.94",
    ),
    (
        "fraction of the other name",
        one_machine.memory_fraction({NEW: "0.5"}, 8),
        WARNING,
        "plan assumes",
        f"{NEW}=0.94",
    ),
    ("no fraction", one_machine.memory_fraction({OLD: "94%"}, 8), ERROR, "94%, which JAX rejects", f"{OLD}=0.94"),
    (
        "two fractions",
        one_machine.memory_fraction({OLD: "0.94", NEW: "0.94"}, 1),
        ERROR,
        "together",
        f"leave {OLD} out",
    ),
    ("shared memory", one_machine.shared_memory(2**26, 8), WARNING, "/dev/shm has 64 MiB, for 8 GPUs", "--shm-size"),
    ("locked memory", one_machine.check_locked_memory(2**23, True), WARNING, "at most 8 MiB", "ulimit -l unlimited"),
]


@pytest.mark.parametrize(
    ("finding", "verdict", "seen", "fix"), [each[1:] for each in FAULTS], ids=[f[0] for f in FAULTS]
)
def test_a_planted_fault_is_one_line_with_what_to_do(finding, verdict, seen, fix):
    assert finding.verdict == verdict
    assert seen in finding.seen
    assert fix in finding.fix
    [line] = lines([finding], {})
    assert "\n" not in line
    assert line.startswith(verdict)


@pytest.mark.parametrize(
    "finding",
    [
        one_machine.software(PARTS, "3.11.7"),
        one_machine.software({**PARTS, "jaxlib": "0.9.12"}, "3.11.7"),  # numbers, not letters
        one_machine.software({**ON_GPUS, "jax-cuda13-plugin": None}, "3.11.7"),
        one_machine.coordinator(NODE, ["10.0.0.1"]),
        one_machine.coordinator(NODE, ["10.0.0.1", "127.0.0.1"]),
        one_machine.coordinator(SAME_MACHINE, ["127.0.0.1", "::1"]),  # several processes of one machine
        one_machine.proxy(NODE, {"https_proxy": "http://p:3128", "no_proxy": "localhost,node1"}),
        one_machine.proxy(Meeting("a.b.org:1", 2, 1), {"http_proxy": "http://p", "no_grpc_proxy": ".b.org"}),
        one_machine.proxy(NODE, {"HTTPS_PROXY": "http://p:3128"}),  # gRPC reads small letters only
        one_machine.gpus([], "", None, None, PARTS),
        one_machine.gpus(GPUS, "", None, 8, ON_GPUS),
        one_machine.gpus(GPUS, "", "3", 1, ON_GPUS),
        one_machine.gpus(GPUS, "", "GPU-3,MIG-7", 2, ON_GPUS),
        one_machine.gpus(GPUS, "", "0,1,-1,9", 2, ON_GPUS),  # CUDA stops reading at -1
        one_machine.gpus(GPUS, "", "", 0, PARTS),
        one_machine.interface("", NETS, 2),
        one_machine.interface("", LOOP_ONLY, 1),
        one_machine.interface("eth,ib:1", NETS, 2),
        one_machine.interface("=eth0", NETS, 2),
        one_machine.interface("^docker,lo", NETS, 2),
        one_machine.interface("lo", NETS, 1),
        one_machine.folder("workdir", "/s", 0.1),
        one_machine.disk("/s", GIB, 1),
        one_machine.disk("/s", GIB, -1),
        one_machine.folder("cache", "/c", 0.1),
        one_machine.memory(GIB, GIB),
        one_machine.memory_fraction({}, 8),
        one_machine.memory_fraction({OLD: "0.940"}, 8),
        one_machine.memory_fraction({OLD: "0.75"}, 0),
        one_machine.shared_memory(2**26, 1),
        one_machine.shared_memory(2**30, 8),
        one_machine.check_locked_memory(None, True),
        one_machine.check_locked_memory(2**16, False),
    ],
)
def test_what_is_well_has_nothing_to_do(finding):
    assert (finding.verdict, finding.fix) == (OK, ""), finding
