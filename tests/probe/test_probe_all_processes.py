"""Faults of several processes, planted as what each of them says, without a clock: who is named, and what to do."""

import pytest

from meshtrain.launch.cluster import Meeting
from meshtrain.launch.rendezvous import Unreachable
from meshtrain.probe.checks import all_processes
from meshtrain.probe.checks.report import ERROR, OK, WARNING, lines, warning

JOB = Meeting("node1:61000", 4, 0, 4, ("node1", "node2", "node3", "node4"))
HOSTS = {0: "node1", 1: "node2", 2: "node3", 3: "node4"}
VERSIONS = {process: {"jax": "0.10.2", "python": "3.11.7"} for process in HOSTS}
SEEN = {process: ("/shared", [], 0.1) for process in HOSTS}
REDUCES = {"stuck": (3, "an all-reduce on data")}
COUNTS = dict.fromkeys(HOSTS, (8, "NVIDIA H100"))
QUICK = [1.0e-3, 1.1e-3, 1.3e-3]
PAIRS = {(a, b): QUICK for a in range(4) for b in range(a + 1, 4)}
SLOW_2 = {pair: [2.1e-3, 2.2e-3, 2.3e-3] if 2 in pair else seconds for pair, seconds in PAIRS.items()}


def clocks(offsets, uncertain=0.01):
    """Two rounds in which other clocks are so many seconds ahead of process 0's."""
    said = {0: 100.0} | {process: 100.0 + offset for process, offset in offsets.items()}
    return all_processes.clocks([100.0 - uncertain, 100.0, 100.0 + uncertain], [said, said])


def named(findings):
    return [finding.process for finding in findings]


FAULTS = [
    # what, the findings, verdict, whom they name, what is seen, what to do
    (
        "missing",
        all_processes.check_registration(JOB, {0: "node1", 1: "node2", 3: "node4"}, [], 120),
        ERROR,
        [None],
        "process 2 (node3) of 4 did not register in 120 s",
        "reach node1:61000",
    ),
    (
        "firewall",
        [all_processes.unreachable_finding(JOB, Unreachable("node1:61000 does not answer"), False)],
        ERROR,
        [None],
        "does not answer",
        "open port 61000 in the firewall",
    ),
    (
        "the first differs",
        all_processes.same("versions", {**VERSIONS, 0: {"jax": "0.12.0", "python": "3.11.7"}}, "install the same"),
        ERROR,
        [0],
        "jax is 0.12.0, but 0.10.2 in process 1",
        "install the same",
    ),
    (
        "other driver",
        all_processes.same("libraries", {0: {"driver": "550"}, 1: {"driver": "535"}}, "the same", warning),
        WARNING,
        [1],
        "driver is 535, but 550 in process 0",
        "the same",
    ),
    ("clock behind", clocks({1: 0.1, 2: -5.0}), WARNING, [2], "5.0 s behind", "chrony"),
    (
        "late files",
        all_processes.shared({**SEEN, 3: ("/shared", [], 3.0)}, 4),
        WARNING,
        [None],
        "visible in /shared only after 3.0 s",
        "actimeo",
    ),
    (
        "other kind",
        all_processes.devices({**COUNTS, 1: (8, "NVIDIA A100")}, None, []),
        ERROR,
        [1],
        "8 x NVIDIA A100, but 8 x NVIDIA H100",
        "nvidia-smi",
    ),
    (
        "all but expected",
        all_processes.devices({0: (4, "NVIDIA H100"), 1: (4, "NVIDIA H100")}, 8, []),
        ERROR,
        [0, 1],
        "JAX sees 4",
        "nvidia-smi",
    ),
    (
        "on the CPU",
        all_processes.devices({**COUNTS, 3: (8, "cpu")}, 8, [3]),
        ERROR,
        [3],
        "on the CPU",
        "meshtrain[cuda12]",
    ),
    (
        "all stuck",
        all_processes.blocking_processes({0: REDUCES, 1: REDUCES}, 2, 60),
        ERROR,
        [0, 1],
        "an all-reduce on data has not ended in 60 s",
        "open the ports",
    ),
    (
        "wrong value",
        all_processes.collectives(
            {"data": (4, 1e-3)}, ["process 2: all-reduce on data: device 5 has 3 elements wrong"]
        ),
        ERROR,
        [None],
        "process 2: all-reduce on data",
        "remove this machine",
    ),
    ("slow host", all_processes.slow(SLOW_2), WARNING, [2], "2.10 ms to exchange", "remove the machine from the job"),
]


