"""Planted faults in what is measured on a cluster."""

from tests.faults.fault import Fault

FAULTS = (
    Fault(
        "probe/bench/timed.py",
        "tuple(max(each) for each",
        "tuple(min(each) for each",
        "a collective takes the time of the fastest process",
        "probe/test_probe_timed.py::test_the_slowest_process_counts_and_each_reports_its_wrong_values",
    ),
)
