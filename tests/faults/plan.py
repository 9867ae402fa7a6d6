"""Planted faults in what would happen elsewhere."""

from tests.faults.fault import Fault

FAULTS = (
    Fault(
        "plan/hlo/parse.py",
        "if match := TRIP_COUNT.search(loop.rest):\n        return int(match[1])",
        "if match := TRIP_COUNT.search(loop.rest):\n        return 1",
        "the work of a loop is counted once",
        "plan/test_plan_parse.py::test_nested_loops_multiply",
    ),
    Fault(
        "plan/cost/memory.py",
        "if peak_bytes + uncertainty_bytes <= capacity_bytes:",
        "if peak_bytes <= capacity_bytes:",
        "a step that is too close to say is said to fit",
        "plan/test_plan_arithmetic.py::test_fits",
    ),
    # Once no test noticed these.
    Fault(
        "plan/cost/lower_bound.py",
        "if shape[axis] > 1 and axis in stored]",
        "if shape[axis] > 1 and axis == FSDP]",
        "at ZeRO level 3 data is said to have nothing to send",
        "plan/test_plan_arithmetic.py::test_the_least_of_data_follows_the_wire_dtype_and_zero[3-float32-12-4]",
    ),
    Fault(
        "plan/planner.py",
        "peak = peak_flops_per_second(accelerator.device_kinds[0], dtype)",
        "peak = peak_flops_per_second(accelerator.device_kinds[0], dtype) and accelerator.bfloat16_flops_per_second",
        "the planned MFU of float32 is relative to the peak of bfloat16",
        "plan/test_plan_cpu.py::test_utilization_is_of_the_peak_of_the_compute_dtype[float32-494700000000000.0]",
    ),
    Fault(
        "plan/cost/memory.py",
        "max(0, stats.temporary_bytes - state.gradients) if stats",
        "stats.temporary_bytes if stats",
        "the activations of the account of memory contain the sums of gradients",
        "plan/test_plan_cpu.py::test_level_three_over_data_is_planned_like_fsdp",
    ),
)