@pytest.mark.parametrize(
    ("found", "verdict", "processes", "seen", "fix"), [each[1:] for each in FAULTS], ids=[f[0] for f in FAULTS]
)
def test_a_planted_fault_is_one_line_that_names_the_process(found, verdict, processes, seen, fix):
    assert named(found) == processes
    assert {each.verdict for each in found} == {verdict}
    assert seen in found[0].seen
    assert fix in found[0].fix
    [line] = lines(found, HOSTS)
    assert all(f"{process} ({HOSTS[process]})" in line for process in processes if process is not None)


@pytest.mark.parametrize(
    "found",
    [
        all_processes.check_registration(JOB, HOSTS, [], 120),
        all_processes.same("versions", VERSIONS, "x"),
        all_processes.same("libraries", {0: {}, 1: {}}, "x"),
        clocks({1: 0.5, 2: -0.9}),
        clocks({1: 1.4}, 0.5),  # known to half a second only
        clocks({}),
        all_processes.shared(SEEN, 4),
        all_processes.shared({0: ("/unwritable", [0], 5.0)}, 1),  # alone, and the folder's own check says that
        all_processes.devices(COUNTS, None, []),
        all_processes.devices(COUNTS, 8, []),
        all_processes.blocking_processes({0: {}, 1: {}}, 2, 60),
        all_processes.collectives({"data": (4, 1e-3)}, []),
        all_processes.collectives({}, []),
        all_processes.slow(PAIRS),
        all_processes.slow({}),
        all_processes.slow({(0, 1): [9.0]}),
    ],
)
def test_what_is_well_has_nothing_to_do(found):
    assert {each.verdict for each in found} <= {OK}, found


def test_one_slow_partner_makes_nobody_slow():
    """Each of the others has a slow pair, too: that with the slow process."""
    assert named(all_processes.slow(SLOW_2)) == [2]
    one_link = {**PAIRS, (0, 1): [9e-3] * 3}
    assert {each.verdict for each in all_processes.slow(one_link)} == {OK}


def test_slow_begins_beyond_twice_the_median_and_ones_own_spread():
    def of_2(*milliseconds):
        times = [1e-3 * each for each in milliseconds]
        return {pair: times if 2 in pair else seconds for pair, seconds in PAIRS.items()}

    assert named(all_processes.slow(of_2(1.9, 2.0, 2.1))) == [None], "less than twice the median of 1 ms"
    assert named(all_processes.slow(of_2(2.1, 3.3, 9.0))) == [None], "its spread of 1.2 ms explains the 1.1 ms above"
    assert named(all_processes.slow(of_2(2.1, 3.1, 9.0))) == [2]


def test_the_fastest_round_tells_the_offset_of_a_clock():
    """Process 1 is 5 s ahead; of five rounds the fourth is quick, and the others wait on their way back."""
    said = [{0: 0.0, 1: theirs} for theirs in (105.0, 105.5, 106.1, 106.3, 107.0)]
    [found] = all_processes.clocks([100.0, 100.1, 101.0, 101.1, 101.5, 103.5], said)
    assert (found.verdict, found.process) == (WARNING, 1)
    assert "5.0 s ahead" in found.seen


def test_variables_of_one_process_are_not_compared():
    environ = {
        "NCCL_SOCKET_IFNAME": "ib0",
        "NCCL_DEBUG": "INFO",
        "JAX_PROCESS_ID": "3",
        "JAX_COORDINATOR_ADDRESS": "h:1",
        "PATH": "/bin",
        "NCCL_ALGO": "Ring",
        "XLA_FLAGS": "--x",
        "JAX_ENABLE_X64": "1",
    }
    assert set(all_processes.common_environment(environ)) == {"NCCL_ALGO", "XLA_FLAGS", "JAX_ENABLE_X64"}
