"""Training and planning compile with the same options."""

import importlib

from meshtrain import hardware
from meshtrain.plan import compile as compiling


def test_training_and_planning_read_the_same_table():
    train = importlib.import_module("meshtrain.train")  # the package's attribute of that name is the function
    assert train.compiler_options is compiling.compiler_options is hardware.compiler_options


def test_gpus_have_options_with_typed_values_and_reasons_and_cpus_have_none():
    options = hardware.options_of("NVIDIA A100-SXM4-80GB")
    assert options
    assert all(option.reason and not isinstance(option.value, str) for option in options)
    assert hardware.compiler_options("cpu") == {}
    assert len({option.name for option in options}) == len(options)
