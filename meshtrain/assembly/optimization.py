"""Makes the learning rate, the optimizer, the initial training state, and the weight update of a step."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import optax

from meshtrain.assembly.placed import Placed
from meshtrain.config.schema import Config
from meshtrain.config.tasks import names as task_names
from meshtrain.errors import Problem, UserError
from meshtrain.models.task import Task
from meshtrain.optim.learning_rate import NAMES as RATES
from meshtrain.optim.learning_rate import Schedule, learning_rate
from meshtrain.optim.optimizers import NAMES, optimizer
from meshtrain.sharding import offload
from meshtrain.sharding.named import unbox
from meshtrain.sharding.param_sharding import is_names
from meshtrain.sharding.trees import Shardings, leaves_with_paths, select
from meshtrain.step import health, loss_scale
from meshtrain.step.extension import Extension
from meshtrain.step.precision import as_stored, compute_name
from meshtrain.step.shardings import after_update_of, stack_layers
from meshtrain.step.state import TrainState, init_state
from meshtrain.step.step import Update, WeightUpdate


@dataclasses.dataclass(frozen=True)
class Optimization:
    """The learning rate, optimizer and loss scaling of a run.

    Attributes:
      rates: the learning rate as a function of the number of updates done.
      transformation: the optimizer; it gets the gradients of the mean loss.
      scaling: the loss scaling of the backward pass; None: the loss is not scaled.
    """

    rates: Schedule
    transformation: optax.GradientTransformation
    scaling: loss_scale.Scaling | None


def optimization(config: Config, placed: Placed) -> Optimization:
    """Returns the learning rate, the optimizer and the loss scaling of a configuration."""
    rates, in_float16 = learning_rates(config, placed.task), compute_name(config.precision) == "float16"
    trained_axes, _ = select(placed.axes, placed.replicas.trained)
    scaling = loss_scale.scaling(config.loss_scale, placed.task.num_units, computes_in_float16=in_float16)
    return Optimization(rates, optimizer(config.optimizer, rates, trained_axes), scaling)


def initializer(
    config: Config, placed: Placed, optimization: Optimization, extension: Extension
) -> Callable[[jax.Array], TrainState]:
    """Returns a function that makes the training state before the first step.

    The argument of this function is the uint32 data of a PRNG key.
    """
    task, trained = placed.task, placed.replicas.trained

    def init(key_data: jax.Array) -> TrainState:
        rng = jax.random.wrap_key_data(key_data)
        params = unbox(task.init(jax.random.fold_in(rng, 0)))
        params = stack_layers(as_stored(params, placed.axes, trained, config.precision), placed.stack)
        rng = jax.random.fold_in(rng, 1)
        return extension.begin(init_state(params, optimization.transformation, rng, optimization.scaling, trained))

    return init


def weight_update(
    config: Config, placed: Placed, optimization: Optimization, extension: Extension, of_state: Shardings
) -> Update:
    """Returns the second half of a step, which computes the next state from the gradients.

    Args:
      config: the configuration.
      placed: the task on its mesh.
      optimization: the learning rate, the optimizer and the loss scaling.
      extension: the changes that an optional algorithm makes to the update.
      of_state: the sharding of each array of the training state.
    """
    after_update, layers = after_update_of(placed.task, placed.stack), None
    if config.observe.layers != "off":
        layers = health.Layers(dict(leaves_with_paths(placed.axes, is_leaf=is_names)), placed.stack)
    update = functools.partial(
        WeightUpdate,
        optimization.transformation,
        optimization.rates,
        config.optimizer.clip_norm,
        config.guard,
        optimization.scaling,
        lambda opt_state, norm: offload.fetch(opt_state, of_state.opt_state, after=norm),
        placed.replicas.trained,
        average_decay=config.optimizer.average,
        layers=layers,
        is_own=config.optimizer.name not in NAMES
        or config.learning_rate.name not in RATES
        or (after_update is not None and config.task not in task_names()),
    )
    # In plain training this is update(after_update=after_update): a `WeightUpdate`.
    return extension.update(update, after_update)


def learning_rates(config: Config, task: Task) -> Schedule:
    """Returns the learning rate as a function of the number of updates done so far.

    Raises:
      UserError: the name is `noam`, which depends on the model's width, and the task states no width.
    """
    options = config.learning_rate
    if options.name == "noam" and not task.width:
        raise UserError(
            Problem(
                "learning_rate.name",
                got="noam, but this task has no width (Task.width = 0)",
                allowed="a task with a width, or another name",
                nearest="inverse_sqrt",
            )
        )
    return learning_rate(
        options, num_steps=config.num_steps, embed_dim=max(task.width, 1), batch_size=config.batch_size
    )
