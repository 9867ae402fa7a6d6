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
    Fault(
        "launch/compiler.py",
        "table += DETERMINISTIC_GPU_OPTIONS if is_deterministic else ()",
        "table += ()",
        "precision.deterministic changes nothing",
        "plan/test_plan_options.py::test_the_same_bits_each_time_are_an_option_of_gpus",
    ),
)
