"""Costs of a microbatch on a device by formula, which the planner uses without compiling the model.

b: units (tokens) of a microbatch on a device, D: width, L: layers of a device's stage, a: bytes of a number, n: devices
along tensor, A = b D a.

    tensor    2 (n - 1) / n of A: 4 per layer, one for the look-up and one for the head. The backward pass repeats some
              (Korthikanti et al. 2022): one more per layer for the sum after attention (remat.policy save_attention,
              full or offload). With sequence parallelism a sum is a scatter and a gather, half of it each. Then there
              is one more for the gathers of both norms (selective or dots), and one and a half for these and the
              scatter after attention (save_attention, full or offload)
    kept      b D (10 + 24 / n) in 16 bits per layer (Korthikanti et al. 2022, table 2, without the matrix of
              probabilities, which a fused kernel does not save); compiled programs save about 1.6 times as much
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike

from meshtrain.models import vocabulary
from meshtrain.models.attention.select import exchange
from meshtrain.models.decoder_options import TransformerShape
from meshtrain.models.remat import SUMS_AGAIN, RematOptions
from meshtrain.sharding.placement import Placement
from meshtrain.sharding.ring import wire_share
from meshtrain.sharding.rules import EXPERT, PIPELINE, TENSOR

REDUCTIONS_A_LAYER, LOOKUP_AND_HEAD = 4, 2
GATHERS_AGAIN = ("selective", "dots")  # policies that recompute the norms, but not the sum after attention
KEPT_SEEN = 1.6
LOGIT_BYTES = 8  # per logit: the logit, its gradient, and a float32 intermediate
FLOAT32_BYTES = 4
ATTENTION, EXPERTS = "attention", "experts"  # parts of a model
LOOP = "products by a loop over blocks"


class Kernel(NamedTuple):
    """The implementation that computes a part of the model.

    Attributes:
      part: of the model, such as `ATTENTION` or `EXPERTS`.
      by: its name; '': there is no choice.
      why: the reason for the choice.
      exchange: the data that devices exchange for it, as one line of text; '': none.
    """

    part: str
    by: str = ""
    why: str = ""
    exchange: str = ""


@dataclasses.dataclass(frozen=True)
class Cost:
    """Costs of one microbatch on one device, without weights and their gradients.

    In a pipeline, they are the costs of a stage's device.

    Attributes:
      layer_bytes: mesh axis -> bytes of activations that the layers send along it, forward and backward; an axis
        without an entry is unknown.
      other_bytes: the same for parts before and after the layers, such as look-up and head.
      kept_bytes: activations that layers save for the backward pass.
      working_bytes: temporary activations while one layer, or the head, computes.
      shares: name scope of operations (`jax.named_scope`) -> a share: of a conditional's runs that take the second
        branch, of a kernel's blocks that have rows, or of a gather's rows that differ; or the number of iterations of a
        loop that depends on the data. Without an entry each branch counts as run each time.
      kernels: the implementations of parts of the model, with the data that devices exchange; empty without devices.
    """

    layer_bytes: Mapping[str, float] = dataclasses.field(default_factory=dict)
    other_bytes: Mapping[str, float] = dataclasses.field(default_factory=dict)
    kept_bytes: float = 0.0
    working_bytes: float = 0.0
    shares: Mapping[str, float] = dataclasses.field(default_factory=dict)
    kernels: tuple[Kernel, ...] = ()

    @property
    def exchanges(self) -> list[str]:
        """A line of text for each part of the model for which devices exchange data."""
        return [kernel.exchange for kernel in self.kernels if kernel.exchange]


# (size of each mesh axis, units of a microbatch that a device computes) -> the cost.
MakeCost = Callable[[Mapping[str, int], float], Cost]


def unknown(mesh_shape: Mapping[str, int], units: float) -> Cost:
    """Returns the empty cost of a task that does not state its costs."""
    return Cost()


def of_transformer(
    options: TransformerShape,
    num_layers: int,
    dtype: DTypeLike,
    output_dtype: DTypeLike,
    remat: RematOptions,
    placement: Placement,
    mesh_shape: Mapping[str, int],
    units: float,
) -> Cost:
    """Returns the cost of a transformer, except for the bytes that attention sends along `context`.

    Args:
      options: with `embed_dim`, `num_heads`, `vocab_size` and `loss_chunk`.
      num_layers: of all stages.
      dtype: of activations.
      output_dtype: of logits.
      remat: what the backward pass recomputes.
      placement: its rules determine whether the sequence is split over tensor between layers.
      mesh_shape: the size of each mesh axis.
      units: tokens of a microbatch on a device.
    """
    tensor, layers = mesh_shape[TENSOR], num_layers / mesh_shape[PIPELINE]
    residual = units * options.embed_dim * jnp.dtype(dtype).itemsize
    summed = wire_share("all-reduce", tensor) * residual
    layer = KEPT_SEEN * residual / 2 * (10 + 24 / tensor)
    kept, working = layer, 0.0
    if remat.policy != "none":
        # Layer input and middle; queries, keys, values, heads and the mlp before its activation (`remat.py`).
        kept, working = residual / 2 * (4 + 16 / tensor) if remat.policy == "selective" else residual, layer
        if remat.policy == "save_attention":
            kept += residual * options.num_heads * options.width_of_values / (options.embed_dim * tensor)
    columns = options.vocab_size / (tensor * mesh_shape[PIPELINE])
    chunks = vocabulary.num_chunks(int(units), math.ceil(columns), output_dtype, options.loss_chunk)
    of_weight = FLOAT32_BYTES * options.embed_dim * columns if chunks > 1 else 0
    exchanged = exchange(options.attends, 2.0, mesh_shape)
    return Cost(
        layer_bytes={TENSOR: _reductions(remat, placement) * layers * summed, EXPERT: 0.0},
        other_bytes={TENSOR: LOOKUP_AND_HEAD * summed},
        kept_bytes=layers * kept,
        working_bytes=working + units * columns * LOGIT_BYTES / chunks + of_weight,
        kernels=(Kernel(ATTENTION, exchange=exchanged),) if placement.mesh else (),
    )


def _reductions(remat: RematOptions, placement: Placement) -> float:
    """Returns how often a layer sums the activations of a microbatch over tensor."""
    # Halves of the two reductions of a layer's forward pass; the backward pass does not need the sum at the layer's
    # end.
    sums, gathers = remat.policy in SUMS_AGAIN, remat.policy in (*SUMS_AGAIN, *GATHERS_AGAIN)
    splits_sequence = TENSOR in placement.rules.activations["residual_sequence"]
    repeated = (2 * gathers + sums) / 2 if splits_sequence else float(sums)
    return REDUCTIONS_A_LAYER + repeated / remat.every
