"""Planted faults in what goes in."""

from tests.faults.fault import Fault

FAULTS = (
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
)
