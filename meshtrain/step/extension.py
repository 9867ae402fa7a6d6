"""What an optional algorithm may change in a step. The default of each attribute is plain training.

An extension keeps its own arrays in `TrainState.extra`. No other code reads them.
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
Read: TypeAlias = Callable[[TrainState], TrainState]  # abstract state -> that state, read from a checkpoint
Shapes: TypeAlias = Mapping[str, Sequence[int]]  # path -> shape of each array in a checkpoint


@dataclasses.dataclass(frozen=True)
class Periodic:
    """A program that runs after every few steps, compiled separately from the step.

    Attributes:
      name: of the program, for reports.
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
    """What an extension stores and sends, for the planner and the compiler's options.

    Attributes:
      label: the contents of `TrainState.extra`, for tables.
      reduction: how gradients, or the weights of a `Periodic`, are sent over data; None: the built-in sum.
      sends_gradients: whether a step sends gradients over data.
      hides_transfers: whether the computation of a whole step can hide what the step sends.
      accumulators: abstract sums of gradients -> the sums that a step allocates.
    """

    label: str = ""
    reduction: Reduction | None = None
    sends_gradients: bool = True
    hides_transfers: bool = False
    accumulators: Callable[[Arrays], Arrays] = lambda sums: sums


class Estimate(NamedTuple):
    """What an extension stores and sends, by arithmetic on a configuration alone, for a search of many of them.

    Attributes:
      copies: how many sums of gradients and moments a device has of each trained weight.
      weights: how many further arrays in the dtype of each trained weight.
      float32: how many further float32 arrays of each trained weight.
      sent_bytes: that a device sends over data in a step, for each parameter; None: as the built-in sum.
    """

    copies: int = 1
    weights: int = 0
    float32: int = 0
    sent_bytes: float | None = None


def plain_update(update: Callable[..., Update], after_update: AfterUpdate | None) -> Update:
    """Returns the update of plain training."""
    return update(after_update=after_update)


def plain_restore(read: Read, shapes: Shapes, like: TrainState) -> TrainState:
    """Returns the state of a checkpoint, whose arrays have the shapes of `like`."""
    return read(like)


def with_weights(state: TrainState, params: Params) -> TrainState:
    """Returns a state with other weights."""
    return dataclasses.replace(state, params=params)


@dataclasses.dataclass(frozen=True)
class Extension:
    """The functions that an optional algorithm changes.

    Attributes:
      begin: the state before the first step -> the same with the extension's arrays in `extra`.
      names: (logical axes of the arrays of each field, abstract state) -> the same with those of the extension.
      update: (`WeightUpdate` without `reduce` and `after_update`, `after_update`) -> the update of a step.
      step: (gradients, update, scaling) -> the step; see `train_step`.
      join: a program that runs after every few steps; None: there is none.
      with_weights: (state, weights) -> the state that starts from these weights.
      restore: (function that reads a state, shapes in the checkpoint, abstract state of this mesh) -> the saved state
        on this mesh.
      costs: what the extension stores and sends.
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
