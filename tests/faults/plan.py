"""Planted faults of the planner's time and memory."""

from scripts.mutant import Mutant

PLAN: tuple[Mutant, ...] = (
    Mutant(
        "gradients are activations",
        "plan/memory.py",
        "max(0, stats.temporary_bytes - state.gradients) if stats",
        "stats.temporary_bytes if stats",
        "the activations of the account of memory contain the sums of gradients",
        ("plan/test_plan_cpu.py::test_level_three_over_data_is_planned_like_fsdp",),
        was_unnoticed=True,
    ),
    Mutant(
        "slow end hides transfers",
        "plan/timing.py",
        "if is_asynchronous and self.hidden is not Hidden.NONE:",
        "if is_asynchronous and self.hidden is not Hidden.ALL:",
        "the slow end of the interval of a step hides transfers",
        ("plan/test_plan_arithmetic.py::test_the_ends_of_the_interval_hide_all_transfers_or_none",),
    ),
    Mutant(
        "half a wave is free",
        "plan/products.py",
        "num_waves = math.ceil(num_tiles * parts / num_units)",
        "num_waves = num_tiles * parts / num_units",
        "a product whose last wave of tiles leaves units idle is as fast as one of whole waves",
        ("plan/test_plan_products.py::test_zeros_in_tiles_and_empty_places_in_the_last_wave_are_lost",),
    ),
    Mutant(
        "shared bytes are freed with the first user",
        "plan/early.py",
        "num_users[first] += -1 if kind == FREE else 1",
        "num_users[first] = 0 if kind == FREE else 1",
        "the peak of a plan leaves out bytes that two values share, once one is freed",
        ("plan/test_plan_early.py::test_the_peak_is_of_what_is_in_use_at_one_time",),
    ),
)
