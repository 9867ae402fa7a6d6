"""Planted faults in what is seen."""

from tests.faults.fault import Fault

FAULTS = (
    Fault(
        "observe/trackers.py",
        'rows = [row if row and row["step"] <= step else None for row in all_rows]',
        "rows = [row or None for row in all_rows]",
        "rows of steps that are done again are not replaced",
        "observe/test_observe_trackers.py::test_a_resume_replaces_the_rows_it_does_again",
    ),
    Fault(
        "observe/page.py",
        "default-src 'none'; script-src",
        "default-src *; script-src",
        "a page lets the browser open addresses",
        "observe/test_observe_page.py",
    ),
)
