"""Planted faults in where arrays live, and what is reduced."""

from tests.faults.fault import Fault

FAULTS = (
    Fault(
        "sharding/reduction.py",
        "return jax.lax.psum(x, over)\n",
        "return x\n",
        "gradients are not reduced over data",
        "sharding/test_sharding_param_sharding_levels.py::test_gradients_are_reduced_over_data_and_get_their_sharding[shape0-0]",
    ),
    Fault(
        "sharding/gradients.py",
        "return bool(self.axes) and weight.gradient != weight.parameter",
        "return False",
        "ZeRO level 2 keeps whole sums of gradients",
        "step/test_step_device_memory.py::test_gradients_are_what_the_step_allocates_on_each_replica[2]",
    ),
    Fault(
        "sharding/gradients.py",
        "return sum_over(x.astype(self.wire_dtype), ",
        "return sum_over(x.astype(jnp.float32), ",
        "gradients cross data in float32 whatever `precision.reduce_dtype` says",
        "sharding/test_sharding_param_sharding_levels.py::test_gradients_may_cross_in_bfloat16_and_come_out_in_float32",
    ),
    Fault(
        "sharding/rules.py",
        "tuple(axis for axis in rule.parameters if rule.stays_split or axis not in self.storage_axes)",
        "rule.parameters",
        "a weight that fsdp splits is not gathered before it computes",
        "sharding/test_sharding_placement.py::test_jit_gathers_a_weight_over_fsdp_and_keeps_tensor",
    ),
    Fault(
        "sharding/reduction.py",
        "jnp.sum(leaf, axis=0) / replicas, (",
        "leaf[0] / replicas, (",
        "another mesh keeps the residual of one replica instead of their sum",
        "run/test_run_start_residual.py::test_another_number_of_replicas_keeps_the_sum[8-4]",
    ),
    Fault(
        "sharding/param_kinds.py",
        "return map_axes(lambda axes: matrix_dims(axes) is not None, logical_axes)",
        "return map_axes(lambda axes: True, logical_axes)",
        "weight decay shrinks norms and biases",
        "optim/test_optim_optimizers.py::test_weight_decay_shrinks_matrices_alone_and_adam_none[adamw]",
    ),
    # Once no test noticed these.
    Fault(
        "sharding/tree_problems.py",
        "MOST_WHOLE = 0.01",
        "MOST_WHOLE = 1.0",
        "a ZeRO level or an fsdp axis that splits nothing is accepted",
        "messages/test_messages_table.py::test_a_mistake_is_one_line_whose_fix_is_accepted"
        "[config zero.level=1 mesh.data=3 batch_size=33]",
    ),
    Fault(
        "sharding/placement.py",
        "lambda _, cotangent: (self.activation(cotangent, names),)",
        "lambda _, cotangent: (cotangent,)",
        "the cotangent of a row-parallel product is gathered for each of the two products that read it",
        "models/test_models_gathers.py::test_no_operand_is_gathered_twice",
    ),
)
