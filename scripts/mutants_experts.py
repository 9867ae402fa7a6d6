"""Planted faults in mixtures of experts: routing, products, counts of tokens that chose each expert."""

from scripts.mutant import Mutant

EXPERTS: tuple[Mutant, ...] = (
    Mutant(
        "counts cross in few bits",
        "layout/replicas.py",
        "sent = x.astype(jnp.float32 if weight.is_counted else self.wire_dtype)",
        "sent = x.astype(self.wire_dtype)",
        "with `precision.reduce_dtype=bfloat16` counts of tokens are rounded on their way over data",
        ("step/test_step_counted.py::test_counts_reach_the_optimizer_exactly[level 2]",),
    ),
    Mutant(
        "counts are compressed",
        "layout/replicas.py",
        "some = [index for index, weight in enumerate(stored) if not weight.is_counted]",
        "some = list(range(len(stored)))",
        "compression of gradients rounds counts of tokens",
        ("step/test_step_counted.py::test_counts_reach_the_optimizer_exactly[compression]",),
    ),
    Mutant(
        "tokens left out without notice",
        "step/guard.py",
        "good &= left_out == 0",
        "good &= left_out >= 0",
        "a step in which experts left out tokens changes the weights",
        ("step/test_step_counted.py::test_a_step_in_which_tokens_were_left_out_is_skipped",),
    ),
    Mutant(
        "a tie with the mean",
        "optim/balance.py",
        "| ((whole == floor) & (rest > 0))",
        "",
        "the bias of an expert just below the mean load stays",
        ("optim/test_optim_balance.py::test_a_bias_falls_above_the_mean_and_rises_below",),
    ),
)
