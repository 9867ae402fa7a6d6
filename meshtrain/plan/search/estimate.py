"""Estimates a device's bytes and a step's seconds; a search compiles the candidates with the best estimates.

Bytes of the training state follow exactly from the placement. Activations and their traffic come from the task's
`Cost`.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from meshtrain.config import extensions
from meshtrain.config.mesh_checks import num_microbatches, units_on_device
from meshtrain.config.schema import Config
from meshtrain.config.tasks import abstract_task
from meshtrain.errors import Problem
from meshtrain.hardware.accelerators import Accelerator, peak_flops_per_second
from meshtrain.models.cost import Cost
from meshtrain.models.task import Task
from meshtrain.optim.optimizers import optimizer
from meshtrain.optim.states import state_axes
from meshtrain.pipeline.schedules import PipelineOptions
from meshtrain.pipeline.stages import Stack, stack_of, zeros_like
from meshtrain.plan.cost.lower_bound import FLOAT32_BYTES, GATHERS, SCATTERS, SCATTERS_EACH
from meshtrain.sharding.mesh import MeshOptions
from meshtrain.sharding.param_sharding import Names, axes_in, is_names, num_parts, param_sharding, rules_of_level
from meshtrain.sharding.rules import CONTEXT, DATA, EXPERT, PIPELINE, TENSOR, default_rules, storage_axes
from meshtrain.sharding.trainable import trainable_mask
from meshtrain.sharding.tree_problems import tree_problems
from meshtrain.sharding.trees import Arrays, NamesTree, leaves_with_paths, select
from meshtrain.step.precision import as_stored, cast, compute_dtype, product_name
from meshtrain.step.shardings import abstract_params, splits_masters

EFFICIENCY = 0.6
EXPERTS = "experts"  # the logical axis of the dim of experts
STORED = "stored"  # traffic along all axes that store weights, together


@dataclasses.dataclass(frozen=True)
class Weights:
    """The abstract training state of a task, in layer order and without shardings.

    Attributes:
      task: the task without a mesh; only its sizes are used.
      params: a pytree of abstract parameters.
      axes: a pytree with the logical axes of each parameter.
      trained: path of each parameter -> whether it has a gradient.
      moments: (array, logical axes) for each array of the optimizer's state.
    """

    task: Task
    params: Arrays
    axes: NamesTree
    trained: Mapping[str, bool]
    moments: tuple[tuple[jax.ShapeDtypeStruct, Names], ...]

    @functools.cached_property
    def leaves(self) -> list[tuple[str, jax.ShapeDtypeStruct, Names]]:
        """(path, abstract array, logical axes) of each parameter."""
        axes = dict(leaves_with_paths(self.axes, is_leaf=is_names))
        return [(path, leaf, axes[path]) for path, leaf in leaves_with_paths(self.params)]

    @property
    def num_parameters(self) -> int:
        """Number of stored parameters."""
        return sum(math.prod(leaf.shape) for _, leaf, _ in self.leaves)

    @property
    def num_trained(self) -> int:
        """Number of parameters that have gradients."""
        return sum(math.prod(leaf.shape) for path, leaf, _ in self.leaves if self.trained[path])

    @property
    def share_of_experts(self) -> float:
        """The share of the parameters that belongs to experts; the expert axis splits these and never gathers them."""
        return sum(math.prod(leaf.shape) for _, leaf, axes in self.leaves if EXPERTS in axes) / self.num_parameters

    @property
    def num_experts(self) -> int:
        """The greatest common divisor of the numbers of experts of all expert weights; 0 without experts.

        The size of the expert axis must divide this number.
        """
        return math.gcd(*(leaf.shape[axes.index(EXPERTS)] for _, leaf, axes in self.leaves if EXPERTS in axes))


def weights_of(config: Config) -> Weights:
    """Returns the abstract training state of a configuration's task; touches no device.

    Raises:
      UserError: the task is unknown, its options are invalid, or `optimizer.trainable` matches no parameter.
    """
    task = abstract_task(config)
    params, axes = abstract_params(task, None, 2)
    mask = trainable_mask(config.optimizer.trainable, params, has_adapters=config.lora.rank > 0)
    params = jax.eval_shape(lambda: as_stored(zeros_like(params), axes, mask, config.precision))
    chosen, chosen_axes = select(params, mask)[0], select(axes, mask)[0]
    transformation = optimizer(config.optimizer, lambda step: jnp.zeros(()), chosen_axes)
    in_float32 = jax.eval_shape(lambda: cast(zeros_like(chosen), jnp.float32))
    arrays = jax.tree.leaves(jax.eval_shape(transformation.init, in_float32))
    moments = tuple(zip(arrays, state_axes(transformation, in_float32, chosen_axes), strict=True))
    return Weights(task, params, axes, dict(leaves_with_paths(mask)), moments)


def placement_problems(config: Config, shape: Mapping[str, int], weights: Weights) -> list[Problem]:
    """Returns an error for each weight that the sharding rules cannot place on a mesh.

    Args:
      config: the configuration; its layout and pipeline are used.
      shape: mesh axis -> size.
      weights: the abstract training state of the task.
    """
    params, stack = weights.params, _stack(config, shape, weights.task)
    if stack is not None:
        params = {**params, "layers": stack.places(params["layers"])}
    return tree_problems(params, weights.axes, default_rules(config.layout), shape, level=0)


def _stack(config: Config, shape: Mapping[str, int], task: Task) -> Stack | None:
    return stack_of(task.stages, shape[PIPELINE], config.pipeline.num_chunks)


def _padding_factor(config: Config, shape: Mapping[str, int], task: Task) -> float:
    """Returns (layers + padding layers) / layers, which multiplies work and memory; 1 without a pipeline."""
    stack = _stack(config, shape, task)
    return stack.num_places / stack.num_layers if stack else 1.0


def state_bytes(config: Config, shape: Mapping[str, int], weights: Weights) -> int:
    """Returns the bytes of a device's training state, equal to `StateBytes.total` but without assembling the step.

    The state consists of parameters, gradient sums, moments and the arrays of an extension.

    Args:
      config: the configuration; its layout, ZeRO level, pipeline, precision, extension and offload of moments are used.
      shape: mesh axis -> size.
      weights: the abstract training state of the task, see `weights_of`; it can be placed on this mesh.
    """
    level = config.zero.effective_level
    rules = rules_of_level(default_rules(config.layout), level)
    total, extension = 0, extensions.estimate(config, shape, weights.params)
    split = splits_masters(weights.task, config.precision, level, shape, weights.trained)
    stack = _stack(config, shape, weights.task)
    for path, leaf, axes in weights.leaves:
        dims = leaf.shape if stack is None else stack.places_shape(leaf.shape, axes)
        specs, size = param_sharding(dims, axes, rules, shape, level, path), math.prod(dims)
        here = size // num_parts(axes_in(specs.parameter), shape)
        held = size // num_parts(axes_in(specs.moment), shape) if split else here
        total += held * leaf.dtype.itemsize
        if weights.trained[path]:
            total += extension.copies * (size // num_parts(axes_in(specs.gradient), shape) * FLOAT32_BYTES)
            total += here * (extension.weights * leaf.dtype.itemsize + extension.float32 * FLOAT32_BYTES)
    if config.offload.moments:
        return total
    for leaf, names in weights.moments:
        dims = leaf.shape if stack is None else stack.places_shape(leaf.shape, names)
        spec = param_sharding(dims, names, rules, shape, level).moment
        total += extension.copies * (math.prod(dims) // num_parts(axes_in(spec), shape) * leaf.dtype.itemsize)
    return total


def estimate_bytes(config: Config, shape: Mapping[str, int], weights: Weights) -> float:
    """Returns the estimated bytes of one device: training state, saved activations, temporaries of a layer or the head.

    Args:
      config: the configuration.
      shape: mesh axis -> size.
      weights: the abstract training state of the task.
    """
    cost = _cost(config, shape)
    kept = _saved_microbatches(config, shape) * cost.kept_bytes * _padding_factor(config, shape, weights.task)
    kept += cost.working_bytes
    return state_bytes(config, shape, weights) + kept


def _cost(config: Config, shape: Mapping[str, int]) -> Cost:
    """Returns the activation costs of one microbatch on one device of a mesh; caches the task that it creates."""
    # Mesh, pipeline and microbatches do not change the task; leaving them out makes the cache effective.
    task = _task(dataclasses.replace(config, mesh=MeshOptions(), pipeline=PipelineOptions(), accumulation_steps=1))
    units = units_on_device(config, task, default_rules(config.layout), shape)
    return task.cost(shape, units / num_microbatches(config, shape))


@functools.lru_cache(maxsize=16)
def _task(config: Config) -> Task:
    return abstract_task(config)


def _chunks(config: Config, shape: Mapping[str, int]) -> int:
    """Returns the number of chunks (groups of layers) of each pipeline stage; 1 without a pipeline."""
    return config.pipeline.num_chunks if shape[PIPELINE] > 1 else 1


def _saved_microbatches(config: Config, shape: Mapping[str, int]) -> float:
    """Returns the number of microbatches whose activations the busiest pipeline stage stores for the backward pass.

    The number is a fraction if the stage stores only some chunks of a microbatch. In an alternating schedule with V
    chunks, the first of S stages stores up to V S + S - 1 chunks (`program.py`); V chunks are one microbatch. `gpipe`
    stores all M microbatches. A custom schedule is estimated like an alternating schedule. Without a pipeline the
    number is 1.
    """
    stages, chunks, parts = shape[PIPELINE], config.pipeline.num_chunks, config.pipeline.num_microbatches
    if stages == 1:
        return 1
    return parts if config.pipeline.schedule == "gpipe" else min(parts, (chunks * stages + stages - 1) / chunks)


def estimate_seconds(
    config: Config,
    shape: Mapping[str, int],
    weights: Weights,
    accelerator: Accelerator | None,
    devices_each: int,
) -> float:
    """Returns the estimated seconds of a step: matrix products, idle clock ticks, gradient sums, and transfers.

    Half of the transfer time counts, since the other half is assumed to overlap computation.

    Args:
      config: the configuration.
      shape: mesh axis -> size.
      weights: the abstract training state of the task.
      accelerator: the published peaks of a device; None if unknown, which gives every mesh of the cluster the same
        estimate.
      devices_each: number of devices that fast links connect, see `Cluster.devices_each`.
    """
    if accelerator is None:
        return float(math.prod(shape.values()))
    peak = peak_flops_per_second(accelerator.device_kinds[0], product_name(config.precision))
    parts, task = num_microbatches(config, shape), weights.task
    flops = task.flops_per_token or 6.0 * weights.num_parameters
    attention = task.attention_flops_per_token / flops
    policy = config.remat.policy
    again = 1.0 if policy == "full" else 1 - attention if policy == "save_attention" else 0.0
    work = task.num_units * flops / math.prod(shape.values()) * (1 + again / 3)
    bubble = (1 + (shape[PIPELINE] - 1) / (parts * _chunks(config, shape))) * _padding_factor(config, shape, task)
    sent = sum(_sending_seconds(config, shape, weights, accelerator, devices_each).values())
    # Each microbatch reads its gradients and the gradient sums, and writes the sums.
    summed = weights.num_parameters / math.prod(shape[axis] for axis in (*storage_axes(), TENSOR, PIPELINE))
    moved = 3 * FLOAT32_BYTES * summed * parts if parts > 1 else 0.0
    seconds = work * bubble / (EFFICIENCY * (peak or accelerator.bfloat16_flops_per_second)) + sent / 2
    return seconds + moved / accelerator.memory_bytes_per_second


def _sending_seconds(
    config: Config, shape: Mapping[str, int], weights: Weights, accelerator: Accelerator, devices_each: int
) -> dict[str, float]:
    """Returns mesh axis -> seconds for which a device sends along it in a step; axes of size 1 have no entry.

    The key `STORED` has the seconds of gathering weights and scattering their gradients.

    Args:
      config: the configuration.
      shape: mesh axis -> size.
      weights: the abstract training state of the task.
      accelerator: the published peaks of a device.
      devices_each: number of devices that fast links connect, see `Cluster.devices_each`.
    """
    link = accelerator.link_bytes_per_second
    network = accelerator.network_bytes_per_second or link
    storing = num_parts(storage_axes(), shape)
    itemsize = jnp.dtype(compute_dtype(config.precision)).itemsize
    parts, task = num_microbatches(config, shape), weights.task
    of_stage = weights.num_parameters / (shape[TENSOR] * shape[PIPELINE])
    # Below ZeRO level 3, only gradients are sent between data-parallel replicas.
    is_gathered = config.zero.effective_level > SCATTERS_EACH
    over_data = of_stage if is_gathered else of_stage * weights.num_trained / weights.num_parameters
    activation = itemsize * units_on_device(config, task, default_rules(config.layout), shape) * task.width
    cost = _cost(config, shape)
    of_experts, inside = of_stage * weights.share_of_experts, devices_each // shape[TENSOR]

    def gathering(elements: float, num_devices: int, num_inside: int) -> float:
        """Returns the seconds of gathering weights and scattering their gradients over a group of devices in a step.

        Args:
          elements: number of gathered elements.
          num_devices: number of devices in the group.
          num_inside: maximum number of devices of the group in one host; they share their network adapters.
        """
        neighbours = max(1, min(num_devices, num_inside))
        speed = link if neighbours == num_devices else min(link, network * neighbours)
        return (GATHERS + SCATTERS) * itemsize * elements * parts / speed if num_devices > 1 else 0.0

    def of_activations(axis: str) -> float:
        """Returns the seconds that a device sends activations over a mesh axis in a step.

        Transfers use the links within a host if the devices of this axis and the tensor axis fit in one host, else the
        network.
        """
        sent = parts * sum(each[axis] for each in (cost.layer_bytes, cost.other_bytes) if axis in each)
        is_inside = axis == TENSOR or shape[axis] * shape[TENSOR] <= devices_each
        return sent / (link if is_inside else network)

    seconds = {
        # Weights of experts stay split along their axis, within a host, and are gathered only over the other axes.
        STORED: gathering(of_stage - of_experts, storing, inside)
        + gathering(of_experts / shape[EXPERT], storing // shape[EXPERT], inside // shape[EXPERT]),
        EXPERT: of_activations(EXPERT),
        CONTEXT: of_activations(CONTEXT),
        TENSOR: of_activations(TENSOR),
        DATA: _bytes_over_data(config, shape, parts, itemsize) * over_data / storing / network,
        PIPELINE: 2 * activation * _chunks(config, shape) / network,
    }
    return {axis: seconds[axis] for axis in seconds if axis == STORED or shape[axis] > 1}


def _bytes_over_data(config: Config, shape: Mapping[str, int], parts: int, itemsize: int) -> float:
    """Returns the bytes per parameter that are sent between data-parallel replicas in a step.

    The formulas are in the table of `param_sharding.py`.

    Args:
      config: the configuration.
      shape: mesh axis -> size.
      parts: number of microbatches.
      itemsize: bytes of an element in the compute dtype.
    """
    level = config.zero.effective_level
    if (sent := extensions.estimate(config, shape).sent_bytes) is not None:
        return sent
    if level > SCATTERS_EACH:
        return (GATHERS + SCATTERS) * itemsize * parts
    return FLOAT32_BYTES * (1 + (parts if level == SCATTERS_EACH else 1))
