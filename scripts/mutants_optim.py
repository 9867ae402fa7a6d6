"""Planted faults of the room that moves weights."""

from scripts.mutant import Mutant

OPTIM: tuple[Mutant, ...] = (
    Mutant(
        "codes to the nearest",
        "optim/eight_bits.py",
        "between.astype(jnp.float32) * 2.0**-16",
        "0.5",
        "codes of 8 bits are rounded to the nearest, so that a second moment never falls",
        ("optim/test_optim_moments.py::test_a_second_moment_falls_after_a_large_gradient[8bit]",),
    ),
    Mutant(
        "bfloat16 to the nearest",
        "optim/moments.py",
        "(bits + random.astype(jnp.uint32))",
        "(bits + jnp.uint32(0x7FFF))",
        "moments in bfloat16 are rounded to the nearest, so that a second moment never falls",
        ("optim/test_optim_moments.py::test_a_second_moment_falls_after_a_large_gradient[bfloat16]",),
    ),
    Mutant(
        "scales on every device",
        "optim/states.py",
        "return 1 < size < full and full % size == 0",
        "return False",
        "the scales of 8-bit moments are on every device, and updates gather them",
        ("optim/test_optim_moments.py::test_a_mesh_changes_no_bit_and_sends_nothing[8bit]",),
    ),
)
