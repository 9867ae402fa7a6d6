"""The contract between a model and the rest: what a user brings to train something of their own.

B: sequences in the global batch, b: in a microbatch, T: tokens a sequence, D: embed dim, K: layers in a stage's chunk.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from meshtrain.words.errors import UserError

Batch = Mapping[str, jax.Array]
Params = Any
Metrics = Mapping[str, jax.Array]
Loss = tuple[jax.Array, jax.Array, Metrics]
# What layers add to the loss sum and to the metrics of their batch, float32 scalars; None for nothing.
LayerSums = tuple[jax.Array, Metrics] | None

# The step adds this entry, int32 [B]: the index of each example in the global batch, for dropout that no mesh changes.
SEQUENCE_INDEX = "sequence_index"


class Sums(NamedTuple):
    """Sums over the targets of a batch: float32 scalars, and gradients like the parameters."""

    loss: jax.Array
    weight: jax.Array
    metrics: Metrics
    gradients: Params


@dataclasses.dataclass(frozen=True)
class Entry:
    """One array of a batch: what examples have to fit, and how the mesh splits it.

    Attributes:
      shape: of the global batch's array, [B, ...].
      dtype: of its elements.
      axes: a logical axis or None for each dim, the first of them "batch"; the activation rules say which mesh axes
        split it, and None keeps a dim whole.
    """

    shape: tuple[int, ...]
    dtype: DTypeLike
    axes: tuple[str | None, ...]


@dataclasses.dataclass(frozen=True)
class Stages:
    """A model cut for a pipeline: its loss is `last(repeated(... repeated(first(batch))))`, plus the layers' sums.

    `staged_loss` makes `Task.loss` of the same functions. `first` and `last` are run by all stages, on the same values.
    Where `axis` names a mesh axis they may split their work over it (`losses.py` has the exchanges); a function that
    ignores it is computed by every stage.

    Activations are one array, or any pytree of arrays: dicts, tuples, dataclasses known to JAX. Each leaf travels from
    stage to stage; gradients flow through its floating leaves, integers and bools are only passed on.

    Attributes:
      num_layers: layers in the whole model, the leading dim of each leaf of `params["layers"]`.
      first: (params without layers, batch, rng, train, axis) -> activations, such as [b, T, D].
      repeated: (layers with leading dim K, activations, batch, rng, index of the first layer, train) -> (activations,
        sums). Activations keep their tree, shapes and dtypes. Sums are None, or (loss, metrics) summed over the K
        layers and the sequences of this batch: a float32 scalar that is added to the loss sum of `last` (an auxiliary
        loss such as the load balance of experts, already multiplied by its coefficient), and a dict of float32 scalars
        that are added to its metrics. They are divided by the weight of `last`, as the loss is, so that a mean over
        tokens has to be multiplied by the number of targets. Each sequence has to contribute by itself, or the loss
        depends on how the batch is cut.
      last: (params without layers, activations, batch, axis) -> (loss sum, weight, metrics), float32 scalars.
      logits: (params without layers, activations, axis) -> this stage's columns of `Task.logits`, or None.
      cast: layers -> layers in the dtypes in which they meet activations: once a step what `repeated` would do for each
        microbatch again, for room for a copy in that dtype. None: it is left to `repeated`.
    """

    num_layers: int
    first: Callable[..., Any]
    repeated: Callable[..., tuple[Any, LayerSums]]
    last: Callable[..., Loss]
    logits: Callable[..., jax.Array] | None = None
    cast: Callable[[Params], Params] | None = None


@dataclasses.dataclass(frozen=True)
class Task:
    """What is trained. Linen, NNX or plain functions all fit.

    Attributes:
      init: rng -> params, a nested dict of float32 arrays; a leaf may be boxed with its logical axes
        (`flax.linen.with_logical_partitioning`); on more than one device each has to be.
      loss: (params, batch, rng, train) -> (sum over targets, weight, metrics), float32; the mean is sum / weight.
        Metrics are sums too, divided by the same weight when they are shown.
      batch: name -> `Entry` of the global batch; see `token_batch`. A `jax.ShapeDtypeStruct` stands for an entry whose
        dims after the first are not split.
      logits: (params, batch) -> float32 [B, T, vocabulary], padding at minus infinity, for generation; None where it
        makes no sense.
      stages: the model cut for a pipeline, with `params["layers"]` stacked; None where it has no such form.
      flops_per_token: model FLOPs of one forward and backward pass for one unit (a token, an image); 0: unknown.
      attention_flops_per_token: of `flops_per_token`, the products of full attention; causal kernels do half of them.
      num_parameters: parameters without padding; 0: count them as they stand.
      takes_manual_axes: whether the model can be traced where the data axis is manual while fsdp or tensor are not, so
        that gradients cross the data axis once a step. A plain look-up in a split table cannot (XLA's partitioner ends
        the process there; `lookup.look_up` can): without this, the partitioner has the data axis on such meshes, and
        gradients cross it once a microbatch.
      width: of the residual stream (D): the learning rate `noam` is a function of it; 0: unknown.
      num_layers: layers, for estimates of memory and time; 0: unknown.
      vocab_size: every token id of the data is below it; 0: unknown, or there are no tokens.
      unit: what throughput counts, in the plural: metrics.jsonl has `tokens` and `tokens_per_second` for `tokens`.
      units_per_step: units in a global batch; 0: see `num_units`.
    """

    init: Callable[[jax.Array], Params]
    loss: Callable[[Params, Batch, jax.Array, bool], Loss]
    batch: Mapping[str, Entry] | Mapping[str, jax.ShapeDtypeStruct]
    logits: Callable[[Params, Batch], jax.Array] | None = None
    stages: Stages | None = None
    flops_per_token: float = 0.0
    attention_flops_per_token: float = 0.0
    num_parameters: int = 0
    takes_manual_axes: bool = False
    width: int = 0
    num_layers: int = 0
    vocab_size: int = 0
    unit: str = "tokens"
    units_per_step: int = 0

    @property
    def num_units(self) -> int:
        """Units in a global batch: `units_per_step`, or what the batch says where that is 0.

        That is B T where the batch has an entry `tokens` [B, T] and the unit is tokens, and B otherwise.
        """
        if self.units_per_step:
            return self.units_per_step
        if self.unit == "tokens" and "tokens" in self.batch:
            return math.prod(self.batch["tokens"].shape)
        first: Any = next(iter(self.batch.values()))
        return int(first.shape[0])


def checked_loss(loss: Callable[..., Any]) -> Callable[..., Loss]:
    """Returns a loss function that, when it is traced, refuses to return anything but (sum, weight, metrics).

    Args:
      loss: (params, batch, rng, train) -> what its author returns.
    """

    def checked(*given: Any) -> Loss:
        returned = loss(*given)
        sums = returned if isinstance(returned, tuple) and len(returned) == 3 else ()
        if sums and isinstance(sums[2], Mapping) and all(jnp.shape(leaf) == () for leaf in jax.tree.leaves(sums)):
            result: Loss = sums
            return result
        got = jax.tree.map(lambda leaf: f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}", returned)
        raise UserError(
            f"Task.loss: got {got} returned; allowed: a tuple of the sum over targets, its weight and a dict of "
            "metrics, all scalars; nearest: return loss.sum(), weights.sum(), {}"
        )

    return checked


def with_layer_sums(loss: Loss, sums: LayerSums) -> Loss:
    """Returns the sums of a batch with those of its layers added; metrics of the same name are added up."""
    if sums is None:
        return loss
    total, weight, metrics = loss
    addend, of_layers = sums
    both = {name: metrics[name] + of_layers[name] for name in metrics.keys() & of_layers.keys()}
    return total + addend, weight, {**metrics, **of_layers, **both}


def staged_loss(stages: Stages) -> Callable[[Params, Batch, jax.Array, bool], Loss]:
    """Returns `Task.loss` of a model that is cut into stages: all layers in one call, nothing split over `axis`."""

    def loss(params: Params, batch: Batch, rng: jax.Array, train: bool) -> Loss:
        outer = {name: value for name, value in params.items() if name != "layers"}
        x = stages.first(outer, batch, rng, train, None)
        y, sums = stages.repeated(params["layers"], x, batch, rng, 0, train)
        return with_layer_sums(stages.last(outer, y, batch, None), sums)

    return loss


def token_batch(batch_size: int, sequence_length: int) -> dict[str, Entry]:
    """Returns the batch of packed tokens, as the loader fills it: `Task.batch` of any model of text.

    tokens, targets, segment_ids (0 is padding) and positions (in its document) are int32 [B, T]; weights are
    float32 [B, T], 1 where the target counts.
    """
    shape, axes = (batch_size, sequence_length), ("batch", "sequence")
    ints, floats = Entry(shape, jnp.int32, axes), Entry(shape, jnp.float32, axes)
    return {"tokens": ints, "targets": ints, "segment_ids": ints, "positions": ints, "weights": floats}


def entries(task: Task, batch_size: int) -> dict[str, Entry]:
    """Returns the task's batch with an `Entry` for each name.

    Args:
      task: whose batch; its `jax.ShapeDtypeStruct`s become entries that are split over their first dim alone.
      batch_size: B, the examples that a global batch has to have.

    Raises:
      UserError: one line for each entry whose first dim is not the batch of B examples, whose axes are not one for
        each dim, or that has the step's own name; or there is no entry at all.
    """
    found, problems = dict[str, Entry](), list[str]()
    for name, leaf in task.batch.items():
        axes = leaf.axes if isinstance(leaf, Entry) else ("batch", *(None,) * (len(leaf.shape) - 1))
        entry = found[name] = Entry(tuple(leaf.shape), leaf.dtype, tuple(axes))
        if entry.shape[:1] != (batch_size,) or entry.axes[:1] != ("batch",) or len(entry.axes) != len(entry.shape):
            others = (entry.axes[1:] + (None,) * len(entry.shape))[: max(len(entry.shape) - 1, 0)]
            problems.append(
                f"Task.batch['{name}']: got shape {entry.shape}, axes {entry.axes}; allowed: batch_size = {batch_size} "
                f"examples as the first dim, 'batch' as the first axis, and an axis or None for each dim; nearest: "
                f"Entry({(batch_size, *entry.shape[1:])}, {jnp.dtype(entry.dtype).name}, {('batch', *others)})"
            )
        if name == SEQUENCE_INDEX:
            problems.append(
                f"Task.batch['{name}']: got the name of the entry that the step adds; allowed: any other; nearest: "
                f"'{name}s'"
            )
    if not task.unit.isidentifier():
        problems.append(f"Task.unit: got '{task.unit}'; allowed: a word that names a value; nearest: images")
    if not found:
        problems.append("Task.batch: got no entry; allowed: at least one; nearest: token_batch(B, T)")
    if problems:
        raise UserError(*problems)
    return found


def batch_axes(batch: Mapping[str, Entry]) -> dict[str, tuple[str | None, ...]]:
    """Returns the logical axes of each entry that a step sees, the index of each sequence among them."""
    return {**{name: entry.axes for name, entry in batch.items()}, SEQUENCE_INDEX: ("batch",)}


def sequence_keys(rng: jax.Array, batch: Batch) -> jax.Array:
    """Returns one key for each sequence, keys [b]: folds in the index in the global batch.

    Random numbers drawn from these keys depend on neither mesh, microbatches nor manual axes.
    """
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(rng, batch[SEQUENCE_INDEX])
