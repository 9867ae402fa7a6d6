"""Planted faults in who starts processes, and who waits for them."""

from tests.faults.fault import Fault

FAULTS = (
    Fault(
        "launch/watchdog.py",
        "if waited <= self.limit_seconds():",
        "if waited <= math.inf:",
        "a hang is never noticed",
        "launch/test_launch_watchdog.py::test_a_limit_of_ones_own",
    ),
)
