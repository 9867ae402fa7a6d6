"""Formats the doctor's report: one line per check with its verdict, the observation, and the advice."""

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from meshtrain.errors import EXIT_FINISHED, EXIT_USER_ERROR, one_line

OK, WARNING, ERROR = "ok", "warning", "error"
_NAMED = 8  # processes that a line names; further processes are only counted


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
      verdict: the severity: `ok`, `warning` (a run may work) or `error` (a run fails or hangs).
      check: the name of the check, one or two words.
      seen: the observation.
      fix: the advice; empty if nothing is wrong.
      process: the index of the process in which the check ran; None: the check concerns all processes.
    """

    verdict: str
    check: str
    seen: str
    fix: str = ""
    process: int | None = None


def ok(check: str, seen: str) -> Finding:
    """Returns a finding with the verdict `ok`: the check passed. The arguments are fields of `Finding`."""
    return Finding(OK, check, seen)


def warning(check: str, seen: str, fix: str, process: int | None = None) -> Finding:
    """Returns a finding with the verdict `warning`: a run may still work. The arguments are fields of `Finding`."""
    return Finding(WARNING, check, seen, fix, process)


def error(check: str, seen: str, fix: str, process: int | None = None) -> Finding:
    """Returns a finding with the verdict `error`: a run fails or hangs. The arguments are fields of `Finding`."""
    return Finding(ERROR, check, seen, fix, process)


def lines(findings: Sequence[Finding], hosts: Mapping[int, str]) -> list[str]:
    """Returns one line for each passed check, and one for each problem.

    A check that passes in all processes has one line, with the finding of the first process. If a check fails in any
    process, only its problems are listed. Processes with the same problem share a line.

    Args:
      findings: the results of all checks in all processes.
      hosts: process -> the name of its machine.
    """
    groups: dict[tuple[str, ...], list[int]] = {}
    shown: dict[tuple[str, ...], Finding] = {}
    for finding in findings:
        key = (OK, finding.check) if finding.verdict == OK else (*_words(finding),)
        shown.setdefault(key, finding)
        groups.setdefault(key, []).extend([] if finding.process is None else [finding.process])
    wrong = {finding.check for finding in findings if finding.verdict != OK}
    return [
        _line(finding, groups[key], hosts)
        for key, finding in shown.items()
        # If a check fails in some process, its successes are not shown.
        if finding.verdict != OK or finding.check not in wrong
    ]


def last_line(findings: Sequence[Finding], what: str) -> str:
    """Returns the last line of the report: the numbers of errors and warnings, and whether a job would fail.

    Args:
      findings: the results of all checks in all processes.
      what: the checked processes or machines as text, such as `2 processes on 1 machine`.
    """
    counts = collections.Counter(verdict for verdict, *_ in set(map(_words, findings)))
    if not counts[ERROR] + counts[WARNING]:
        return f"doctor: no problems in {what}"
    parts = [f"{counts[verdict]} {verdict}{'s' * (counts[verdict] > 1)}" for verdict in (ERROR, WARNING)]
    end = "a job would fail" if counts[ERROR] else "a job may start"
    return f"doctor: {', '.join(text for text in parts if text[0] != '0')} in {what}: {end}"


def exit_code(findings: Iterable[Finding]) -> int:
    """Returns exit code 2 if the verdict of any finding is `error` (a run would fail or hang), else 0."""
    return EXIT_USER_ERROR if any(finding.verdict == ERROR for finding in findings) else EXIT_FINISHED


def process_list(processes: Iterable[int], hosts: Mapping[int, str]) -> str:
    """Returns a text that lists processes with their machines; after eight processes, the others are only counted.

    >>> process_list([1, 3], {1: "b", 3: "d"}), process_list([2], {})
    ('processes 1 (b), 3 (d)', 'process 2')

    Args:
      processes: the indices of the processes.
      hosts: process -> the name of its machine; a process without an entry is listed without a machine.
    """
    each = [f"{process} ({hosts[process]})" if process in hosts else f"{process}" for process in sorted(processes)]
    more = f" and {len(each) - _NAMED} more" if len(each) > _NAMED else ""
    return f"process{'es' if len(each) > 1 else ''} {', '.join(each[:_NAMED])}{more}"


def _line(finding: Finding, processes: Sequence[int], hosts: Mapping[int, str]) -> str:
    where = f"{process_list(processes, hosts)}: " if processes and finding.verdict != OK else ""
    fix = f"; do: {finding.fix}" if finding.fix else ""
    return f"{finding.verdict:9}{finding.check:15}{one_line(f'{where}{finding.seen}{fix}')}"


def _words(finding: Finding) -> tuple[str, ...]:
    return finding.verdict, finding.check, finding.seen, finding.fix
