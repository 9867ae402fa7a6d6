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

# (number of the step, from 1; state; batch) -> (state, metrics).
StepFunction = Callable[[int, TrainState, Batch], tuple[TrainState, Mapping[str, jax.Array]]]


@dataclasses.dataclass(frozen=True)
class Steps:
    """The jitted functions of a run.

    Attributes:
      init: a function of uint32 key data that returns the initial state; each device creates only its part of each
        array.
      train: the step, a function (state, batch) -> (state, metrics); it donates the state.
      join: the extension's periodic program, a function of the state to call every `Periodic.every` steps; it donates
        the state. None: the run has no periodic program.
      evaluate: a function (params, batch) -> sums over the batch.
      logits: a function (params, batch) -> float32 [sequences, tokens, vocabulary]; None if the task has no logits.
      to_kept: a function that converts a state from its shapes on the devices to layer order, for checkpoints; the
        identity if the shapes are the same.
      from_kept: the inverse function of `to_kept`.
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
    """The functions of a run before `jax.jit` and without shardings of their results.

    Attributes:
      init: a function of uint32 key data that returns the initial state.
      step: a function (state, batch) -> (state, metrics).
      join: a program that runs once every few steps; None: the run has no periodic program.
      compute: the functions that compute gradients, evaluation sums and logits of a batch.
    """

    init: Callable[[jax.Array], TrainState]
    step: TrainStep
    join: Periodic | None
    compute: Computations


def jitted(functions: Functions, abstract: States, placed: Placed, options: Compiling) -> Steps:
    """Applies `jax.jit` to the functions of a run, with shardings of the results and compiler options.

    XLA compiles a function when it is lowered or first called. The step donates its input state: the new weights reuse
    the memory of the old weights.

    Args:
      functions: the functions of the run.
      abstract: the abstract training state, whose shardings the results get.
      placed: the task on its mesh.
      options: the compiler options of the step.
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
    """Traces the programs of training; returns name -> traced program, with the name "step" for the training step.

    If the extension has a periodic program (`steps.join`), the result also contains it, with the name "join".

    No other thread may trace a Linen module during this call. `nn.scan` and `nn.remat` make subclasses of modules when
    they are traced. Meanwhile, Flax removes fields from the base classes, and a thread that reads these fields fails.
    """
    state = states.state
    traced = {"step": steps.train.trace(state, states.batch)}
    return traced if steps.join is None else traced | {"join": steps.join.trace(state)}


def compiled_step(
    traced: Mapping[str, jax.stages.Traced], join: Periodic | None
) -> tuple[jax.stages.Compiled, StepFunction]:
    """Returns the compiled step, and a function (step number, state, batch) -> (state, metrics) for the loop.

    After every `join.every` steps, this function also runs the periodic program `join`.

    Args:
      traced: the result of `trace_steps`.
      join: the extension's program that runs once every few steps; None if there is no periodic program.

    Raises:
      UserError: other processes traced a different program.
    """
    train = compile_program("step", traced["step"])
    after = compile_program(join.name, traced["join"]) if join else None

    def step(number: int, state: TrainState, batch: Batch) -> tuple[TrainState, Mapping[str, jax.Array]]:
        state, metrics = train(state, batch)
        return (after(state) if join and after and number % join.every == 0 else state), metrics

    return train, step
