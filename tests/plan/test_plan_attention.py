"""JAX's private functions answer for the target only while a step is traced."""

import types

import pytest

from meshtrain.plan.attention import private, replaced

NAMES = ("check_cudnn_version", "check_compute_capability", "is_cuda_compute_capability_equal")


def test_functions_are_put_back_after_an_error():
    originals = {name: getattr(private, name) for name in NAMES}

    def interrupted():
        with replaced(private, check_cudnn_version=lambda: 91000):
            raise KeyError(private.check_cudnn_version())

    with pytest.raises(KeyError, match="91000"):
        interrupted()
    assert {name: getattr(private, name) for name in NAMES} == originals


def test_a_function_that_has_moved_is_an_error_and_replaces_nothing():
    module = types.ModuleType("module")
    module.here = original = len
    with pytest.raises(AttributeError, match="gone"), replaced(module, here=max, gone=max):
        raise AssertionError("the block must not run")
    assert module.here is original
