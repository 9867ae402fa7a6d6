"""Attention as the target computes it: JAX's own kernel on TPUs, cuDNN's on GPUs.

JAX has no public way to trace cuDNN's kernel without a GPU: it asks the installed library for its version and the first
device for its compute capability. While a step is traced, the private functions that ask are replaced by functions that
answer for the target. This is the only place that does so; a test fails when JAX has moved them.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from jax._src.cudnn import fused_attention_stablehlo as private

from meshtrain.config.config import Config
from meshtrain.models.attention import chosen
from meshtrain.plan.topology import Cluster
from meshtrain.step.precision import compute_dtype

CUDNN_VERSION = 91000  # 9.10, as the files in targets/ say


@contextlib.contextmanager
def as_on_target(config: Config, cluster: Cluster) -> Iterator[tuple[Config, str]]:
    """Yields the configuration with the attention that `auto` means on the target, and its name, for tracing.

    Args:
      config: a configuration; `model.attention` other than `auto` stays.
      cluster: the target.
    """
    model, dtype = config.model, compute_dtype(config.precision)
    name = chosen(
        model.attention, model.width_of_head, config.sequence_length, dtype, model.within_documents, cluster.platform
    )
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, attention=name))
    if name != "cudnn" or cluster.compute_capability is None:
        yield config, name
        return
    target = cluster.compute_capability

    def at_least(capability: str) -> bool:
        return target >= _pair(capability)

    def equal(capability: str) -> bool:
        return target == _pair(capability)

    with replaced(
        private,
        check_cudnn_version=lambda: CUDNN_VERSION,
        check_compute_capability=at_least,
        is_cuda_compute_capability_equal=equal,
    ):
        yield config, name


@contextlib.contextmanager
def replaced(module: ModuleType, **functions: Callable[..., Any]) -> Iterator[None]:
    """Replaces functions of a module, and puts the original ones back afterwards.

    Raises:
      AttributeError: the module has no such function; nothing is replaced.
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
