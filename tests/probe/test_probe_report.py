"""Findings as lines: what shares one, what is left out, and the summary."""

from meshtrain.probe.checks import report
from meshtrain.probe.checks.report import OK, Finding, error, ok, warning

HOSTS = {process: f"node{process}" for process in range(20)}


def test_a_check_that_is_well_is_one_line_and_one_that_fails_names_only_the_failures():
    found = [Finding(OK, *seen, process=i) for i in range(3) for seen in (("disk", f"{i} GiB"), ("GPUs", "8"))]
    assert report.lines(found, HOSTS) == ["ok       disk           0 GiB", "ok       GPUs           8"]
    found += [error("disk", "full", "free space", process) for process in (1, 2)]
    assert report.lines(found, HOSTS) == [
        "ok       GPUs           8",
        "error    disk           processes 1 (node1), 2 (node2): full; do: free space",
    ]


def test_many_processes_are_counted():
    found = [error("disk", "full", "", process) for process in range(20)]
    [line] = report.lines(found, HOSTS)
    assert line.endswith("7 (node7) and 12 more: full")


def test_whatever_was_seen_stays_on_one_line():
    [line] = report.lines([error("GPUs", "a\nb\x1b[2J", "c")], {})
    assert line == "error    GPUs           a b\\x1b[2J; do: c"


def test_the_summary_counts_problems_not_processes():
    alike = [error("disk", "full", "x", process) for process in range(3)]
    assert report.last_line([ok("a", "b")], "this machine") == "doctor: no problems in this machine"
    assert (
        report.last_line([*alike, warning("b", "c", "d")], "it") == "doctor: 1 error, 1 warning in it: a job would fail"
    )
    assert report.last_line([warning("b", "c", "d")] * 2, "it") == "doctor: 1 warning in it: a job may start"
    assert [report.exit_code(each) for each in ([], [warning("b", "c", "d")], alike)] == [0, 0, 2]
