"""Compiles the train step for a cluster; returns program text, memory statistics, and compiler warnings."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import TypeAlias

import jax
from jax.errors import JaxRuntimeError

from meshtrain.assembly.assemble import Assembly, assemble
from meshtrain.config.schema import Config
from meshtrain.errors import is_out_of_memory
from meshtrain.hardware.compiler_options import CompilerOptions, XlaValue, capture_stderr
from meshtrain.models import fp8, layers
from meshtrain.plan.cluster.attention_tracing import as_on_target
from meshtrain.plan.cluster.clusters import Cluster
from meshtrain.plan.cluster.traced_flops import attention_kernel, traced_flops
from meshtrain.plan.hlo.parse import Program, read
from meshtrain.sharding import jaxprs, passes, placement, saved
from meshtrain.step.device_memory import Statistics, statistics

# Without a GPU the tiles of Triton's products are not tuned, and XLA then has no tiles for some products.
NO_TILES = "Couldn't find output tile sizes"
WITHOUT_TRITON: dict[str, str | bool] = {"xla_gpu_enable_triton_gemm": False}
Executable: TypeAlias = jax.stages.Compiled | SimpleNamespace  # the latter is a stand-in, see `plan.scheduled_hlo`
# Function: lowered step -> (compiled step, options that a second compilation added).
Compiler = Callable[[jax.stages.Lowered], tuple[Executable, CompilerOptions]]


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A train step compiled for a cluster.

    Attributes:
      assembly: the assembly whose step was compiled.
      text: the scheduled HLO text of the step; None if the compiler gave up because of too little memory.
      programs: (name, number of steps between two runs, HLO text) of each program that does not run in every step;
        empty if `text` is None.
      statistics: the compiler's memory statistics of the step, with the largest peak of all programs; None if the
        compiler gave up.
      options: name -> value of all compiler options of the compilation, including `added_options`.
      added_options: name -> value of the options added for a second compilation, because the first found no tile sizes
        for a Triton product (`with_tiles`); empty if the first succeeded.
      attention: the attention kernel in the traced step, named as in the option `model.attention`.
      traced_flops: FLOPs of matrix products on one device in the traced step, before compilation; attention kernels
        count masked blocks too.
      messages: lines that the compiler wrote to standard error.
      refusal: the compiler's out-of-memory error; empty if there is a program.
      seconds: time to assemble, trace, lower and compile.
    """

    assembly: Assembly
    text: str | None
    programs: tuple[tuple[str, int, str], ...]
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
    """Assembles, traces, lowers and compiles the step of a configuration for a cluster, in the same way as `train`.

    If the compiler gives up for lack of memory, the result has the compiler's error (`refusal`) instead of a program.

    Args:
      config: the resolved configuration.
      shape: mesh axis -> size.
      cluster: the target cluster; it has at least as many devices as the mesh.
      by: function that compiles the lowered step; None: `with_tiles`.

    Raises:
      UserError: `assemble` rejects the configuration.
      JaxRuntimeError: the compilation fails for another reason than lack of memory.
    """
    start = time.perf_counter()
    with as_on_target(cluster):
        assembly = assemble(config, shape, cluster.devices)
        with capture_stderr() as messages:
            # On a mesh of one device, kernels use the device kind of this machine unless an abstract mesh states the
            # target's.
            with jax.sharding.use_abstract_mesh(assembly.mesh.abstract_mesh):
                traced = assembly.steps.train.trace(assembly.state, assembly.batch)
                lowered = traced.lower(lowering_platforms=(cluster.platform,))
            compiled, others, refusal, added = None, list[jax.stages.Compiled](), "", CompilerOptions()
            try:
                compiled, added = (by or with_tiles)(lowered)
                if assembly.steps.join is not None:
                    joining = assembly.steps.join.trace(assembly.state)
                    others.append(joining.lower(lowering_platforms=(cluster.platform,)).compile())
            except JaxRuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                compiled, others, refusal = None, [], str(error)
            join = assembly.extension.join
    return Compiled(
        assembly=assembly,
        text=compiled.as_text() if compiled else None,
        programs=tuple((join.name, join.every, str(program.as_text())) for program in others if join),
        statistics=_of_all(compiled, others) if compiled else None,
        options={option.name: option.value for option in assembly.steps.compiling.options} | added,
        added_options=added,
        attention=attention_kernel(traced.jaxpr.jaxpr),
        traced_flops=traced_flops(traced.jaxpr.jaxpr, dict(assembly.mesh.shape), assembly.cost.shares),
        messages=tuple(messages),
        refusal=refusal,
        seconds=time.perf_counter() - start,
    )


def with_tiles(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, CompilerOptions]:
    """Compiles a lowered step; if XLA finds no tile sizes for some Triton products, compiles again without Triton.

    Training does not need the second compilation, because there the compiler tunes tile sizes on the GPU.

    Args:
      lowered: the lowered step.

    Returns:
      (the compiled program, the options of the second compilation or {}).

    Raises:
      JaxRuntimeError: the compilation fails for another reason, or the second compilation fails.
    """
    try:
        return lowered.compile(), {}
    except JaxRuntimeError as error:
        if NO_TILES not in str(error):
            raise
    return lowered.compile(compiler_options=WITHOUT_TRITON), dict(WITHOUT_TRITON)


def _of_all(step: Executable, others: Sequence[jax.stages.Compiled]) -> Statistics:
    """Returns the compiler's memory statistics of a step, with the largest peak of all programs.

    Args:
      step: the compiled step.
      others: the compiled programs that do not run in every step.
    """
    found = statistics(step.memory_analysis())
    peaks = [statistics(program.memory_analysis()).peak_bytes for program in others]
    return dataclasses.replace(found, peak_bytes=max([found.peak_bytes, *peaks]))


def program_of(compiled: Compiled) -> Program | None:
    """Returns the step's HLO text, parsed; None if the compiler gave up."""
    return read(compiled.text, _places_for_others, compiled.assembly.cost.shares) if compiled.text else None


def other_programs_of(compiled: Compiled) -> list[tuple[str, int, Program]]:
    """Returns (name, number of steps between two runs, parsed program) for each of `Compiled.programs`."""
    return [(name, every, read(text, _places_for_others)) for name, every, text in compiled.programs]


def _places_for_others(file: str, function: str) -> bool:
    """Returns whether a function is a helper: reports attribute a helper's operations to the line of its caller.

    Helpers add sharding constraints, run loops, multiply in float8, or gather weights and sequences.

    Args:
      file: path of the function's file.
      function: the qualified name of the function.
    """
    of_layers = (layers.weight.__qualname__, layers.gather_sequence.__qualname__)
    return file in (placement.__file__, jaxprs.__file__, passes.__file__, saved.__file__, fp8.__file__) or (
        file == layers.__file__ and function in of_layers
    )
