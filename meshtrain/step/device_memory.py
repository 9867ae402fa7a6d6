"""The memory on one device: bytes of the training state, from shapes; bytes of a program, from the compiler's analysis.

The bytes of the training state do not include activations; the compiler's numbers do. The planner, `explain` and
README's table of memory use these functions, and a run records both results.
"""

import dataclasses
from typing import Any, TypeAlias

import jax

from meshtrain.sharding.offload import is_on_host
from meshtrain.sharding.trees import Arrays, shard_bytes
from meshtrain.step.state import TrainState

MemoryAnalysis: TypeAlias = Any  # jaxlib's `CompiledMemoryStats`, a private name


@dataclasses.dataclass(frozen=True)
class StateBytes:
    """Bytes of the training state on one device.

    Attributes:
      parameters: the parameters, in their stored dtype.
      gradients: the float32 sums to which each microbatch's gradients are added.
      moments: the optimizer's state in device memory.
      on_host: the optimizer's state in host memory, with `offload.moments`.
      extra: the arrays that an extension saves from step to step.
    """

    parameters: int
    gradients: int
    moments: int
    on_host: int
    extra: int = 0

    @property
    def total(self) -> int:
        """All bytes of the training state in device memory, without `on_host`."""
        return self.parameters + self.gradients + self.moments + self.extra


def training_state_bytes(state: TrainState, sums: Arrays) -> StateBytes:
    """Returns the bytes of a training state on one device.

    Args:
      state: the abstract state, in which each leaf has a sharding.
      sums: the abstract float32 sums of gradients, from `GradientSync.accumulators`.
    """
    moments = jax.tree.leaves(state.opt_state)
    return StateBytes(
        parameters=bytes_of_device(state.params),
        gradients=bytes_of_device(sums),
        moments=bytes_of_device([leaf for leaf in moments if not is_on_host(leaf.sharding)]),
        on_host=bytes_of_device([leaf for leaf in moments if is_on_host(leaf.sharding)]),
        extra=bytes_of_device(state.extra),
    )


def bytes_of_device(tree: Arrays) -> int:
    """Returns the bytes of one device's shards of a pytree of abstract arrays with shardings."""
    return sum(map(shard_bytes, jax.tree.leaves(tree)))


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Bytes of a program on one device, as the compiler's memory analysis reports them.

    Attributes:
      arguments_bytes: the arguments, in device memory.
      temporary_bytes: the temporary buffers, in device memory.
      output_bytes: the results, in device memory, including results that reuse the memory of an argument.
      alias_bytes: the results that reuse the memory of an argument (donated buffers).
      peak_bytes: the largest device memory in use at any time.
      host_bytes: arguments, temporary buffers and results in host memory; aliased bytes are counted once.
    """

    arguments_bytes: int
    temporary_bytes: int
    output_bytes: int
    alias_bytes: int
    peak_bytes: int
    host_bytes: int


def statistics(stats: MemoryAnalysis) -> Statistics:
    """Converts the result of `jax.stages.Compiled.memory_analysis()` to `Statistics`.

    Args:
      stats: the compiler's memory analysis of one program.
    """
    host = stats.host_argument_size_in_bytes + stats.host_temp_size_in_bytes + stats.host_output_size_in_bytes
    # The compiler's peak counts the buffers that are alive at the same time. If the compiler reports no peak, or a peak
    # without temporaries (as on CPUs), all buffers are counted as alive at the same time.
    together = stats.argument_size_in_bytes + stats.temp_size_in_bytes
    together += stats.output_size_in_bytes - stats.alias_size_in_bytes
    return Statistics(
        arguments_bytes=stats.argument_size_in_bytes,
        temporary_bytes=stats.temp_size_in_bytes,
        output_bytes=stats.output_size_in_bytes,
        alias_bytes=stats.alias_size_in_bytes,
        peak_bytes=together if stats.peak_memory_in_bytes <= stats.temp_size_in_bytes else stats.peak_memory_in_bytes,
        host_bytes=host - stats.host_alias_size_in_bytes,
    )
