"""Turns a configuration and devices into shapes, shardings and functions that are ready to compile.

No array is allocated. The order is:

config -> mesh -> task on the mesh -> gradients of a batch -> weight update -> training state -> jitted programs
"""

import dataclasses
from collections.abc import Mapping, Sequence

import jax

from meshtrain.assembly.compiling import compiling, reduced_early
from meshtrain.assembly.computations import computations
from meshtrain.assembly.extensions import extension as extension_of
from meshtrain.assembly.optimization import initializer, optimization, weight_update
from meshtrain.assembly.placed import Placed, place
from meshtrain.assembly.states import States, states
from meshtrain.assembly.steps import Functions, Steps, jitted
from meshtrain.config.mesh_checks import check_filled, num_microbatches, units_on_device
from meshtrain.config.schema import Config
from meshtrain.config.tasks import MakeTask
from meshtrain.errors import Problem, refuse
from meshtrain.models.cost import Cost
from meshtrain.models.task import Task
from meshtrain.sharding import offload
from meshtrain.sharding.mesh import make_mesh
from meshtrain.sharding.rules import Rules
from meshtrain.step.extension import Extension
from meshtrain.step.shardings import shardings
from meshtrain.step.state import TrainState


@dataclasses.dataclass(frozen=True)
class Assembly:
    """The result of `assemble`. It contains no arrays.

    Attributes:
      config: the configuration.
      placed: the task on the mesh, and the sharding of its weights.
      extension: the changes that an optional algorithm makes to a step; `extension.PLAIN` for most runs.
      states: the abstract training state and batch.
      steps: the jitted functions and their compiler options.
    """

    config: Config
    placed: Placed
    extension: Extension
    states: States
    steps: Steps

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """The mesh: the devices as a grid with named axes, in mesh order."""
        return self.placed.mesh

    @property
    def task(self) -> Task:
        """The task: the model, its loss and its batch."""
        return self.placed.task

    @property
    def state(self) -> TrainState:
        """The abstract training state: each leaf is a `jax.ShapeDtypeStruct` with its sharding."""
        return self.states.state

    @property
    def batch(self) -> Mapping[str, jax.ShapeDtypeStruct]:
        """The abstract global batch: each entry is a `jax.ShapeDtypeStruct` with its sharding."""
        return self.states.batch

    @property
    def cost(self) -> Cost:
        """The bytes of activations that one device sends and stores for one microbatch, from the task's formulas."""
        shape = dict(self.mesh.shape)
        units = units_on_device(self.config, self.task, self.placed.rules, shape)
        return self.task.cost(shape, units / num_microbatches(self.config, shape))


def assemble(
    config: Config,
    shape: Mapping[str, int],
    devices: Sequence[jax.Device],
    make_task: MakeTask | None = None,
    rules: Rules | None = None,
    also: Sequence[str] = (),
) -> Assembly:
    """Returns the mesh, the shardings and the jitted functions of a run. It allocates no array and compiles nothing.

    Args:
      config: the configuration, from `resolve`.
      shape: mesh axis -> size; -1 is already replaced by a size.
      devices: the devices, at least as many as the mesh has; they may be ahead-of-time devices of an absent cluster.
      make_task: a function that returns the task; None: the function that `config.task` names.
      rules: the table of rules: logical axis -> mesh axes; None: the built-in table.
      also: error lines of earlier checks, to be reported together with the problems of this function.

    Raises:
      UserError: `also` is not empty, arrays cannot be sharded as configured, a batch or loss breaks the contract of
        `Task`, or the mesh has a pipeline and the task has no stages.
    """
    refuse([*check_filled(config, shape, make_task, rules), *also, *_offload_problems(config, devices)])

    # The mesh: devices as a grid with named axes. A weight's sharding maps its dims to these axes, and so decides which
    # device stores which part.
    placed = reduced_early(config, place(config, make_mesh(shape, devices), make_task, rules))
    extension = extension_of(config, placed)

    # Functions of weights and a batch. JAX traces such a function later: it calls the function once with abstract
    # arrays and records the operations, for all devices together.
    compute = computations(config, placed)

    # The weight update. `init` is traced here with shapes instead of arrays, which gives the shapes of the state.
    moves = optimization(config, placed)
    init = initializer(config, placed, moves, extension)
    abstract = states(config, placed, moves, extension, init)
    update = weight_update(config, placed, moves, extension, shardings(abstract.state))
    step = extension.step(compute.gradients, update, moves.scaling)

    # Jitted functions with the shardings of their results. XLA compiles them when they are lowered or first called.
    functions = Functions(init, step, extension.join, compute)
    steps = jitted(functions, abstract, placed, compiling(config, placed, extension))
    return Assembly(config, placed, extension, abstract, steps)


def _offload_problems(config: Config, devices: Sequence[jax.Device]) -> list[Problem]:
    asked = {"offload.moments=True": config.offload.moments, "remat.policy=offload": config.remat.policy == "offload"}
    return [line for what, is_asked in asked.items() if is_asked for line in offload.problems(what, devices)]
