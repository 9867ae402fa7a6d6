"""The sides of a comparison: a configuration computes gradients, a few steps and an evaluation on a mesh.

All sides start from the same seed and read the same examples. A side runs the programs with which `train` would train:
`assemble` makes them, and nothing is changed.
"""

import contextlib
import dataclasses
import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  gives NumPy the narrow dtypes, with `nextafter`
import numpy as np
from jax.experimental import multihost_utils

from meshtrain.assembly.assemble import Assembly, assemble
from meshtrain.assembly.computations import computations
from meshtrain.assembly.facts import kept_params
from meshtrain.config.schema import Config
from meshtrain.data.dataset import Dataset
from meshtrain.models.metrics import EXPERT_PARTS
from meshtrain.models.task import Batch, Params, Sums
from meshtrain.run.dataset import training_batches
from meshtrain.sharding.trees import Arrays, leaves_with_paths, merge, select
from meshtrain.step.precision import compute_dtype
from meshtrain.step.state import TrainState, step_key
from meshtrain.step.step import with_sequence_index

Leaves = Mapping[str, np.ndarray]  # path -> array on the host
_LLVM = "jax_disable_most_optimizations"


@dataclasses.dataclass(frozen=True)
class Side:
    """The results of a configuration on a mesh: host arrays by path, with stacked layers in layer order.

    Arrays of a narrower dtype than float32 are converted to float32, which is exact.

    Attributes:
      batches: `STEP/ENTRY` -> the global array of an entry of the batch of each step, from step 1.
      initial: the weights before the first step.
      sums: of the first batch: `loss/first batch`, `counts/weight`, `metrics/NAME`, and `evaluation/NAME`, which are
        the sums of an evaluation of the initial weights. Metrics that describe the mesh are left out.
      gradients: of the loss sum of the first batch, for the trained weights.
      losses: mean loss of each step.
      norms: gradient norm of each step, before clipping.
      final: the trained weights after the last step; empty without steps.
      unequal_shards: keys of `batches` and `initial` for which a device's shard differs from the global array.
      unequal_replicas: keys of `final` with different values of the same part on different devices.
    """

    batches: Leaves
    initial: Leaves
    sums: Leaves
    gradients: Leaves
    losses: Sequence[float] = ()
    norms: Sequence[float] = ()
    final: Leaves = dataclasses.field(default_factory=dict)
    unequal_shards: frozenset[str] = frozenset()
    unequal_replicas: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True)
class Programs:
    """The programs of a configuration on a mesh. Each is compiled at its first call.

    Attributes:
      assembly: the assembly, as `train` makes it.
      gradients: a function (state, batch) -> `Sums`: the first half of a training step.
    """

    assembly: Assembly
    gradients: jax.stages.Wrapped


def programs(config: Config, shape: Mapping[str, int], devices: Sequence[jax.Device]) -> Programs:
    """Returns the programs of a configuration on a mesh; allocates and compiles nothing.

    Args:
      config: the configuration.
      shape: mesh axis -> size.
      devices: at least as many devices as the mesh has.

    Raises:
      UserError: the configuration does not fit the mesh.
    """
    assembly = assemble(config, shape, devices)
    compute = computations(config, assembly.placed)

    def gradients(state: TrainState, batch: Batch) -> Sums:
        return compute.gradients(state.params, with_sequence_index(batch), step_key(state), jnp.float32(1))

    return Programs(assembly, jax.jit(gradients))


def run(compiled: Programs, dataset: Dataset, num_steps: int, *, nudges: bool = False) -> Side:
    """Computes a side.

    Args:
      compiled: the programs of the side.
      dataset: the data of the run.
      num_steps: training steps; 0: only gradients and an evaluation.
      nudges: whether to nudge the initial weights (`nudged`), for the yardstick.
    """
    assembly = compiled.assembly
    with _llvm_optimizes(True):  # otherwise equal operations in different programs may have other last bits
        state = assembly.steps.init(jax.random.key_data(jax.random.key(assembly.config.seed)))
    if nudges:
        state = assembly.extension.with_weights(state, _nudge(assembly, state.params))
    with _llvm_optimizes(assembly.mesh.devices.flat[0].platform != "cpu"):  # compiles in half of the time
        batches = list(itertools.islice(training_batches(assembly, dataset, 0), max(num_steps, 1)))
        before, unequal = _host(kept_params(assembly, state.params))
        entries = {f"{n}/{name}": leaf for n, batch in enumerate(batches, 1) for name, leaf in batch.items()}
        of_batches, misplaced = _host(entries)
        sums = compiled.gradients(state, batches[0])
        evaluation = assembly.steps.evaluate(state.params, batches[0])
        gradients, _ = _host(_in_layer_order(assembly, state.params, sums.gradients))
        losses, norms = list[float](), list[float]()
        for batch in batches[:num_steps]:
            state, metrics = assembly.steps.train(state, batch)
            losses.append(float(metrics["loss"]))
            norms.append(float(metrics["grad_norm"]))
        after, replicas = _host(kept_params(assembly, state.params)) if num_steps else ({}, set[str]())
    trained = {path: leaf for path, leaf in after.items() if path in gradients}
    return Side(
        of_batches, before, _sums(sums, evaluation), gradients, losses, norms, trained,
        frozenset(unequal | misplaced), frozenset(replicas),
    )  # fmt: skip


