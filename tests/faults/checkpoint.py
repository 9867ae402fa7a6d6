"""Planted faults in what is kept."""

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
        'return f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}"',
        'return f"{list(leaf.shape)}"',
        "an array of another dtype is converted instead of refused",
        "checkpoint/test_checkpoint_checkpoint.py::test_another_shape_or_dtype_is_refused_and_not_converted",
    ),
    # Once no test noticed these.
    Fault(
        "checkpoint/checkpoint.py",
        "integrity.unreadable(directory) or renamed(directory)",
        "integrity.unreadable(directory)",
        "a renamed checkpoint resumes at the wrong step",
        "checkpoint/test_checkpoint_integrity.py::test_a_save_under_the_name_of_another_step_is_treated_as_damaged",
    ),
)
