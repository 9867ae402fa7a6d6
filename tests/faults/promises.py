"""Planted faults in the other packages, in what README promises."""

from tests.faults.fault import Fault

FAULTS = (
    Fault(
        "checkpoint/integrity.py",
        'return "" if _sha256(path) == expected["sha256"] else f"{name}: its bytes have changed"',
        'return ""',
        "a flipped byte of a checkpoint is read as a weight",
        "checkpoint/test_checkpoint_integrity.py::test_verify_says_what_is_whole",
    ),
    Fault(
        "checkpoint/checkpoint.py",
        "integrity.unreadable(directory) or renaming_problems(directory)",
        "integrity.unreadable(directory)",
        "a renamed checkpoint resumes at the wrong step",
        "checkpoint/test_checkpoint_integrity.py::test_a_save_under_the_name_of_another_step_is_treated_as_damaged",
    ),
    Fault(
        "config/mesh_checks.py",
        "return config.accumulation_steps * in_pipeline",
        "return max(config.accumulation_steps, in_pipeline)",
        "accumulation does not cut the batch of a pipeline again",
        "config/test_config_config.py::test_a_pipeline_cuts_each_part_of_an_accumulated_batch_again",
    ),
    Fault(
        "data/loader.py",
        '"next_index": min(start_step, len(local_batches))',
        '"next_index": min(start_step + 1, len(local_batches))',
        "a resumed run skips a batch",
        "data/test_data_loader.py::test_resuming_reads_nothing_that_came_before",
    ),
    Fault(
        "data/packing.py",
        '"weights": np.float32(1) - is_end.astype(np.float32),',
        '"weights": np.ones(length, np.float32),',
        "what follows the end of a document counts as a target",
        "data/test_data_packing.py::test_stream_window_by_hand",
    ),
    Fault(
        "data/chat_template.py",
        "jinja2.sandbox.ImmutableSandboxedEnvironment(",
        "jinja2.Environment(",
        "a chat template runs as code of ours",
        "data/test_data_chat_template.py::test_a_template_reaches_nothing_and_its_errors_are_one_line",
    ),
    Fault(
        "hf/families.py",
        '"num_key_value_heads": None, "rope_theta": 10000.0',
        '"num_key_value_heads": None, "rope_theta": 500000.0',
        "a Llama that does not say its rotary base has that of Llama 3",
        "hf/test_hf_config_json.py::test_what_an_absent_key_means_is_what_transformers_says",
    ),
    Fault(
        "launch/watchdog.py",
        "if waited <= self.limit_seconds():",
        "if waited <= math.inf:",
        "a hang is never noticed",
        "launch/test_launch_watchdog.py::test_a_limit_of_ones_own",
    ),
    Fault(
        "optim/eight_bits.py",
        "jnp.clip(codes, 0 if is_signed else jnp.sign(levels), ",
        "jnp.clip(codes, 0, ",
        "second moments in 8 bits far below their block's largest become 0, and updates divide by epsilon",
        "optim/test_optim_eight_bits.py::test_no_second_moment_above_zero_becomes_zero",
    ),
    Fault(
        "plan/hlo/parse.py",
        "if match := TRIP_COUNT.search(loop.rest):\n        return int(match[1])",
        "if match := TRIP_COUNT.search(loop.rest):\n        return 1",
        "the work of a loop is counted once",
        "plan/test_plan_parse.py::test_nested_loops_multiply",
    ),
    Fault(
        "plan/cost/memory.py",
        "if peak_bytes + uncertainty_bytes <= capacity_bytes:",
        "if peak_bytes <= capacity_bytes:",
        "a step that is too close to say is said to fit",
        "plan/test_plan_arithmetic.py::test_fits",
    ),
    Fault(
        "errors.py",
        "code = EXIT_USER_ERROR",
        "code = EXIT_FINISHED",
        "a program that refuses its input ends with exit code 0",
        "pipeline/test_pipeline_chart.py::test_a_mistake_is_one_line_and_exit_code_2",
    ),
)
