"""Planted faults in what is chosen, and what is refused."""

from tests.faults.fault import Fault

FAULTS = (
    Fault(
        "config/resume.py",
        "return free > fixed",
        "return free >= fixed",
        "an option that no table names may change on resume",
        "config/test_config_resume.py::test_an_option_that_no_table_names_is_fixed",
    ),
    Fault(
        "config/config.py",
        "divisor = math.prod(sizes.values()) * num_microbatches",
        "divisor = num_parts(axes, mesh_shape)",
        "a batch that does not divide into its microbatches is accepted",
        "messages/test_messages_table.py::test_a_mistake_is_one_line_whose_fix_is_accepted"
        "[config mesh.data=8 accumulation_steps=3]",
    ),
    # Once no test noticed these.
    Fault(
        "config/config.py",
        "return config.accumulation_steps * in_pipeline",
        "return max(config.accumulation_steps, in_pipeline)",
        "accumulation does not cut the batch of a pipeline again",
        "config/test_config_config.py::test_a_pipeline_cuts_each_part_of_an_accumulated_batch_again",
    ),
)
