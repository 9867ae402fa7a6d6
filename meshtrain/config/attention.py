"""Which implementation of attention a configuration's decoder gets, and why."""

from meshtrain.config.config import Config
from meshtrain.models.decoder import DecoderOptions
from meshtrain.models.implementation import Case, chosen
from meshtrain.step.precision import compute_dtype


def implementation(config: Config, platform: str) -> tuple[str, str] | None:
    """Returns (the implementation, why it is that one) as in training; None for a task that is no decoder.

    Args:
      config: of the run, resolved.
      platform: of the devices, as JAX names it.
    """
    model, length = config.model, config.sequence_length
    if not isinstance(model, DecoderOptions):
        return None
    case = Case(
        head_dim=model.width_of_head,
        lengths=(length, length),
        dtype=compute_dtype(config.precision),
        platform=platform,
        masks_documents=model.within_documents,
        window=model.window if model.window < length else 0,
        caps_scores=model.attention_cap > 0,
    )
    return chosen(model.attention, case)
