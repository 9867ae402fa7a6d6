"""Planted faults of moments in fewer bytes, of Muon, and of products of 8-bit floats."""

from scripts.mutant import Mutant

OPTIM: tuple[Mutant, ...] = (
    Mutant(
        "small second moments vanish",
        "optim/eight_bits.py",
        "jnp.clip(codes, 0 if is_signed else jnp.sign(levels), ",
        "jnp.clip(codes, 0, ",
        "second moments in 8 bits far below their block's largest become 0, and updates divide by epsilon",
        ("optim/test_optim_eight_bits.py::test_no_second_moment_above_zero_becomes_zero",),
        was_unnoticed=True,
    ),
    Mutant(
        "random bits of one array",
        "optim/moments.py",
        "of_leaf = jax.random.fold_in(key, index)",
        "of_leaf = key",
        "moments of all arrays are rounded with the same random bits",
        ("optim/test_optim_moments.py::test_each_array_is_rounded_with_random_bits_of_its_own",),
        was_unnoticed=True,
    ),
    Mutant(
        "step by the output dim",
        "optim/optimizers.py",
        "math.sqrt(max(sizes))",
        "math.sqrt(sizes[1])",
        "Muon's step goes by the output dim of a matrix instead of the larger one",
        ("optim/test_optim_optimizers.py::test_muon_makes_each_hidden_matrix_orthogonal_and_leaves_the_rest_to_adam",),
        was_unnoticed=True,
    ),
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
