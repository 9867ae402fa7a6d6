"""The abstract training state and the abstract batch: shapes, logical axes and shardings of every array."""

import dataclasses
from collections.abc import Callable, Mapping

import jax
from jax.sharding import Mesh

from meshtrain.assembly.optimization import Optimization
from meshtrain.assembly.placed import Placed
from meshtrain.config.schema import Config
from meshtrain.errors import Problem, UserError, refuse
from meshtrain.models.task import Entry, Params
from meshtrain.sharding.param_sharding import Names, activation_sharding
from meshtrain.sharding.rules import Rules
from meshtrain.step.extension import Extension
from meshtrain.step.shardings import axes_of_fields, axes_of_leaves, sharded_states, splits_masters
from meshtrain.step.state import TrainState


@dataclasses.dataclass(frozen=True)
class States:
    """The abstract arrays of a run; each leaf is a `jax.ShapeDtypeStruct` with its sharding.

    Attributes:
      state: the training state in its shapes on the devices, with a pipeline's layers arranged in stages.
      kept: the same state with layers in layer order; checkpoints use these shapes.
      names: the logical axes of each leaf of `state`, in the order of `jax.tree.leaves`.
      batch: the global batch.
      sums: the float32 sums of gradients that a step allocates.
    """

    state: TrainState
    kept: TrainState
    names: list[Names]
    batch: Mapping[str, jax.ShapeDtypeStruct]
    sums: Params


def states(
    config: Config, placed: Placed, moves: Optimization, extension: Extension, init: Callable[[jax.Array], TrainState]
) -> States:
    """Returns the abstract training state, batch and gradient sums of a run, with shardings.

    Args:
      config: the configuration.
      placed: the task on its mesh.
      moves: the optimizer.
      extension: the changes that an optional algorithm makes to the state and the gradient sums.
      init: the function that makes the training state from uint32 key data; it is only traced.

    Raises:
      UserError: an array cannot be sharded according to the rules.
    """
    replicas = placed.replicas
    abstract = jax.eval_shape(lambda: init(jax.random.key_data(jax.random.key(0))))
    of_fields = axes_of_fields(abstract, moves.transformation, placed.params, placed.axes, replicas.trained)
    names = axes_of_leaves(abstract, extension.names(of_fields, abstract))
    split = splits_masters(placed.task, config.precision, replicas.level, placed.mesh.shape, replicas.trained)
    on_host = config.offload.moments
    state, kept = sharded_states(
        abstract, names, placed.rules, replicas, placed.stack, moments_on_host=on_host, masters_are_split=split
    )
    sums = extension.costs.accumulators(replicas.accumulators(state.params))
    return States(state, kept, names, abstract_batch(placed.batch, placed.rules, placed.mesh), sums)


def abstract_batch(batch: Mapping[str, Entry], rules: Rules, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the abstract global batch: entry name -> shape, dtype and sharding according to the activation rules.

    Args:
      batch: entry name -> shape, dtype and logical axes.
      rules: the table of rules: logical axis -> mesh axes.
      mesh: the mesh.

    Raises:
      UserError: a dim has a logical axis without a rule, or a size that its mesh axes do not divide; one line for each
        of these dims.
    """
    abstract, problems = {}, list[Problem]()
    for name, entry in batch.items():
        try:
            sharding = activation_sharding(entry.shape, entry.axes, rules, mesh, path=f"batch/{name}")
            abstract[name] = jax.ShapeDtypeStruct(entry.shape, entry.dtype, sharding=sharding)
        except UserError as error:
            # A user's model may have dims that the built-in table does not list.
            hint = ", or a custom rule: sharding.rules.extend(rules, Rule('...'))"
            problems += [
                one.with_parts(fix=f"{one.fix}{hint}") if "logical axis of dim" in one.key else one
                for one in error.problems
            ]
    refuse(problems)
    return abstract
