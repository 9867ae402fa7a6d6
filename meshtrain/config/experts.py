"""Checks of the options of experts against each other and the rest of a configuration."""

from meshtrain.models.decoder import DecoderOptions
from meshtrain.models.layers import GATES
from meshtrain.step.precision import PrecisionOptions, in_fp8


def problems(options: DecoderOptions, precision: PrecisionOptions) -> list[str]:
    """Returns one line for each contradiction between the options of a decoder's experts and others; none without.

    Args:
      options: each within its own bounds.
      precision: the dtype of products.
    """
    found = list[str]()
    if not options.num_experts:
        return found
    if options.experts_per_token > options.num_experts:
        found.append(
            f"model.experts_per_token: got {options.experts_per_token}; allowed: at most model.num_experts = "
            f"{options.num_experts}; nearest: {options.num_experts}"
        )
    if options.activation not in GATES:
        found.append(
            f"model.activation: got {options.activation} with model.num_experts = {options.num_experts}; allowed: "
            f"{', '.join(GATES)}, as mlps of experts are gated; nearest: model.activation=swiglu"
        )
    if options.biases:
        found.append(
            f"model.biases: got True with model.num_experts = {options.num_experts}, which have none; allowed: False; "
            "nearest: model.biases=False, and model.qkv_biases=True for those of attention"
        )
    if 0 < options.expert_room < 1:
        found.append(
            f"model.expert_room: got {options.expert_room}; allowed: 0 (room for any choice), or at least 1, the even "
            "load; nearest: 1.0"
        )
    if in_fp8(precision):
        found.append(
            f"precision.policy: got fp8 with model.num_experts = {options.num_experts}, whose products have no 8-bit "
            "form; allowed: float32, bfloat16, float16; nearest: precision.policy=bfloat16"
        )
    return found
