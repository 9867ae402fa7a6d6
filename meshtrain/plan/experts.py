"""What experts send along the expert axis, the rows that they compute, and the sizes of that axis worth trying.

n: devices along expert, E: experts, k: experts a token, t: tokens of a microbatch on a device, D: width, F: expert dim,
a: bytes of a number.

    tokens    (n - 1) t D a in each gather and each scatter of a layer. Forward: tokens are gathered, results scattered.
              Backward: the transpose of both. Unless `remat.policy` is none, tokens are gathered once more
    choices   (n - 1) t k of 4 bytes: experts and gates are gathered, and gates' cotangents scattered; again likewise
    rows      n t min(k, E / n): room for any choice; with `model.expert_room` at most that multiple of t k
"""

import math
from collections.abc import Mapping

import jax.numpy as jnp

from meshtrain.config.config import Config
from meshtrain.layout.axes import EXPERT, PIPELINE
from meshtrain.models.decoder import DecoderOptions
from meshtrain.step.precision import compute_dtype
from meshtrain.words.numbers import divisors

TENSOR = "tensor"
OF_TOKENS, OF_CHOICES = 4, 3  # gathers and scatters of a layer, forward and backward
TOKENS_AGAIN, CHOICES_AGAIN = 1, 2
CHOICE_BYTES = 4


def token_bytes(config: Config, shape: Mapping[str, int], units: float) -> float:
    """Returns what a device sends along the expert axis for one microbatch, in all layers of its stage.

    Args:
      config: of the run.
      shape: the size of each mesh axis.
      units: t.
    """
    model, others = config.model, shape[EXPERT] - 1
    if not isinstance(model, DecoderOptions) or not model.num_experts:
        return 0.0
    again = 0.0 if config.remat.policy == "none" else 1 / config.remat.every
    itemsize = jnp.dtype(compute_dtype(config.precision)).itemsize
    of_tokens = (OF_TOKENS + TOKENS_AGAIN * again) * model.embed_dim * itemsize
    of_choices = (OF_CHOICES + CHOICES_AGAIN * again) * model.experts_per_token * CHOICE_BYTES
    return model.num_layers / shape[PIPELINE] * others * units * (of_tokens + of_choices)


def num_rows(config: Config, shape: Mapping[str, int], units: float) -> float:
    """Returns for how many rows of its experts a device has room in one layer, without padding; 0 without experts.

    Args:
      config: of the run.
      shape: the size of each mesh axis.
      units: t.
    """
    model = config.model
    if not isinstance(model, DecoderOptions) or not model.num_experts:
        return 0.0
    most = units * shape[EXPERT] * min(model.experts_per_token, model.num_experts / shape[EXPERT])
    even = units * model.experts_per_token
    return min(most, model.expert_room * even) if model.expert_room else most


def row_bytes(config: Config, shape: Mapping[str, int], policy: str) -> float:
    """Returns the bytes of one row that a layer keeps for its backward pass; of none of them with most policies.

    Args:
      config: of the run.
      shape: the size of each mesh axis.
      policy: of recomputation: with `none` the row, both products that it enters, their product and the result are
        kept, with `selective` all but the row and the product in the middle.
    """
    if not isinstance(config.model, DecoderOptions):
        return 0.0
    itemsize = jnp.dtype(compute_dtype(config.precision)).itemsize
    wide, inner = config.model.embed_dim * itemsize, config.model.expert_dim / shape[TENSOR] * itemsize
    kept = {"none": 2 * wide + 3 * inner, "selective": wide + 2 * inner}
    return kept[policy] if policy in kept else 0.0


def sizes_to_try(config: Config, num_devices: int, devices_each: int) -> list[int]:
    """Returns the sizes of the expert axis that a search considers: 1, and powers of 2 that divide the experts.

    Tokens go to all devices of the axis in each layer, so it stays inside a host.

    Args:
      config: to run.
      num_devices: of the cluster.
      devices_each: of a host.
    """
    if not isinstance(config.model, DecoderOptions) or not config.model.num_experts:
        return [1]
    most = math.gcd(config.model.num_experts, num_devices)
    return [size for size in sorted(set(divisors(most))) if size <= devices_each and not size & (size - 1)]
