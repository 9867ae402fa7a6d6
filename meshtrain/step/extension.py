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
      every: the number of steps between two runs.
      run: state -> state.
      sent_bytes: (elements of the trained weights on a device, replicas) -> bytes that a device sends over data.
    """

    name: str
    every: int
    run: Callable[[TrainState], TrainState]
    sent_bytes: Callable[[float, int], float]


@dataclasses.dataclass(frozen=True)
class Costs:
    """The memory and communication of an extension, for the planner and the choice of compiler options.

    Attributes:
      label: the contents of `TrainState.extra`, for tables.
      reduction: the reduction of gradients, or of the weights of a `Periodic`, between replicas; None: the built-in
        sum.
      sends_gradients: whether a step sends gradients between replicas.
      hides_transfers: whether the computation of a complete step can overlap with the communication of a step.
      accumulators: abstract sums of gradients -> the sums that a step allocates.
    """

    label: str = ""
    reduction: Reduction | None = None
    sends_gradients: bool = True
    hides_transfers: bool = False
    accumulators: Callable[[Arrays], Arrays] = lambda sums: sums


class Estimate(NamedTuple):
    """The memory and communication of an extension, estimated from a configuration only, for a search of many plans.

    Attributes:
      copies: the number of gradient sums and of moments that a device has for each trained weight.
      weights: the number of additional arrays of the shape and dtype of each trained weight.
      float32: the number of additional float32 arrays of the shape of each trained weight.
      sent_bytes: bytes per parameter that a device sends to other replicas in a step; None: as the built-in sum.
    """

    copies: int = 1
    weights: int = 0
    float32: int = 0
    sent_bytes: float | None = None


def plain_update(update: Callable[..., Update], after_update: AfterUpdate | None) -> Update:
    """Returns the update of plain training, which applies the summed gradients."""
    return update(after_update=after_update)


def plain_restore(read: Read, shapes: Shapes, like: TrainState) -> TrainState:
    """Reads a checkpoint as the abstract state `like`; it must have the same shapes."""
    return read(like)


def with_weights(state: TrainState, params: Params) -> TrainState:
    """Returns a state with its weights replaced by `params`."""
    return dataclasses.replace(state, params=params)


@dataclasses.dataclass(frozen=True)
class Extension:
    """The functions that an optional algorithm changes.

    Attributes:
      begin: adds the extension's arrays to `extra` of the state before the first step.
      names: (logical axes of the arrays of each field, abstract state) -> logical axes with the extension's arrays.
      update: (`WeightUpdate` without `reduce` and `after_update`, `after_update`) -> the update of a step.
      step: (gradients, update, scaling) -> the step; see `train_step`.
      join: a program that runs once every few steps; None: no such program.
      with_weights: (state, weights) -> the state of a run that starts from these weights.
      restore: (function that reads a state, shapes in the checkpoint, abstract state of this mesh) -> the saved state
        on this mesh.
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
