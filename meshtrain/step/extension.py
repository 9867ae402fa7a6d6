"""Defines the parts of a step that an optional algorithm may replace. The default of each part is plain training.

An extension stores its arrays in `TrainState.extra`. No other code reads them.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from meshtrain.models.task import AfterUpdate, Params
from meshtrain.sharding.param_sharding import Names
from meshtrain.sharding.reduction import Reduction
from meshtrain.sharding.trees import Arrays
from meshtrain.step.state import TrainState
from meshtrain.step.step import TrainStep, Update, train_step

FieldNames: TypeAlias = dict[str, list[Names]]  # field of `TrainState` -> the logical axes of each of its arrays
Read: TypeAlias = Callable[[TrainState], TrainState]  # abstract state -> the state, read from a checkpoint
Shapes: TypeAlias = Mapping[str, Sequence[int]]  # path -> shape of each array in a checkpoint


@dataclasses.dataclass(frozen=True)
class Periodic:
    """A program that runs once every few steps, compiled separately from the step.

    Attributes:
      name: the program's name, for reports.
      every: the number of steps between two runs of the program.
      run: the program, a function of the training state that returns the changed state.
      sent_bytes: a function (elements of the trained weights on a device, number of replicas) -> bytes that a device
        sends over the data axis in one run of the program.
    """

    name: str
    every: int
    run: Callable[[TrainState], TrainState]
    sent_bytes: Callable[[float, int], float]


@dataclasses.dataclass(frozen=True)
class Costs:
    """The memory and communication of an extension, for the planner and the choice of compiler options.

    Attributes:
      label: a name for the contents of `TrainState.extra`, for tables.
      reduction: computes sums over replicas: sums of gradients in each step, or of weights in a `Periodic` program.
        None: the built-in sum.
      sends_gradients: whether a step sends gradients between replicas.
      hides_transfers: whether the transfers between replicas can overlap with the computation of a complete step.
      accumulators: a function of the abstract gradient sums of plain training; it returns the abstract sums that a step
        with the extension allocates.
    """

    label: str = ""
    reduction: Reduction | None = None
    sends_gradients: bool = True
    hides_transfers: bool = False
    accumulators: Callable[[Arrays], Arrays] = lambda sums: sums


class Estimate(NamedTuple):
    """The memory and communication of an extension, estimated from a configuration only, for a search of many plans.

    Attributes:
      copies: the number of gradient sums, and of sets of moments, that a device has for each trained weight.
      weights: the number of additional arrays with the shape and dtype of each trained weight.
      float32: the number of additional float32 arrays with the shape of each trained weight.
      sent_bytes: bytes per parameter that a device sends to other replicas in a step; None: the bytes that the built-in
        sum sends.
    """

    copies: int = 1
    weights: int = 0
    float32: int = 0
    sent_bytes: float | None = None


def plain_update(update: Callable[..., Update], after_update: AfterUpdate | None) -> Update:
    """Returns the `Update` of plain training: the optimizer gets the gradient sums of the current step.

    Args:
      update: `WeightUpdate` with all arguments except `reduce` and `after_update`.
      after_update: the function that changes weights after the optimizer; None: no change.
    """
    return update(after_update=after_update)


def plain_restore(read: Read, shapes: Shapes, like: TrainState) -> TrainState:
    """Returns the state that a checkpoint contains; its arrays must have the shapes of this run's state.

    Args:
      read: a function that reads a state from the checkpoint.
      shapes: path -> shape of each array in the checkpoint; not used.
      like: the abstract state of this run.
    """
    return read(like)


def with_weights(state: TrainState, params: Params) -> TrainState:
    """Returns the training state with the weights `params`; all other arrays of the state are unchanged."""
    return dataclasses.replace(state, params=params)


@dataclasses.dataclass(frozen=True)
class Extension:
    """The functions of a training step that an optional algorithm replaces.

    Attributes:
      begin: a function of the state before the first step; it returns the state with the extension's arrays in `extra`.
      names: a function (axes_of_fields, abstract state) -> the same mapping with the entry `extra`. `axes_of_fields` is
        a mapping: field of `TrainState` -> the logical axes of each of the field's arrays.
      update: a function (make_update, after_update) that returns the update of a step. `make_update` is `WeightUpdate`
        with all arguments except `reduce` and `after_update`.
      step: a function (gradients, update, scaling) that returns the training step. `train_step` is the default, and
        documents these arguments.
      join: a program that runs once every few steps; None: there is no periodic program.
      with_weights: a function (state, weights) -> the state of a run that starts from these weights.
      restore: a function (function that reads a state, shapes in the checkpoint, abstract state of this mesh) -> the
        saved state on this mesh.
      costs: the memory and communication of the extension.
    """

    begin: Callable[[TrainState], TrainState] = lambda state: state
    names: Callable[[FieldNames, TrainState], FieldNames] = lambda names, state: names
    update: Callable[[Callable[..., Update], AfterUpdate | None], Update] = plain_update
    step: Callable[..., TrainStep] = train_step
    join: Periodic | None = None
    with_weights: Callable[[TrainState, Params], TrainState] = with_weights
    restore: Callable[[Read, Shapes, TrainState], TrainState] = plain_restore
    costs: Costs = Costs()


PLAIN = Extension()
