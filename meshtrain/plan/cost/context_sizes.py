"""Chooses sizes of the context axis, which splits long sequences over devices.

The sizes are for a search, and for a change that makes a step fit in memory.

T: tokens per sequence.
"""

from collections.abc import Mapping

from meshtrain.config.schema import Config
from meshtrain.errors import divisors
from meshtrain.plan.cost.memory import Memory
from meshtrain.sharding.rules import CONTEXT, EXPERT, PIPELINE, batch_axes

LONG_TOKENS = 32_768  # shorter sequences fit a device, at least with a smaller microbatch
FEWEST_TOKENS, MOST_TOKENS = 8_192, 131_072  # of a sequence on a device: fewer underuse kernels, more do not fit
DOMINATES = 0.5  # share of the usable memory above which activations dominate


def sizes_to_try(config: Config, num_devices: int) -> list[int]:
    """Returns the sizes of the context axis to consider: 1, and for long sequences powers of 2.

    Args:
      config: the configuration.
      num_devices: number of devices in the cluster.
    """
    tokens = config.sequence_length
    if tokens < LONG_TOKENS:
        return [1]
    powers = [size for size in divisors(num_devices) if size > 1 and not size & (size - 1)]
    return [1, *(size for size in powers if tokens % size == 0 and FEWEST_TOKENS <= tokens // size <= MOST_TOKENS)]


def in_more_parts(config: Config, shape: Mapping[str, int]) -> dict[str, int]:
    """Returns a change of the configuration, dotted key -> value, that halves the tokens of a device's microbatch.

    The change doubles the context axis, so a device has half of each sequence. To keep the number of devices, it halves
    an axis that splits the batch; a device then has parts of twice as many sequences, so the number of microbatches is
    doubled as well. Returns {} for short sequences, or if no axis that splits the batch has an even size.

    Args:
      config: the configuration of the step.
      shape: mesh axis -> size.
    """
    halved = next((axis for axis in reversed(batch_axes()) if axis != EXPERT and shape[axis] % 2 == 0), None)
    if config.sequence_length < LONG_TOKENS or halved is None:
        return {}
    change = {f"mesh.{halved}": shape[halved] // 2, f"mesh.{CONTEXT}": 2 * shape[CONTEXT]}
    if shape[PIPELINE] > 1:
        return change | {"pipeline.num_microbatches": 2 * config.pipeline.num_microbatches}
    return change | {"accumulation_steps": 2 * config.accumulation_steps}


def activations_dominate(held: Memory) -> bool:
    """Returns whether activations take more than half of a device's usable memory.

    Returns True if the compiler gave up, and False if the usable memory is unknown.

    Args:
      held: the memory of the step.
    """
    if held.capacity_bytes is None:
        return False
    return held.activations_bytes is None or held.activations_bytes > DOMINATES * held.capacity_bytes


def longest(config: Config, held: Memory) -> int | None:
    """Returns a lower bound of the longest sequence, in tokens, for which a step would fit in memory; None if unknown.

    The bound assumes that all temporaries are proportional to the length of the sequence, although some do not grow,
    such as the head's gradient.

    Args:
      config: the configuration of the step; the result is None for short sequences.
      held: the memory of the step; the result is None if its peak or the capacity is unknown.
    """
    if config.sequence_length < LONG_TOKENS or held.compiler is None or held.capacity_bytes is None:
        return None
    growing = held.compiler.temporary_bytes + held.uncertainty_bytes - held.state.gradients
    room = held.capacity_bytes - held.compiler.arguments_bytes - held.state.gradients
    return int(max(0, room) / growing * config.sequence_length)
