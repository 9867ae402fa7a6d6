"""Traces attention as on the target cluster: with JAX's kernel on TPUs, with cuDNN's kernel on GPUs.

JAX has no public way to trace cuDNN's kernel without a GPU: private functions of JAX query the version of the installed
library and the compute capability of the first device. While a step is traced, this module replaces these functions by
functions that return the target's values. No other module replaces functions of JAX; a test fails if JAX moves them.
"""

import contextlib
from collections.abc import Iterator, Sequence
from types import ModuleType

import jax
from jax._src.cudnn import fused_attention_stablehlo as private

from meshtrain.models.moe import grouped_matmul_gpu, grouped_matmul_mosaic
from meshtrain.plan.cluster.clusters import Cluster

# The oldest version with score functions (`models/attention/flex.py`). The files in targets/ state 9.10: no file of
# openxla/xla states a newer version.
CUDNN_VERSION = 91300


@contextlib.contextmanager
def as_on_target(cluster: Cluster) -> Iterator[None]:
    """Context manager that makes cuDNN's kernel traceable without the target's GPU; no effect for TPUs and CPUs.

    Args:
      cluster: the target cluster.
    """
    if cluster.compute_capability is None:
        yield
        return
    target = cluster.compute_capability

    def at_least(capability: str) -> bool:
        return target >= _pair(capability)

    def equal(capability: str) -> bool:
        return target == _pair(capability)

    with contextlib.ExitStack() as stack:
        if not grouped_matmul_gpu.is_available() and grouped_matmul_mosaic.is_available():
            # This kernel asks `jax.devices` for the number of multiprocessors of the first device.
            _, of_weights = grouped_matmul_mosaic.modules()
            stack.enter_context(replace_functions(of_weights, jax=_WithDevices(cluster.devices)))
        stack.enter_context(
            replace_functions(
                private,
                check_cudnn_version=lambda: CUDNN_VERSION,
                check_compute_capability=at_least,
                is_cuda_compute_capability_equal=equal,
            )
        )
        yield


class _WithDevices:
    """The module `jax`, whose function `devices` returns the target's devices."""

    def __init__(self, devices: Sequence[jax.Device]) -> None:
        self.devices = lambda: devices

    def __getattr__(self, name: str) -> object:
        return getattr(jax, name)


@contextlib.contextmanager
def replace_functions(module: ModuleType, **functions: object) -> Iterator[None]:
    """Context manager that replaces functions of a module and restores them afterwards.

    Args:
      module: the module.
      functions: name -> replacement.

    Raises:
      AttributeError: the module lacks a function; nothing is replaced.
    """
    originals = {name: getattr(module, name) for name in functions}
    try:
        for name, function in functions.items():
            setattr(module, name, function)
        yield
    finally:
        for name, function in originals.items():
            setattr(module, name, function)


def _pair(capability: str) -> tuple[int, int]:
    major, _, minor = capability.partition(".")
    return int(major), int(minor or 0)
