"""Planted faults of moments in fewer bytes, and of products of 8-bit floats."""

from scripts.mutant import Mutant

OPTIM: tuple[Mutant, ...] = (
    Mutant(
        "codes to the nearest",
        "optim/eight_bits.py",
        "0.5 if random is None else _in_blocks(random, extent).astype(jnp.float32) * 2.0**-16",
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
    Mutant(
        "scales of one replica",
        "layout/placement.py",
        "return jax.lax.pmax(value, over) if over else value",
        "return value",
        "each replica has a scale of its own for the same tensor",
        ("models/test_models_fp8.py::test_a_scale_is_that_of_all_shards[data is manual]",),
    ),
    Mutant(
        "gradients in e4m3",
        "models/fp8.py",
        "(BACKWARD, FORWARD), placement)",
        "(FORWARD, FORWARD), placement)",
        "cotangents of products have the dtype of their inputs",
        ("models/test_models_fp8.py::test_each_product_of_a_layer_has_two_8_bit_operands[{}-0]",),
    ),
)
