"""Planted faults of the room that probes a cluster, and of the links that it measures."""

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
    Mutant(
        "a ring adds its own part",
        "probe/operations.py",
        "parts.at[(me - hop - 1) % size].add",
        "parts.at[(me - hop) % size].add",
        "the ring all-reduce written with permutes adds what it receives to the wrong part",
        ("probe/test_probe_timed.py::test_values_are_right_on_every_axis_and_times_are_of_one_collective",),
    ),
    Mutant(
        "fastest process",
        "probe/timed.py",
        "tuple(max(each) for each",
        "tuple(min(each) for each",
        "a collective takes the time of the fastest process",
        ("probe/test_probe_timed.py::test_the_slowest_process_counts_and_each_reports_its_wrong_values",),
    ),
    Mutant(
        "busy machine is fitted",
        "probe/fit.py",
        "busy = [row for row in rows if row.is_busy]",
        "busy = list[Timed]()",
        "latency and bandwidth are fitted to times that the spread says to distrust",
        ("probe/test_probe_fit.py::test_times_that_are_no_line_give_none",),
    ),
    Mutant(
        "links of another network",
        "launch/links.py",
        "        and (link.num_hosts > 1) == (num_hosts > 1)\n",
        "",
        "a link inside a host stands for one between hosts in a plan",
        ("launch/test_launch_links.py::test_a_link_is_found_for_groups_that_use_the_same_network",),
    ),
)
