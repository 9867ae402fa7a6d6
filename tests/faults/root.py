"""Planted faults in the package's root: assemble and loop."""

from tests.faults.fault import Fault

FAULTS = (
    Fault(
        "assemble.py",
        "trained = trained_mask(config.optimizer.trainable, params, ",
        'trained = trained_mask("", params, ',
        "`optimizer.trainable` freezes nothing",
        "own/test_own_frozen.py::test_frozen_weights_have_neither_sums_of_gradients_nor_moments[half]",
    ),
    Fault(
        "loop.py",
        "saves = is_last or stops or due(step, when.save_every)",
        "saves = is_last or due(step, when.save_every)",
        "a run that a signal ends has not saved",
        "run/test_run_loop.py::test_a_sigint_after_a_sigterm_still_saves",
    ),
    # Once no test noticed these.
    Fault(
        "assemble.py",
        "loss_scale.scaling(config.loss_scale, task.num_units,",
        "loss_scale.scaling(config.loss_scale, task.num_units // config.accumulation_steps,",
        "the loss scale relates to the targets of a microbatch, so that more of them overflow sooner",
        "step/test_step_loss_scale.py::test_the_same_steps_are_skipped_with_any_number_of_parts[accumulation]",
    ),
    Fault(
        "assemble.py",
        "embed_dim=max(task.width, 1)",
        "embed_dim=config.model.embed_dim",
        "the learning rate of a task of one's own follows the decoder's width",
        "models/test_models_task.py::test_noam_follows_the_width_of_the_task_and_not_the_decoders",
    ),
    Fault(
        "assemble.py",
        "num_devices=assembly.mesh.size,",
        "num_devices=1,",
        "the logged MFU is that of all devices over the peak of one",
        "observe/test_observe_step_times.py::test_throughput_is_that_of_the_whole_mesh_in_the_compute_dtype",
    ),
    Fault(
        "errors.py",
        "code = EXIT_USER_ERROR",
        "code = EXIT_FINISHED",
        "a program that refuses its input ends with exit code 0",
        "pipeline/test_pipeline_chart.py::test_a_mistake_is_one_line_and_exit_code_2",
    ),
)
