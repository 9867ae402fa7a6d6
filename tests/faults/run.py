"""Planted faults in a run's folder and life."""

from tests.faults.fault import Fault

FAULTS = (
    # Once no test noticed these.
    Fault(
        "run/workdir.py",
        "fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)",
        "two runs write into one folder",
        "run/test_run_workdir.py::test_one_run_at_a_time_and_the_other_is_told_whose_it_is",
    ),
    Fault(
        "run/summary.py",
        "return NUM_TOKENS if num_parameters <= MOST_PARAMETERS else 0",
        "return NUM_TOKENS",
        "a run of a large model ends with 160 forward passes",
        "run/test_run_summary.py::test_only_small_models_draw_a_sample_by_themselves",
    ),
)
