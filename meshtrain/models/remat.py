"""Selects which activations of a layer are saved for the backward pass, on the device or in host memory.

The backward pass recomputes the other activations.
"""

import dataclasses
import math

from meshtrain.errors import Problem, nearest_divisor
from meshtrain.options import Except, option
from meshtrain.sharding.placement import Placement
from meshtrain.sharding.saved import GATHERED

# Names of marked values (`sharding/saved.py`): a layer's input; the output of attention before its output projection.
RESIDUAL, HEADS = "residual", "heads"
# Projected queries, keys and values; the residual stream after attention, and additions to the stream before their
# norm; the mlp before its activation function.
QKV, MIDDLE, UP = "qkv", "middle", "up"
# Rows of experts after the products that enter them.
EXPERT_UP = "expert_up"
# The experts of each token, which every policy saves: if recomputed, two close scores could round differently.
CHOSEN = "chosen"
# Policies whose backward pass recomputes the output of attention, including its sum over the devices of the tensor
# axis.
SUMS_AGAIN = ("save_attention", "full", "offload")
# Results of products with weights; products of experts, which run in loops and kernels, have the name EXPERT_UP.
PRODUCT = "product"
_SAVED = {
    "full": frozenset({CHOSEN}),
    "offload": frozenset({CHOSEN}),
    "save_attention": frozenset({CHOSEN, HEADS}),
    "selective": frozenset({CHOSEN, HEADS, RESIDUAL, QKV, MIDDLE, UP, EXPERT_UP}),
    "dots": frozenset({CHOSEN, PRODUCT, EXPERT_UP}),
}


@dataclasses.dataclass(frozen=True)
class RematOptions:
    """The options that select the recomputed activations, and the memory (device or host) of saved activations."""

    policy: str = option(
        "none",
        "activations that the backward pass recomputes in a layer: none, full (all but its input), save_attention "
        "(all but input "
        "and attention), selective (norms, activation functions, softmax: no product with weights), dots (all but "
        "matmuls with weights), offload (as full, with the input in host memory)",
        choices=("none", "full", "save_attention", "selective", "dots", "offload"),
    )
    every: int = option(
        1, "recompute in every n-th layer and save all activations in the others; 1: in every layer", minimum=1,
        only_for={"policy": Except("none")},
    )  # fmt: skip
    unroll: bool = option(
        False,
        "compile each layer separately instead of a loop; a loop copies saved activations into arrays of all layers "
        "and back, so a step takes less time and memory without it, but compilation takes longer",
        only_for={"policy": ("none",), "mesh.pipeline": (1,)},
    )

    @property
    def unrolls(self) -> bool:
        """Whether layers outside of a pipeline are compiled separately (unrolled) instead of as a loop.

        False if the backward pass recomputes activations: without the loop, XLA would repeat the recomputation several
        times.
        """
        return self.unroll and self.policy == "none"


def saved_names(policy: str, placement: Placement) -> frozenset[str]:
    """Returns the names of the values that the backward pass of a layer reads; it computes the others again.

    Gathered weights are saved only if `placement.keeps_gathered`. Otherwise the backward pass gathers them again,
    because saving them would store the complete weights of all layers on each device.

    Args:
      policy: one of the choices of `RematOptions.policy` except `none`. For example, `full` and `offload` save only a
        layer's input, and `selective` saves the inputs of products with weights and of the attention kernel
        (Korthikanti et al. 2022).
      placement: states whether gathered weights are saved.
    """
    return _SAVED[policy] | ({GATHERED} if placement.keeps_gathered else frozenset())


def casts_first(options: RematOptions, placement: Placement) -> bool:
    """Returns whether all layers are cast to their compute dtypes before the loop over layers.

    True if some layers save all residuals except gathered weights. The backward pass of such a layer gathers its
    weights again, so the layer saves the gather's input: its weights in the compute dtype. If each iteration of the
    forward loop cast the weights of its layer, these weights would be an output of the loop. XLA would then run the
    complete forward loop a second time, to gather early the weights that the backward pass needs first.

    Args:
      options: the recomputed activations.
      placement: states whether weights are gathered; if not, the result is false.
    """
    return placement.gathers_weights and (options.policy == "none" or options.every > 1)


def gathers_early(options: RematOptions, placement: Placement, *, splits_sequence: bool) -> bool:
    """Returns whether XLA may start the gathers of the next layer during the loop iteration of the current layer.

    An early gather of weights overlaps with computation. The result is false only if no weights are gathered, the
    sequence is sharded between matmuls, and the backward pass recomputes the output of attention. In this case XLA
    would move the gather of the second norm's output to the previous iteration of the backward pass. This norm depends
    on the output of attention, so XLA would compute and scatter the output of attention twice, once for the moved
    gather.

    Args:
      options: the recomputed activations.
      placement: states whether weights are gathered.
      splits_sequence: whether the sequence is sharded between matmuls (sequence parallelism).
    """
    return placement.gathers_weights or not splits_sequence or options.policy not in SUMS_AGAIN


def check(
    options: RematOptions, num_layers: int, num_stages: int, name: str = "model.num_layers", in_chunk: int = 0
) -> list[Problem]:
    """Returns an error line for each remat option that does not fit the number of layers or of pipeline stages.

    Args:
      options: the options to check; each field is within its bounds.
      num_layers: number of layers in the model.
      num_stages: number of pipeline stages; 1: no pipeline.
      name: name of the option that sets the number of layers, for error lines.
      in_chunk: number of layers in a chunk (consecutive layers of one pipeline stage), including padding layers; 0: no
        pipeline.
    """
    problems = list[Problem]()
    if options.policy == "offload" and num_stages > 1:
        problems.append(
            Problem(
                "remat.policy",
                got=f"offload with mesh.pipeline = {num_stages}, where clock ticks pass residuals in device memory",
                allowed="none, full, save_attention, selective, dots",
                nearest="full",
                depends_on=["mesh.pipeline"],
            )
        )
    together = math.gcd(in_chunk, num_layers)
    if options.every > 1 and together % options.every:
        fix = nearest_divisor(together, options.every)
        of = f"{name} = {num_layers}"
        if in_chunk:
            of = f"the {in_chunk} layers of a chunk" + (f" and of {of}" if together < in_chunk else "")
        problems.append(Problem("remat.every", got=options.every, allowed=f"a divisor of {of}", nearest=fix))
    return problems
