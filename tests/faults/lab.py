"""Planted faults in what else is tried over data."""

from tests.faults.fault import Fault

FAULTS = (
    Fault(
        "lab/compression.py",
        "sent = sent.at[jax.lax.axis_index(axis)].add(unpack(reduced) - row)",
        "sent = sent + 0.0",
        "what int8 loses when the sum is packed again is in no residual",
        "lab/test_lab_compression.py::test_what_was_applied_and_the_residuals_are_the_accumulated_gradients[int8]",
    ),
    Fault(
        "lab/one_step_late.py",
        "return jax.tree.map(sums, residual, scattered), gradients",
        "return jax.tree.map(sums, gradients, scattered), gradients",
        "a gradient that is to wait for the next step is applied at once",
        "lab/test_lab_local_steps.py::test_a_late_gradient_is_applied_by_the_next_step_on_any_mesh",
    ),
    Fault(
        "lab/local_steps.py",
        '{**total.metrics, "loss": total.loss}, total.weight)',
        '{**total.metrics, "loss": total.weight * jnp.mean(metrics["loss"])}, total.weight)',
        "the loss of groups that train apart is the mean of their means",
        "lab/test_lab_local_steps.py::test_the_loss_of_all_groups_is_their_sum_over_their_weight",
    ),
    Fault(
        "lab/one_step_late.py",
        "after_update and (lambda params, _: after_update(params, state.late_metrics))",
        "after_update",
        "gradients are one step late, and the biases of routers are not",
        "step/test_step_counted.py::test_one_step_late_counts_are_those_of_the_gradients_that_are_applied",
    ),
)
