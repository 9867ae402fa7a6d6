"""Planted faults of the room that probes a cluster."""

from scripts.mutant import Mutant

PROBE: tuple[Mutant, ...] = (
    Mutant(
        "busy is slow",
        "probe/together.py",
        "if fastest > _SLOW * median and fastest - median > spread:",
        "if fastest > _SLOW * median:",
        "a machine that was busy for a moment is called slow",
        ("probe/test_probe_together.py::test_slow_begins_beyond_twice_the_median_and_ones_own_spread",),
    ),
    Mutant(
        "loopback is a network",
        "probe/alone.py",
        "if loops and num_hosts > 1:",
        "if loops and num_hosts < 1:",
        "NCCL may take the loopback interface between machines",
        ("probe/test_probe_alone.py::test_a_planted_fault_is_one_line_with_what_to_do[loopback left]",),
    ),
    Mutant(
        "slowest answer",
        "probe/rollcall.py",
        "trip, offset = min(found)",
        "trip, offset = max(found)",
        "the offset of a clock comes from the slowest answer",
        ("probe/test_probe_rollcall.py::test_the_fastest_answer_tells_the_offset_of_a_clock",),
    ),
    Mutant(
        "wrong values are fine",
        "probe/together.py",
        'return found or [ok("values"',
        'return [ok("values"',
        "a collective with a wrong value passes",
        ("probe/test_probe_together.py::test_a_planted_fault_is_one_line_that_names_the_process[wrong value]",),
    ),
)
