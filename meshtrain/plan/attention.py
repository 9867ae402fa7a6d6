"""Attention as the target computes it: JAX's own kernel on TPUs, on GPUs cuDNN's, of which JAX asks the GPU here.

JAX has no public way to trace cuDNN's kernel without a GPU: it asks the installed library for its version and the first
device for its compute capability. For the time of a plan these two private functions answer for the target instead.
This is the one place that does so; a test tells when JAX has moved them.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from unittest import mock

from jax._src.cudnn import fused_attention_stablehlo as private

from meshtrain.config.config import Config
from meshtrain.models.attention import chosen
from meshtrain.plan.topology import Cluster
from meshtrain.step.precision import compute_dtype

CUDNN_VERSION = 91000  # 9.10, as the files in targets/ say


@contextlib.contextmanager
def as_on_target(config: Config, cluster: Cluster) -> Iterator[tuple[Config, str]]:
    """Gives the configuration with the attention that `auto` means on the target, and its name, while it is traced.

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

    with (
        mock.patch.object(private, "check_cudnn_version", return_value=CUDNN_VERSION),
        mock.patch.object(private, "check_compute_capability", at_least),
        mock.patch.object(private, "is_cuda_compute_capability_equal", equal),
    ):
        yield config, name


def _pair(capability: str) -> tuple[int, int]:
    major, _, minor = capability.partition(".")
    return int(major), int(minor or 0)
