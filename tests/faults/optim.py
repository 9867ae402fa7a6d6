"""Planted faults in how weights move."""

from tests.faults.fault import Fault

FAULTS = (
    # Once no test noticed these.
    Fault(
        "optim/eight_bits.py",
        "jnp.clip(codes, 0 if is_signed else jnp.sign(levels), ",
        "jnp.clip(codes, 0, ",
        "second moments in 8 bits far below their block's largest become 0, and updates divide by epsilon",
        "optim/test_optim_eight_bits.py::test_no_second_moment_above_zero_becomes_zero",
    ),
    Fault(
        "optim/moments.py",
        "of_leaf = jax.random.fold_in(key, index)",
        "of_leaf = key",
        "moments of all arrays are rounded with the same random bits",
        "optim/test_optim_moments.py::test_each_array_is_rounded_with_random_bits_of_its_own",
    ),
    Fault(
        "optim/optimizers.py",
        "math.sqrt(max(sizes))",
        "math.sqrt(sizes[1])",
        "Muon's step goes by the output dim of a matrix instead of the larger one",
        "optim/test_optim_optimizers.py::test_muon_makes_each_hidden_matrix_orthogonal_and_leaves_the_rest_to_adam",
    ),
)
