"""The task `convnet`: its options, and what of them contradicts each other or the data."""

from collections.abc import Mapping

from meshtrain.config import checks
from meshtrain.config.fields import Config
from meshtrain.config.tasks import BuiltIn
from meshtrain.examples import convnet as network
from meshtrain.examples.convnet import ConvnetOptions
from meshtrain.layout.placement import Placement
from meshtrain.models.task import Task
from meshtrain.step.precision import compute_dtype, in_fp8
from meshtrain.words.numbers import nearest_divisor

IMAGES = ("digits", "idx")


def make(config: Config, placement: Placement) -> Task:
    """Returns the convolutional classifier that a configuration describes."""
    dtype = compute_dtype(config.precision)
    return network.convnet(config.model, batch_size=config.batch_size, dtype=dtype, placement=placement)


def check(config: Config, mesh_shape: Mapping[str, int]) -> list[str]:
    """Returns one line for each way in which a convnet's options contradict each other or the data.

    Args:
      config: with `ConvnetOptions` as its model, each field within its own bounds.
      mesh_shape: the size of each mesh axis; which of them the task runs on is checked for all tasks alike.
    """
    options, found = config.model, checks.sources(config, IMAGES, "images")
    if in_fp8(config.precision):
        found.append(
            "precision.policy: got fp8 with task=convnet, whose convolutions have no 8-bit form; allowed: float32, "
            "bfloat16, float16; nearest: precision.policy=bfloat16"
        )
    if options.filters % options.num_groups:
        found.append(
            f"model.num_groups: got {options.num_groups}; allowed: a divisor of model.filters = {options.filters}; "
            f"nearest: {nearest_divisor(options.filters, options.num_groups)}"
        )
    if options.dropout_rate >= 1:
        found.append(f"model.dropout_rate: got {options.dropout_rate}; allowed: 0 to below 1; nearest: 0.9")
    most = min(options.height, options.width) - 1
    if options.max_shift > most:
        found.append(
            f"model.max_shift: got {options.max_shift}; allowed: 0 to {most}, below model.height and model.width; "
            f"nearest: {most}"
        )
    return found


convnet = BuiltIn("convnet", make, ConvnetOptions, check, unread=("remat", "layout.sequence_parallel"))
