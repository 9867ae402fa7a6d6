"""Compiles the train step for a cluster; returns program text, memory statistics, and compiler warnings."""

import dataclasses
import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import TypeAlias

import jax
from jax.errors import JaxRuntimeError

from meshtrain.assemble import Assembly, assemble
from meshtrain.config.fields import Config
from meshtrain.errors import is_out_of_memory
from meshtrain.hardware.compiler_options import CompilerOptions, XlaValue, captured
from meshtrain.models import fp8, layers
from meshtrain.plan.hlo.parse import Program, read
from meshtrain.plan.target.attention_tracing import as_on_target
from meshtrain.plan.target.clusters import Cluster
from meshtrain.plan.target.traced_flops import attention_kernel, traced_flops
from meshtrain.sharding import jaxprs, placement
from meshtrain.step.device_memory import Statistics, statistics

# Without a GPU the tiles of Triton's products are not tuned, and XLA then has no tiles for some products.
NO_TILES = "Couldn't find output tile sizes"
WITHOUT_TRITON: dict[str, str | bool] = {"xla_gpu_enable_triton_gemm": False}
Executable: TypeAlias = jax.stages.Compiled | SimpleNamespace  # the latter is a stand-in, see `plan.scheduled_dump`
# Lowered step -> (compiled step, options that a second compilation added).
Compiler = Callable[[jax.stages.Lowered], tuple[Executable, CompilerOptions]]


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled step.

    Attributes:
      assembly: the assembly whose step was compiled.
      text: the scheduled program; None if the compiler gave up for lack of memory.
      outer_text: the program that synchronizes local-SGD replicas; None without them, or if there is no `text`.
      statistics: the compiler's memory statistics; None if it gave up. The peak is the maximum of both programs.
      options: all compiler options of the compilation, including `added_options`.
      added_options: options of a second compilation, after the first found no tiles; empty if the first succeeded.
      attention: the attention kernel in the traced step, a choice of `model.attention`.
      traced_flops: FLOPs of matrix products on one device before any compiler, attention kernels in full.
      messages: lines that the compiler wrote to standard error.
      refusal: the compiler's message if there is no program; otherwise an empty text.
      seconds: time to trace, lower and compile.
    """

    assembly: Assembly
    text: str | None
    outer_text: str | None
    statistics: Statistics | None
    options: Mapping[str, XlaValue]
    added_options: Mapping[str, XlaValue]
    attention: str
    traced_flops: float
    messages: tuple[str, ...]
    refusal: str
    seconds: float


def compile_step(
    config: Config,
    shape: Mapping[str, int],
    cluster: Cluster,
    by: Compiler | None = None,
) -> Compiled:
    """Compiles the step of a configuration: assembled, traced, lowered and compiled as `train` does it.

    Args:
      config: from `resolve`.
      shape: the size of each mesh axis.
      cluster: the target, with at least as many devices.
      by: compiles the lowered step; None: `with_tiles`.

    Raises:
      UserError: `assemble` rejects the configuration.
    """
    start = time.perf_counter()
    with as_on_target(cluster):
        assembly = assemble(config, shape, cluster.devices)
        with captured() as messages:
            # On a mesh of one device, kernels use the device kind of this machine unless an abstract mesh states the
            # target's.
            with jax.sharding.use_abstract_mesh(assembly.mesh.abstract_mesh):
                traced = assembly.train_step.trace(assembly.state, assembly.batch)
                lowered = traced.lower(lowering_platforms=(cluster.platform,))
            compiled, outer, refusal, added = None, None, "", CompilerOptions()
            try:
                compiled, added = (by or with_tiles)(lowered)
                if assembly.outer_step is not None:
                    joining = assembly.outer_step.trace(assembly.state)
                    outer = joining.lower(lowering_platforms=(cluster.platform,)).compile()
            except JaxRuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                compiled, refusal = None, str(error)
            text, outer_text = (one.as_text() if one else None for one in (compiled, outer))
    return Compiled(
        assembly=assembly,
        text=text,
        outer_text=outer_text,
        statistics=_of_both(compiled, outer) if compiled else None,
        options={option.name: option.value for option in assembly.options} | added,
        added_options=added,
        attention=attention_kernel(traced.jaxpr.jaxpr),
        traced_flops=traced_flops(traced.jaxpr.jaxpr, dict(assembly.mesh.shape), assembly.cost.shares),
        messages=tuple(messages),
        refusal=refusal,
        seconds=time.perf_counter() - start,
    )


def with_tiles(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, CompilerOptions]:
    """Compiles a lowered step; compiles again without Triton's products if XLA has no tiles for them.

    Returns (the compiled program, options of the second compilation or {}). Training does not need the second
    compilation, because on a GPU the compiler tunes its tiles.

    Args:
      lowered: a `jax.stages.Lowered`.

    Raises:
      JaxRuntimeError: the compilation fails for another reason, or the second one fails.
    """
    try:
        return lowered.compile(), {}
    except JaxRuntimeError as error:
        if NO_TILES not in str(error):
            raise
    return lowered.compile(compiler_options=WITHOUT_TRITON), dict(WITHOUT_TRITON)


def _of_both(step: Executable, outer: jax.stages.Compiled | None) -> Statistics:
    """Returns the compiler's memory statistics of a step, with the peak of the outer step if it is larger."""
    found = statistics(step.memory_analysis())
    peak = statistics(outer.memory_analysis()).peak_bytes if outer else 0
    return dataclasses.replace(found, peak_bytes=max(found.peak_bytes, peak))


def program_of(compiled: Compiled) -> Program | None:
    """Returns the parsed program; None if the compiler gave up."""
    return read(compiled.text, _places_for_others, compiled.assembly.cost.shares) if compiled.text else None


def outer_program_of(compiled: Compiled) -> Program | None:
    """Returns the parsed program that synchronizes local-SGD replicas.

    Returns None without such replicas, or if the compiler gave up.
    """
    return read(compiled.outer_text, _places_for_others) if compiled.outer_text else None


def _places_for_others(file: str, function: str) -> bool:
    """Returns whether a function is a helper (constraints, loops, products), so that its caller is the source line."""
    of_layers = (layers.weight.__qualname__, layers.gather_sequence.__qualname__)
    return file in (placement.__file__, jaxprs.__file__, fp8.__file__) or (
        file == layers.__file__ and function in of_layers
    )
