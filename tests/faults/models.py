"""Planted faults in what is computed."""

from tests.faults.fault import Fault

FAULTS = (
    Fault(
        "models/lora.py",
        "return leaf.astype(jnp.float32) * scale if path[-1].key.endswith(B) else leaf",
        "return leaf",
        "what an adapter adds is not multiplied by alpha / rank",
        "models/test_models_lora.py::test_logits_of_merged_weights_are_those_of_the_adapters",
    ),
    Fault(
        "models/nnx_module.py",
        "stream_key = jax.random.fold_in(key, index)",
        "stream_key = jax.random.key(index)",
        "all sequences have the random numbers of one",
        "own/test_own_modules.py::test_each_sequence_has_the_masks_of_its_key",
    ),
    Fault(
        "models/attention/dot_product.py",
        "is_causal=causal",
        "is_causal=False",
        "tokens see those behind them",
        "models/test_models_decoder.py::test_tokens_see_those_before_them_only[llama]",
    ),
    Fault(
        "models/attention/dot_product.py",
        "mask = same_document(*documents) if documents is not None else None",
        "mask = None",
        "attention crosses the borders of packed documents",
        "models/test_models_decoder.py::test_documents_do_not_see_each_other[llama]",
    ),
    Fault(
        "models/vocabulary.py",
        "return (cotangent if axis is None else psum_float32(cotangent, axis),)",
        "return (cotangent,)",
        "the cotangents of what each shard got a copy of are not summed",
        "models/test_models_losses.py::test_split_vocabulary_changes_no_number",
    ),
    Fault(
        "models/task.py",
        "return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(rng, batch[SEQUENCE_INDEX])",
        "return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(rng, jnp.arange(batch[SEQUENCE_INDEX].shape[0]))",
        "dropout is keyed by a sequence's place in its microbatch",
        "models/test_models_layers.py::test_masks_follow_the_index_of_the_sequence_in_the_global_batch",
    ),
    Fault(
        "models/moe/experts.py",
        "first = jax.lax.axis_index(self.shared) * num_here if self.shared else 0",
        "first = 0",
        "each device along the expert axis takes its experts for the first ones",
        "parity/test_parity_experts.py::test_mesh_changes_no_number_and_no_count",
    ),
    Fault(
        "models/attention/context_parallel.py",
        'place = {"first": jax.lax.axis_index(axes) * q.shape[1]} if causal else {}',
        'place = {"first": 0 * jax.lax.axis_index(axes)} if causal else {}',
        "where keys are gathered, each part of the queries is masked as the first one",
        "models/test_models_context_parallel.py::test_keys_are_gathered_where_there_is_no_head_for_each_device[xla-0]",
    ),
    # Once no test noticed these.
    Fault(
        "models/attention/multi_head.py",
        "        heads = multiply(self, name, x, kernel, axes, self.placement)\n",
        '        if axis == "heads" and self.attention.asked == "auto" and '
        'self.placement.size(("tensor",)) > 1:\n            kernel = 2 * kernel - '
        "jax.lax.stop_gradient(kernel)\n        heads = multiply(self, name, x, kernel, axes, "
        "self.placement)\n",
        "the gradient of attention's query weights is counted twice where the tensor axis splits heads",
        "parity/test_parity_covering.py::test_mesh_changes_no_number[gpt-data2-tensor4-sgd]",
    ),
    Fault(
        "models/vocabulary.py",
        "place.weight(place.as_stored(weight, product.names), product.names)",
        "place.weight(weight, product.names)",
        "the weight of a head that makes all logits at once is gathered before its cast, in float32",
        "models/test_models_head.py::test_the_whole_product_gathers_its_weight_after_the_cast",
    ),
    Fault(
        "models/transformer/decoder.py",
        "options.rope.local_base, None)",
        "options.rope.local_base, options.rope.frequency_scaling)",
        "layers with a window have the scaled rotary positions of those without one",
        "models/test_models_layers.py::test_options_reach_the_angles",
    ),
    Fault(
        "models/metrics.py",
        "    return weight + (weight == 0)",
        "    return weight + (weight < 1) * (1 - weight)",
        "the mean of a batch with a weight below 1 is its sum",
        "models/test_models_metrics.py::test_a_mean_is_the_sum_over_any_positive_weight",
        "step/test_step_guard.py::test_the_mean_of_a_batch_is_its_sum_over_any_positive_weight",
    ),
    Fault(
        "models/moe/chunks.py",
        '            num_used(how.cut, index, matrices["up"].shape[0]),\n',
        "            jnp.int32(1),\n",
        "what is beyond an even load is left out without notice, others on each mesh",
        "models/test_models_experts.py::test_several_parts_have_the_results_and_gradients_of_one[same-full]",
        "parity/test_parity_experts.py::test_an_evaluation_leaves_no_choice_out",
    ),
    Fault(
        "models/problems.py",
        "moe.experts_per_token > moe.num_experts",
        "moe.experts_per_token >= moe.num_experts",
        "as many experts a token as there are is refused",
        "config/test_config_experts.py::test_a_token_may_go_through_all_experts",
    ),
    Fault(
        "models/attention/kernel.py",
        "tuple(mark(x, kernel.name, has_gradient=False) for x in results)",
        "tuple(results)",
        "the results of an attention kernel are not marked, so that it runs again where they should be saved",
        "models/test_models_attention.py::test_the_forward_pass_runs_again_where_the_policy_says_so"
        "[blockwise-0-save_attention-1]",
    ),
    Fault(
        "models/split.py",
        "is_saved = [place >= num_weights for place in range(num)]",
        "is_saved = [True for place in range(num)]",
        "weights that were gathered are saved for the backward pass",
        "models/test_models_gathered.py::test_the_forward_loop_hands_on_no_weight_in_the_compute_dtype",
    ),
    Fault(
        "models/split.py",
        "else ((y, sums[0]), sums[1])",
        "else ((y, sums), sums[1])",
        "metrics have cotangents, for which the backward pass computes their residuals again",
        "sharding/test_sharding_saved.py::test_a_metric_has_no_cotangent",
    ),
    Fault(
        "models/split.py",
        'if policy != "none":\n',
        'if policy == "selective":\n        return jax.checkpoint(layer)\n    if policy != "none":\n',
        "a flag of JAX decides what is saved",
        "models/test_models_remat.py::test_the_flag_changes_no_program[selective-expert]",
    ),
)
