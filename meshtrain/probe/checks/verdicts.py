"""What the doctor says: one line a check with a verdict, what was seen, and what to do."""

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from meshtrain.errors import EXIT_FINISHED, EXIT_USER_ERROR, one_line

OK, WARNING, ERROR = "ok", "warning", "error"
_NAMED = 8  # processes that a line names; of more it says how many there are


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
      verdict: `ok`, `warning` (a run may work) or `error` (a run fails or hangs).
      check: what was checked, in a word or two.
      seen: what was seen.
      fix: what to do; empty if nothing is wrong.
      process: of which process; None: of all together.
    """

    verdict: str
    check: str
    seen: str
    fix: str = ""
    process: int | None = None


def ok(check: str, seen: str) -> Finding:
    """Returns a finding without anything to do."""
    return Finding(OK, check, seen)


def warning(check: str, seen: str, fix: str, process: int | None = None) -> Finding:
    """Returns a finding that a run may survive."""
    return Finding(WARNING, check, seen, fix, process)


def error(check: str, seen: str, fix: str, process: int | None = None) -> Finding:
    """Returns a finding that a run does not survive."""
    return Finding(ERROR, check, seen, fix, process)


def lines(findings: Sequence[Finding], hosts: Mapping[int, str]) -> list[str]:
    """Returns a line for each check that is fine, and for each problem.

    A check that is fine in several processes is one line, of the first of them. Processes with the same problem share
    its line.
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
        # Of a check that fails somewhere, only the failures are of interest.
        if finding.verdict != OK or finding.check not in wrong
    ]


def last_line(findings: Sequence[Finding], what: str) -> str:
    """Returns the summary of all findings; `what` was checked, such as `2 processes on 1 machine`."""
    counts = collections.Counter(verdict for verdict, *_ in set(map(_words, findings)))
    if not counts[ERROR] + counts[WARNING]:
        return f"doctor: nothing is wrong with {what}"
    parts = [f"{counts[verdict]} {verdict}{'s' * (counts[verdict] > 1)}" for verdict in (ERROR, WARNING)]
    end = "a job would fail" if counts[ERROR] else "a job may start"
    return f"doctor: {', '.join(text for text in parts if text[0] != '0')} in {what}: {end}"


def exit_code(findings: Iterable[Finding]) -> int:
    """Returns 2 if a run would fail, else 0."""
    return EXIT_USER_ERROR if any(finding.verdict == ERROR for finding in findings) else EXIT_FINISHED


def named(processes: Iterable[int], hosts: Mapping[int, str]) -> str:
    """Returns processes with their machines.

    >>> named([1, 3], {1: "b", 3: "d"}), named([2], {})
    ('processes 1 (b), 3 (d)', 'process 2')
    """
    each = [f"{process} ({hosts[process]})" if process in hosts else f"{process}" for process in sorted(processes)]
    more = f" and {len(each) - _NAMED} more" if len(each) > _NAMED else ""
    return f"process{'es' if len(each) > 1 else ''} {', '.join(each[:_NAMED])}{more}"


def _line(finding: Finding, processes: Sequence[int], hosts: Mapping[int, str]) -> str:
    where = f"{named(processes, hosts)}: " if processes and finding.verdict != OK else ""
    fix = f"; do: {finding.fix}" if finding.fix else ""
    return f"{finding.verdict:9}{finding.check:15}{one_line(f'{where}{finding.seen}{fix}')}"


def _words(finding: Finding) -> tuple[str, ...]:
    return finding.verdict, finding.check, finding.seen, finding.fix
