"""Planted faults in in what order stages run."""

from tests.faults.fault import Fault

FAULTS = (
    Fault(
        "pipeline/check.py",
        "if row_of[needed] >= row:",
        "if row_of[needed] > row + len(schedule.rows):",
        "a table whose actions come too early is accepted",
        "pipeline/test_pipeline_check.py::test_the_first_violated_dependency_is_named",
    ),
    Fault(
        "pipeline/stages.py",
        "num_chunks), chunk * num_stages + _stage()",
        "num_chunks), _stage() * num_chunks + chunk",
        "interleaved stages take their layers for consecutive ones, and drop by the wrong index",
        "pipeline/test_pipeline_executor.py::test_sums_and_gradients_are_those_of_one_device[interleaved]",
    ),
    Fault(
        "pipeline/stages.py",
        "after = before + jnp.where(active, part, 0)[None]",
        "after = before + part[None]",
        "what idle stages compute is added to the gradients",
        "pipeline/test_pipeline_executor.py::test_garbage_on_idle_stages_changes_no_bit[1f1b-1-inf]",
    ),
    Fault(
        "pipeline/executor.py",
        "before, active = ring.where(is_layer, before, cotangent), active & is_layer",
        "before = ring.where(is_layer, before, cotangent)",
        "empty places get what their zeros make of gradients",
        "pipeline/test_pipeline_executor.py::test_empty_places_are_passed_by_whatever_their_numbers_are[1f1b]",
    ),
    # Once no test noticed these.
    Fault(
        "pipeline/inference.py",
        "start = ring.first_layer(chunk, num_stages",
        "start = ring.first_layer(0, num_stages",
        "evaluation of an interleaved pipeline takes each chunk for the first, so that layers have others' windows",
        "pipeline/test_pipeline_executor_sums.py::test_evaluation_adds_sums_of_layers[0]",
    ),
)
