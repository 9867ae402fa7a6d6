"""Planted faults in what every room speaks: flags, options, errors."""

from tests.faults.fault import Fault

FAULTS = (
    Fault(
        "cli/flags.py",
        "all_given: Values = {**given, **texts}",
        "all_given: Values = {**texts, **given}",
        "a file's value takes precedence over the command line's",
        "config/test_config_config.py::test_a_file_edits_and_the_command_line_goes_before_it",
    ),
)
