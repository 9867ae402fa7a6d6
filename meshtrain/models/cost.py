"""Estimates the costs of a microbatch on a device by formula, so that the planner need not compile the model.

b: units (tokens) of a microbatch on a device, D: width, L: layers of a device's stage, a: bytes of an element, n:
devices along the tensor axis, A = b D a: bytes of the residual stream.

    tensor    bytes that a device sends along the tensor axis. An all-reduce of activations sends 2 (n - 1) / n A. There
              are 4 all-reduces per layer in both passes, one for the look-up and one for the head. The
              backward pass also repeats a part of the forward pass's communication (Korthikanti et al. 2022). Without
              sequence parallelism it repeats one all-reduce per layer, the sum after attention, if remat.policy is
              save_attention, full or offload. With sequence parallelism each all-reduce is a reduce-scatter and an
              all-gather, which send half of its bytes each. Then the backward pass repeats the two gathers after norms
              (selective or dots: as many bytes as one all-reduce), or these gathers and the scatter after attention
              (save_attention, full or offload: as many bytes as one and a half all-reduces)
    kept      bytes of saved activations: b D (10 + 24 / n) numbers of 16 bits per layer (Korthikanti et al. 2022, table
              2, without the matrix of probabilities, which a fused kernel does not save). Compiled programs save about
              1.6 times these bytes
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike

from meshtrain.hardware.links import wire_share
from meshtrain.models import vocabulary
from meshtrain.models.attention.select import exchange
from meshtrain.models.decoder_options import TransformerShape
from meshtrain.models.fallback import Fallback
from meshtrain.models.remat import SUMS_AGAIN, RematOptions
from meshtrain.sharding.placement import Placement
from meshtrain.sharding.rules import EXPERT, PIPELINE, TENSOR

REDUCTIONS_A_LAYER, LOOKUP_AND_HEAD = 4, 2
GATHERS_AGAIN = ("selective", "dots")  # policies that recompute the norms, but not the sum after attention
KEPT_SEEN = 1.6
LOGIT_BYTES = 8  # per logit: the logit, its gradient, and a float32 intermediate
FLOAT32_BYTES = 4
ATTENTION, EXPERTS = "attention", "experts"  # parts of a model
LOOP = "products by a loop over blocks"


class Kernel(NamedTuple):
    """The name of the implementation that computes a part of the model, and texts that describe it.

    Attributes:
      part: name of the model's part, such as `ATTENTION` or `EXPERTS`.
      by: name of the implementation, such as `splash`; '': not stated.
      why: reason why this implementation was selected; '': not stated.
      exchange: one line of text about the data that devices exchange for this part; '': no data is exchanged.
      fallback: a report that this implementation replaces a faster kernel; None: no kernel is lost.
    """

    part: str
    by: str = ""
    why: str = ""
    exchange: str = ""
    fallback: Fallback | None = None

    @property
    def fallback_line(self) -> str:
        """The line about `fallback` that `train` prints and `plan` lists as a finding; '' if no kernel is lost."""
        return self.fallback.line(self.part) if self.fallback else ""


@dataclasses.dataclass(frozen=True)
class Cost:
    """Costs of one microbatch on one device, without weights and their gradients.

    In a pipeline, they are the costs of one stage, to which the device belongs.

    Attributes:
      layer_bytes: mesh axis -> bytes of activations that a device sends for its layers along this axis, forward and
        backward. The bytes of an axis without an entry are unknown.
      other_bytes: mesh axis -> bytes that a device sends for parts before and after the layers, such as look-up and
        head.
      kept_bytes: bytes of activations that the layers save for the backward pass.
      working_bytes: bytes of temporary activations while one layer, or the head, computes.
      shares: name scope of operations (`jax.named_scope`) -> expected amount of work that depends on the data, which
        the planner cannot read from a compiled program. For a conditional, it is the share of runs that take the second
        branch. If a conditional has no entry, the planner assumes that every run executes both branches. For a kernel
        of experts, it is the share of blocks that have rows. For a gather, it is the share of distinct rows (the other
        rows repeat one row). For a loop, it is the number of iterations.
      kernels: the implementations of parts of the model; empty without a mesh of devices.
    """

    layer_bytes: Mapping[str, float] = dataclasses.field(default_factory=dict)
    other_bytes: Mapping[str, float] = dataclasses.field(default_factory=dict)
    kept_bytes: float = 0.0
    working_bytes: float = 0.0
    shares: Mapping[str, float] = dataclasses.field(default_factory=dict)
    kernels: tuple[Kernel, ...] = ()

    @property
    def exchanges(self) -> list[str]:
        """The texts `Kernel.exchange`, one line for each part of the model for which devices exchange data."""
        return [kernel.exchange for kernel in self.kernels if kernel.exchange]


# (size of each mesh axis, units (such as tokens) of a microbatch that a device computes) -> the cost.
MakeCost = Callable[[Mapping[str, int], float], Cost]


def unknown(mesh_shape: Mapping[str, int], units: float) -> Cost:
    """Returns an empty `Cost`, in which no cost is known; the default of `Task.cost`.

    Args:
      mesh_shape: mesh axis -> size; not used.
      units: units of a microbatch on a device; not used.
    """
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
      options: shape of the model: width, heads, vocabulary and the chunks of the loss.
      num_layers: number of layers in all stages.
      dtype: dtype of activations.
      output_dtype: dtype of logits.
      remat: activations that the backward pass recomputes.
      placement: its rules determine whether activations between layers are split along the sequence, over the tensor
        axis.
      mesh_shape: mesh axis -> size.
      units: tokens of a microbatch on a device.
    """
    tensor, layers = mesh_shape[TENSOR], num_layers / mesh_shape[PIPELINE]
    residual = units * options.embed_dim * jnp.dtype(dtype).itemsize
    summed = wire_share("all-reduce", tensor) * residual
    layer = KEPT_SEEN * residual / 2 * (10 + 24 / tensor)
    kept, working = layer, 0.0
    if remat.policy != "none":
        # With `selective` these are the layer's input and middle, queries, keys, values, heads, and the mlp before its
        # activation function (`remat.py`).
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
    """Returns the number of all-reduces of activations over the tensor axis per layer, forward and backward.

    A reduce-scatter or an all-gather counts as half. The number is a mean over layers with and without recomputation.

    Args:
      remat: the recomputed activations, whose communication the backward pass repeats.
      placement: its rules determine whether activations between layers are split along the sequence, over the tensor
        axis.
    """
    # The backward pass repeats halves (scatter or gather) of the two all-reduces of a layer's forward pass. It does not
    # need the sum at the layer's end.
    sums, gathers = remat.policy in SUMS_AGAIN, remat.policy in (*SUMS_AGAIN, *GATHERS_AGAIN)
    splits_sequence = TENSOR in placement.rules.activations["residual_sequence"]
    repeated = (2 * gathers + sums) / 2 if splits_sequence else float(sums)
    return REDUCTIONS_A_LAYER + repeated / remat.every
