"""Makes the jitted functions of a run, and compiles the programs that the training loop calls."""

import dataclasses
import functools
from collections.abc import Callable, Mapping

import jax
from jax.sharding import NamedSharding, PartitionSpec

from meshtrain.assembly.compiling import Compiling, compile_program, device_kind
from meshtrain.assembly.computations import Computations
from meshtrain.assembly.placed import Placed
from meshtrain.assembly.states import States
from meshtrain.hardware.compiler_options import init_compiler_options
from meshtrain.models.task import Batch, Params
from meshtrain.step.extension import Periodic
from meshtrain.step.shardings import reshaper, shardings
from meshtrain.step.state import TrainState
from meshtrain.step.step import TrainStep, eval_step

# (number of the step, state, batch) -> (state, metrics).
StepFunction = Callable[[int, TrainState, Batch], tuple[TrainState, Mapping[str, jax.Array]]]


@dataclasses.dataclass(frozen=True)
class Steps:
    """The jitted functions of a run.

    Attributes:
      init: uint32 key data -> state; each device creates only its part of each array.
      train: (state, batch) -> (state, metrics); donates the state.
      join: state -> state, to call every `Periodic.every` steps; donates the state. None for most runs.
      evaluate: (params, batch) -> sums over the batch.
      logits: (params, batch) -> float32 [B, T, vocabulary]; None if the task has no logits.
      to_kept: converts a state from the step's shapes to layer order, for checkpoints; the identity if the shapes are
        the same.
      from_kept: the inverse of `to_kept`.
      compiling: the compiler options.
    """

    init: jax.stages.Wrapped
    train: jax.stages.Wrapped
    join: jax.stages.Wrapped | None
    evaluate: jax.stages.Wrapped
    logits: Callable[[Params, Batch], jax.Array] | None
    to_kept: Callable[[TrainState], TrainState]
    from_kept: Callable[[TrainState], TrainState]
    compiling: Compiling


@dataclasses.dataclass(frozen=True)
class Functions:
    """The functions of a run before `jax.jit`: they take and return arrays, and state no shardings for them.

    Attributes:
      init: uint32 key data -> state.
      step: (state, batch) -> (state, metrics).
      join: a program that runs once every few steps; None for most runs.
      compute: the functions of weights and a batch.
    """

    init: Callable[[jax.Array], TrainState]
    step: TrainStep
    join: Periodic | None
    compute: Computations


def jitted(functions: Functions, abstract: States, placed: Placed, options: Compiling) -> Steps:
    """Returns the functions under `jax.jit`; XLA compiles them when they are lowered or first called.

    Each function states the shardings of its results. The step donates its input state: the new weights reuse the
    memory of the old weights.
    """
    compute = functions.compute
    of_state, everywhere = shardings(abstract.state), NamedSharding(placed.mesh, PartitionSpec())
    donating = functools.partial(jax.jit, donate_argnums=0, compiler_options={o.name: o.value for o in options.options})
    for_init = init_compiler_options(device_kind(placed.mesh))
    return Steps(
        init=jax.jit(functions.init, out_shardings=of_state, compiler_options=for_init),
        train=donating(functions.step, out_shardings=(of_state, everywhere)),
        join=donating(functions.join.run, out_shardings=of_state) if functions.join else None,
        evaluate=jax.jit(eval_step(compute.evaluate), out_shardings=everywhere),
        logits=compute.logits and jax.jit(compute.logits, out_shardings=everywhere),
        to_kept=reshaper(abstract.state, abstract.kept, placed.stack),
        from_kept=reshaper(abstract.kept, abstract.state, placed.stack),
        compiling=options,
    )


def trace_steps(steps: Steps, states: States) -> dict[str, jax.stages.Traced]:
    """Returns program name -> traced program: the step, and `join` if the run has it.

    No other thread may trace a Linen module during this call. `nn.scan` and `nn.remat` make subclasses of modules when
    they are traced. Flax temporarily removes fields from the base classes, and a thread that reads them then fails.
    """
    state = states.state
    traced = {"step": steps.train.trace(state, states.batch)}
    return traced if steps.join is None else traced | {"join": steps.join.trace(state)}


def compiled_step(
    traced: Mapping[str, jax.stages.Traced], join: Periodic | None
) -> tuple[jax.stages.Compiled, StepFunction]:
    """Returns the compiled step, and a function (number, state, batch) -> (state, metrics) for the loop.

    Args:
      traced: the result of `trace_steps`.
      join: the extension's program that runs once every few steps; None if it has no such program.

    Raises:
      UserError: other processes traced a different program.
    """
    train = compile_program("step", traced["step"])
    after = compile_program(join.name, traced["join"]) if join else None

    def step(number: int, state: TrainState, batch: Batch) -> tuple[TrainState, Mapping[str, jax.Array]]:
        state, metrics = train(state, batch)
        return (after(state) if join and after and number % join.every == 0 else state), metrics

    return train, step
