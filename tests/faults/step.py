"""Planted faults in what happens in one step."""

from tests.faults.fault import Fault

FAULTS = (
    Fault(
        "step/step.py",
        "opt_state = guard.where_good(good, opt_state, before)",
        "opt_state = guard.where_good(good | True, opt_state, before)",
        "a skipped step updates the optimizer's moments",
        "step/test_step_guard.py::test_what_is_refused_and_who_is_named[wrong2-1]",
    ),
    # Once no test noticed these.
    Fault(
        "step/accumulate.py",
        "jnp.sum(part, axis=0), parts)",
        "jnp.mean(part, axis=0), parts)",
        "evaluation in microbatches gives means of their sums",
        "step/test_step_accumulate.py::test_a_ratio_is_summed_over_shards_and_microbatches_and_divided_by_its_own_weight",
    ),
    Fault(
        "step/loss_scale.py",
        "return jnp.where(most * factor > scaling.largest, jnp.inf, squares)",
        "return squares",
        "with several microbatches a step is not skipped whose gradients overflow in one",
        "step/test_step_loss_scale.py::test_the_same_steps_are_skipped_with_any_number_of_parts[accumulation]",
    ),
    Fault(
        "step/state.py",
        "return jax.random.fold_in(jax.random.wrap_key_data(state.rng), state.step)",
        "return jax.random.fold_in(jax.random.wrap_key_data(state.rng), num_updates(state))",
        "the step after a skipped one draws the same random numbers again",
        "step/test_step_guard.py::test_each_step_draws_from_a_key_of_its_own_a_skipped_one_among_them",
    ),
    Fault(
        "step/device_memory.py",
        "gradients=bytes_of_device(sums)",
        "gradients=bytes_of_device(state.params)",
        "at ZeRO level 2 the account of memory has whole sums of gradients",
        "step/test_step_device_memory.py::test_gradients_are_what_the_step_allocates_on_each_replica[2]",
    ),
)
