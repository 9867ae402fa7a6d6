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
    Mutant(
        "gates with the bias",
        "models/routing.py",
        "gates = jnp.take_along_axis(scores, chosen, axis=-1)",
        "gates = jnp.take_along_axis(ranked, chosen, axis=-1)",
        "the bias that evens out the load also changes by how much an expert's result is multiplied",
        ("models/test_models_routing.py::test_the_best_experts_are_chosen_and_gates_add_up[sigmoid-bias1-2.5]",),
    ),
    Mutant(
        "balance over the batch",
        "models/routing.py",
        "return jnp.sum(of_sequences * jnp.sum(tokens.weights, axis=1))",
        "return jnp.mean(of_sequences) * jnp.sum(tokens.weights)",
        "the balance loss depends on how a batch is cut into microbatches",
        ("models/test_models_routing.py::test_losses_do_not_depend_on_how_a_batch_is_cut",),
    ),
    Mutant(
        "experts chosen again",
        "models/remat.py",
        "return _is_named(primitive, params, (CHOSEN,))",
        "return False",
        "a backward pass that computes layers again may choose other experts than the forward pass",
        ("models/test_models_experts.py::test_no_policy_chooses_experts_again[full]",),
    ),
    Mutant(
        "one place for all choices of a token",
        "models/experts.py",
        "places[:-1].reshape(chosen.shape)",
        "jnp.broadcast_to(places[:-1].reshape(chosen.shape)[:, :1], chosen.shape)",
        "the first expert of a token stands for all of its experts",
        ("models/test_models_experts.py::test_results_and_gradients_are_those_of_a_loop_over_all_experts",),
    ),
)