def nudged(leaf: np.ndarray, path: str, unit: np.dtype) -> np.ndarray:
    """Returns weights that differ from `leaf` by one unit in the last place, up or down at random; zeros stay zero.

    The random choice depends only on the path.

    Args:
      leaf: the weights, of any float dtype.
      path: the path of the leaf.
      unit: the dtype that determines the unit: the dtype of computations, or the dtype of `leaf` if it is narrower.
    """
    narrow = leaf.astype(min(np.dtype(unit), leaf.dtype, key=lambda dtype: dtype.itemsize))
    seed = int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "big")
    goes_up = np.random.default_rng(seed).random(leaf.shape) < 0.5
    target = np.where(goes_up, np.inf, -np.inf).astype(narrow.dtype)
    return np.where(leaf == 0, leaf, np.nextafter(narrow, target).astype(leaf.dtype))


def unit_of(config: Config) -> float:
    """Returns the unit in the last place of the compute dtype, relative to float32: 65536 for bfloat16."""
    return float(jnp.finfo(compute_dtype(config.precision)).eps / jnp.finfo(jnp.float32).eps)


def host_array(array: jax.Array) -> np.ndarray:
    """Returns the global array on the host; floats narrower than float32 become float32. All processes call it."""
    gathered = array if array.is_fully_addressable else multihost_utils.process_allgather(array, tiled=True)
    value = np.asarray(gathered)
    is_narrow = jnp.issubdtype(value.dtype, jnp.floating) and value.dtype.itemsize < 4
    return value.astype(np.float32) if is_narrow else value


def has_unequal_shards(array: jax.Array, global_array: np.ndarray) -> bool:
    """Returns whether a shard on a device of this process differs from its part of the global array by any bit.

    Args:
      array: the array; several devices may store copies of the same part.
      global_array: the result of `host_array`.
    """
    for shard in array.addressable_shards:
        part = np.ascontiguousarray(global_array[shard.index])
        if np.ascontiguousarray(np.asarray(shard.data).astype(global_array.dtype)).tobytes() != part.tobytes():
            return True
    return False


def _host(tree: Arrays) -> tuple[dict[str, np.ndarray], set[str]]:
    """Returns path -> global host array, and the paths for which a device's shard differs from it."""
    arrays, unequal = dict[str, np.ndarray](), set[str]()
    for path, leaf in leaves_with_paths(tree):
        arrays[path] = host_array(leaf)
        if has_unequal_shards(leaf, arrays[path]):
            unequal.add(path)
    return arrays, unequal


def _in_layer_order(assembly: Assembly, params: Params, gradients: Arrays) -> Arrays:
    """Returns the gradients of the trained weights with layers in layer order; frozen weights have None."""
    mask = assembly.placed.replicas.trained
    _, frozen = select(params, mask)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), frozen)
    trained, _ = select(kept_params(assembly, merge(gradients, zeros)), mask)
    return trained


def _sums(sums: Sums, evaluation: Arrays) -> dict[str, np.ndarray]:
    named = {"loss/first batch": sums.loss, "counts/weight": sums.weight}
    named |= {f"metrics/{path}": leaf for path, leaf in leaves_with_paths(sums.metrics)}
    named |= {f"evaluation/{path}": leaf for path, leaf in leaves_with_paths(evaluation)}
    return {name: host_array(leaf) for name, leaf in named.items() if EXPERT_PARTS not in name}


def _nudge(assembly: Assembly, params: Params) -> Params:
    """Returns nudged weights with the shardings of `params`."""
    unit = np.dtype(compute_dtype(assembly.config.precision))
    leaves = [
        jax.device_put(nudged(np.asarray(leaf), path, unit), leaf.sharding) for path, leaf in leaves_with_paths(params)
    ]
    return jax.tree.unflatten(jax.tree.structure(params), leaves)


@contextlib.contextmanager
def _llvm_optimizes(does: bool) -> Iterator[None]:
    """Compiles programs inside the block with or without LLVM's optimizations, which affect only last bits and time."""
    before = jax.config.read(_LLVM)
    jax.config.update(_LLVM, not does)
    try:
        yield
    finally:
        jax.config.update(_LLVM, before)
