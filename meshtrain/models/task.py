"""The contract between a model and the training program: a user's model is a `Task`.

B: sequences in the global batch, b: sequences in a microbatch, T: tokens per sequence, D: embed dim, K: layers in a
stack. For generation: R: rows (one text per row), P: tokens per prompt after padding, V: padded vocabulary.
"""

import collections
import dataclasses
import math
import numbers
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from meshtrain.errors import Problem, UserError, refuse
from meshtrain.models.cost import MakeCost, unknown
from meshtrain.models.metrics import Metrics, are_metrics, is_scalar
from meshtrain.models.metrics import Ratio as Ratio
from meshtrain.sharding.param_sharding import Names, is_names, params_with_axes
from meshtrain.sharding.trees import Arrays, Leaf, NamesTree, Tree, leaves_with_paths

Batch = Mapping[str, jax.Array]
Params: TypeAlias = Arrays  # nested dicts of arrays, which may be boxed with their logical axes
Cache: TypeAlias = Arrays  # a dict of arrays, as `Decode.cache` describes them
Activations: TypeAlias = Arrays  # the activations between layers: one array or a pytree of arrays, see `Stages`

Loss = tuple[jax.Array, jax.Array, Metrics]
# (auxiliary loss, metrics) that layers add to the loss sum and the metrics of a batch, float32; None: layers add
# neither.
LayerSums = tuple[jax.Array, Metrics] | None
AfterUpdate = Callable[[Params, Metrics], Params]

# The step adds this entry, int32 [B]: the index of each example in the global batch. Dropout masks depend on it, so
# they are the same on every mesh.
SEQUENCE_INDEX = "sequence_index"
LAYERS = "layers"  # the key of the stack of layers among parameters, and the logical axis along it
_SUMMED = (jnp.dtype(jnp.float32), jnp.dtype(jnp.int32))  # dtypes that can be summed over microbatches and replicas
# Names of the columns of a run's log; the task's unit and its rate are columns too. A metric with the name of a column
# would be lost.
TAKEN = (
    *("step", "loss", "weight", "grad_norm", "learning_rate", "loss_scale", "mfu", "model_flops_per_second"),
    *("skipped_steps", "skipped_in_a_row", "first_not_finite", "first_not_finite_layer", "processes", "slow_process"),
    *("first_step_seconds", "step_seconds", "data_seconds", "host_seconds", "device_wait_seconds", "data_share"),
    *("useful_seconds", "timed_steps", "goodput"),
)


class Sums(NamedTuple):
    """The loss, weight, metrics and gradients of a batch, each summed over the batch's targets.

    Attributes:
      loss: float32 scalar.
      weight: float32 scalar, the sum of the targets' weights; `loss / weight` is the mean loss.
      metrics: metric name -> float32 scalar or kind of metric (`metrics.py`).
      gradients: gradients of `loss`, with the structure of the parameters.
    """

    loss: jax.Array
    weight: jax.Array
    metrics: Metrics
    gradients: Params


@dataclasses.dataclass(frozen=True)
class Entry:
    """The description of one array of a batch or of a cache: its shape, its dtype and its logical axes.

    Attributes:
      shape: global shape; [B, ...] for an array of a batch.
      dtype: dtype of the elements.
      axes: a logical axis or None for each dim; in a batch the first is "batch". The activation rules map logical axes
        to mesh axes. A dim with None is not split.
      below: exclusive upper bound of the array's integers, which must be at least 0. Examples are the vocabulary size
        for token ids and the number of classes for labels. JAX clamps an index that is out of range, so training would
        silently use a wrong id. 0: any value is allowed.
    """

    shape: tuple[int, ...]
    dtype: DTypeLike
    axes: tuple[str | None, ...]
    below: int = 0


@dataclasses.dataclass(frozen=True)
class Stages:
    """A model split for a pipeline: its loss is `last(repeated(... repeated(first(batch))))`, plus the layers' losses.

    `loss_of_stages` builds `Task.loss` from the same functions. All stages run `first` and `last`, on the same values.
    If `axis` names a mesh axis, `first` and `last` may split their work over this axis with the collectives in
    `vocabulary.py`. If they ignore `axis`, every stage repeats the same work.

    Activations are one array or a pytree of arrays (dicts, tuples, registered dataclasses). Each leaf is sent from
    stage to stage. Gradients flow through floating-point leaves. Leaves of integers and bools are sent without a
    gradient.

    Attributes:
      num_layers: number of layers in the model, the leading dim of each leaf of `params["layers"]`. If a pipeline has
        padding layers, `repeated` gets zeros as their weights, and their results are dropped.
      first: (params without layers, batch, rng, train, axis) -> activations, such as [b, T, D].
      repeated: (layers with leading dim K, activations, batch, rng, index of the first layer, train) -> (activations,
        sums). Activations keep their structure, shapes and dtypes. `sums` is None, or (loss, metrics) summed over the K
        layers and the sequences of this batch. `loss` is an auxiliary loss such as the load balance of experts, already
        multiplied by its coefficient: a float32 scalar that is added to the loss sum of `last`. `metrics` is a dict of
        metrics (`metrics.py`) that are added to the metrics of `last`. Both are divided by the weight of `last`, like
        the loss, so multiply a mean over tokens by the number of targets. Both must be sums over sequences, otherwise
        the loss would depend on the number of microbatches.
      last: (params without layers, activations, batch, axis) -> (loss sum, weight, metrics), float32 scalars.
      logits: (params without layers, activations, axis) -> this stage's columns of `Task.logits`; None: the model has
        no logits.
      cast: layers -> layers in their compute dtypes. It runs once a step, and the copy takes memory during the step.
        None: `repeated` casts the layers, again for each microbatch.
      num_together: number of layers per call of `repeated` in a pipeline's training. It must divide the number of
        layers in a chunk (consecutive layers of one stage), and with padding layers also `num_layers`. The residuals
        that `jax.vjp` saves for a call are stored until the call's backward pass, except for residuals that do not
        depend on activations. `jax.checkpoint` inside `repeated` determines the recomputation in a custom model.
      with_stack: adds arrays of all layers of a stage to the layers that `repeated` gets in training. The arguments are
        (layers with leading dim K, all layers of the stage with leading dim N, int32 scalar: the index of the first of
        the K layers among the N), the result is layers. A library's kernel can read one layer directly in the added
        arrays, whereas XLA would copy a slice of a stack. The added arrays get no gradient. None: no arrays are added.
      loss_name: name of a training metric with the mean loss of `last`, without the auxiliary losses of layers, so that
        it is comparable with the loss of an evaluation. '': no metric. There is no metric either if `sums` is None.
    """

    num_layers: int
    first: Callable[..., Activations]
    repeated: Callable[..., tuple[Activations, LayerSums]]
    last: Callable[..., Loss]
    logits: Callable[..., jax.Array] | None = None
    cast: Callable[[Params], Params] | None = None
    num_together: int = 1
    with_stack: Callable[[Params, Params, jax.Array], Params] | None = None
    loss_name: str = ""


@dataclasses.dataclass(frozen=True)
class Decode:
    """Functions with which a task generates tokens. The same loop serves decoders and encoder-decoders.

    Every row has a separate prompt and position; the cache stores both. A decoder's prompt is the start of the text. An
    encoder-decoder's prompt is the source: `prefill` encodes the source, computes the keys and values of
    cross-attention once, and feeds the begin token of the target.

    Attributes:
      prefill: (params, tokens int32 [R, P], lengths int32 [R], cache) -> (logits float32 [R, V], cache). It reads the
        prompts into an empty cache. `tokens` are padded on the right with any legal id; row i has `lengths[i]` >= 1
        tokens. The logits are for each row's first new token, with padding of the vocabulary at minus infinity.
      step: (params, tokens int32 [R], cache) -> (logits float32 [R, V], cache). It appends one token to each row. The
        cache keeps its shapes and dtypes. A finished row may get any legal token.
      cache: (R, P, maximum number of calls of `step`) -> the cache's arrays as a dict from name to `Entry`, for prompts
        padded to P tokens. An empty cache has zeros in every array. The activation rules shard a cache, as they shard a
        batch.
      cast: params -> params in their compute dtypes, applied once before the loop; None: no cast.
      continues: whether the generated text continues the prompt. Then positions are counted through both, and both are
        shown together. False: the prompt is the source of an encoder-decoder.
      max_prompt: maximum number of tokens in a prompt; 0: any number within `max_positions`.
      max_positions: maximum number of positions, including the prompt if the text `continues` it; 0: any number.
      trained_positions: number of positions in a training sequence, counted like `max_positions`. Text beyond this
        position may be poor. 0: unknown.
    """

    prefill: Callable[[Params, jax.Array, jax.Array, Cache], tuple[jax.Array, Cache]]
    step: Callable[[Params, jax.Array, Cache], tuple[jax.Array, Cache]]
    cache: Callable[[int, int, int], Mapping[str, Entry]]
    cast: Callable[[Params], Params] | None = None
    continues: bool = True
    max_prompt: int = 0
    max_positions: int = 0
    trained_positions: int = 0


@dataclasses.dataclass(frozen=True)
class Task:
    """A model to train. Linen, NNX or plain functions can implement it.

    Attributes:
      init: rng -> params, a nested dict of float32 arrays. A leaf may be boxed with its logical axes
        (`meshtrain.Named`, a box of Linen, or a variable of NNX). On more than one device each leaf must be boxed.
      loss: (params, batch, rng, train) -> (sum over targets, weight, metrics), float32; the mean is sum / weight. A
        metric is also a sum, which is divided by the same weight before it is logged, or a kind of `metrics.py`.
      batch: name -> `Entry` of the global batch; see `token_batch`. A `jax.ShapeDtypeStruct` may replace an entry whose
        dims after the first are not split.
      logits: (params, batch) -> float32 [B, T, vocabulary], padding at minus infinity, for generation; None: the task
        generates no text. Without `decode` each new token takes one forward pass over a complete sequence.
      stages: the model split for a pipeline, with `params["layers"]` stacked; None: the task cannot run in a pipeline.
      decode: functions that generate tokens one after the other, with a cache; None: generation calls `logits`.
      flops_per_token: model FLOPs of one forward and backward pass for one unit (a token, an image); 0: unknown.
      attention_flops_per_token: the part of `flops_per_token` in the matmuls of full attention; a causal kernel
        computes half of it.
      num_parameters: number of parameters without padding; 0: all array elements are counted, including padding.
      num_active_parameters: number of parameters that process one token in a model with experts; 0: all parameters.
      cost: (size of each mesh axis, units of a microbatch that one device computes) -> `cost.Cost`, for `plan`: bytes
        sent and saved, and skipped work. These are unknown with the default. The arguments are plain numbers, not a
        mesh.
      attends_within_segments: whether the computation for a token depends only on tokens with the same segment id, so
        that several texts can be packed into one row.
      begin: params -> params, applied before the first step of a run that starts from another run's weights
        (`init_from`). It recomputes the weights that `init` derives from other weights, such as a copy of the initial
        weights. None: `init` derives no weights from others.
      after_update: (params, metrics) -> params, a change after each update of the optimizer, such as moving router
        biases against the load of experts; None: no change. It gets the updated parameters (trained parameters in
        float32), with layers in layer order, and the sums of the batch's metrics before any division. Changes of frozen
        weights are dropped, and so are all changes of a skipped step.
      takes_manual_axes: whether the model can be traced if the data axis is manual and other axes are not. If true,
        gradients are reduced over data once a step. If false, XLA's partitioner handles the data axis on meshes with
        fsdp or an axis after it, and reduces gradients once per microbatch. A plain `table[tokens]` in a sharded table
        requires false, because XLA's partitioner would abort the process; `vocabulary.look_up` allows true.
      width: width D of the residual stream, on which the learning rate `noam` depends; 0: unknown.
      vocab_size: exclusive upper bound of the data's token ids; 0: unknown, or there are no tokens.
      unit: the unit of throughput, in the plural: for `tokens`, metrics.jsonl has `tokens` and `tokens_per_second`.
      units_per_step: number of units in a global batch; 0: counted from the shapes of `batch`, see `num_units`.
      batch_text: text that states the size of a global batch; '': derived from the shapes of its entries.
      higher_is_better: names of metrics in `loss` for which a larger value is better; for the loss and other metrics a
        smaller value is better. `checkpoint.best_metric` uses it. Names that `loss` does not return are ignored.
    """

    init: Callable[[jax.Array], Params]
    loss: Callable[[Params, Batch, jax.Array, bool], Loss]
    batch: Mapping[str, Entry] | Mapping[str, jax.ShapeDtypeStruct]
    logits: Callable[[Params, Batch], jax.Array] | None = None
    stages: Stages | None = None
    decode: Decode | None = None
    flops_per_token: float = 0.0
    attention_flops_per_token: float = 0.0
    num_parameters: int = 0
    num_active_parameters: int = 0
    cost: MakeCost = unknown
    attends_within_segments: bool = False
    begin: Callable[[Params], Params] | None = None
    after_update: AfterUpdate | None = None
    takes_manual_axes: bool = False
    width: int = 0
    vocab_size: int = 0
    unit: str = "tokens"
    units_per_step: int = 0
    batch_text: str = ""
    higher_is_better: tuple[str, ...] = ("accuracy", "exact_match")

    @property
    def parameters_text(self) -> str:
        """The number of parameters as text, and the number of active parameters if it is smaller."""
        active = f", of which {self.num_active_parameters:,} are active" if self.num_active_parameters else ""
        return f"{self.num_parameters:,} parameters{active}"

    @property
    def num_units(self) -> int:
        """The number of units (such as tokens) in a global batch: `units_per_step`, or a count from shapes if it is 0.

        The count is B T if the unit is tokens and the batch has an entry `tokens` [B, T], and B otherwise.
        """
        if self.units_per_step:
            return self.units_per_step
        if self.unit == "tokens" and "tokens" in self.batch:
            return math.prod(self.batch["tokens"].shape)
        first: Any = next(iter(self.batch.values()))
        return int(first.shape[0])


_WORDS = {
    collections.abc.Callable: "a function", Mapping: "a dict", numbers.Real: "a number", str: "a text",
    tuple: "a tuple", list: "a list", types.NoneType: "None",
}  # fmt: skip


def kind_problems(task: Task) -> list[Problem]:
    """Returns an error line for each field of the task whose value has a wrong type, such as a text for a number."""
    lines = []
    for field in dataclasses.fields(task):
        value, kinds = getattr(task, field.name), _kinds(field.type)
        if isinstance(value, kinds):
            continue
        words = " or ".join(dict.fromkeys(_WORDS[kind] if kind in _WORDS else kind.__name__ for kind in kinds))
        fix = "Task(init, loss, batch)" if field.default is dataclasses.MISSING else "leave it out"
        lines.append(Problem(f"Task.{field.name}", got=type(value).__name__, allowed=words, nearest=fix))
    return lines


def _kinds(annotation: Any) -> tuple[type, ...]:
    """Returns the classes whose instances are allowed by `annotation`, the type annotation of a field."""
    if isinstance(annotation, types.UnionType):
        return tuple(kind for one in typing.get_args(annotation) for kind in _kinds(one))
    if annotation in (int, float):
        return (numbers.Real,)  # NumPy's too
    kind = typing.get_origin(annotation) or annotation
    return (tuple, list) if kind is tuple else (kind,)


def check_loss(loss: Callable[..., Tree], unit: str, where: str = "Task.loss") -> Callable[..., Loss]:
    """Wraps a loss function to check, while JAX traces it, that it returns scalars (sum, weight) and a dict of metrics.

    The returned function raises UserError if the result has a different structure, or if a metric has a reserved name.
    It also raises if a number is neither float32 nor int32, because its rounding would depend on mesh and microbatches.

    Args:
      loss: the function to check, such as `Task.loss`; it may take any arguments.
      unit: the task's unit, such as `tokens`; `tokens` and `tokens_per_second` are then reserved names.
      where: the function's name in error lines.
    """
    own = {*TAKEN, unit, f"{unit}_per_second"}

    def run(*given: Params | Batch | jax.Array | bool | str | None) -> Loss:
        returned = loss(*given)
        is_loss = isinstance(returned, tuple) and len(returned) == 3 and are_metrics(returned[2])
        is_loss = is_loss and all(map(is_scalar, returned[:2]))
        if not is_loss or not all(jnp.result_type(leaf) in _SUMMED for leaf in jax.tree.leaves(returned)):
            got = jax.tree.map(lambda leaf: f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}", returned)
            raise UserError(
                Problem(
                    where,
                    got=f"{got} returned",
                    allowed=(
                        "a tuple of the sum over targets, its weight and a dict of metrics, each a scalar of float32 "
                        "or int32, or a kind such as Ratio(sum, weight)"
                    ),
                    nearest="return loss.astype(jnp.float32).sum(), weights.sum(), {}",
                )
            )
        result: Loss = returned
        if taken := [name for name in result[2] if not isinstance(name, str) or name in own or name[:5] == "eval_"]:
            raise UserError(
                Problem(
                    where,
                    got=f"the metric {taken[0]!r}",
                    allowed="strings other than eval_... and the columns of every row, such as loss or step_seconds",
                    nearest=f"own_{taken[0]}",
                )
            )
        return result

    return run


def check_task(task: Task) -> Task:
    """Returns the task with `Task.loss` and `Stages.last` wrapped by `check_loss`, which checks their results."""
    stages = task.stages
    if stages:
        stages = dataclasses.replace(stages, last=check_loss(stages.last, task.unit, "Task.stages.last"))
    return dataclasses.replace(task, loss=check_loss(task.loss, task.unit), stages=stages)


def stack_problems(num_layers: int, params: Params, axes: NamesTree) -> list[Problem]:
    """Returns an error line for each weight in `params["layers"]` whose first dim is not the stack of all layers.

    A pipeline requires that each of these weights has the shape [num_layers, ...] and the first logical axis `layers`.

    Args:
      num_layers: number of layers, from `Stages.num_layers`.
      params: abstract parameters of the task, with layers in layer order.
      axes: logical axes of each parameter; None for a parameter without logical axes.
    """
    if LAYERS not in params:
        keys = ", ".join(map(str, params))
        return [
            Problem(
                "Task.stages",
                got=f"parameters with the keys {keys}",
                allowed=f"the parameters of the layers under the key '{LAYERS}'",
                nearest=f"{{'{LAYERS}': ..., ...}}",
            )
        ]
    leaves = leaves_with_paths(params[LAYERS])
    names = {path: (LAYERS,) for path, _ in leaves} | dict(leaves_with_paths(axes[LAYERS], is_leaf=is_names))
    return [
        Problem(
            "Task.stages",
            got=f"{LAYERS}/{path} of shape {leaf.shape} with axes {names[path]}, but num_layers = {num_layers}",
            allowed=f"{num_layers} as the first dim and '{LAYERS}' as its axis",
            nearest=f"{(num_layers, *leaf.shape[1:])} with axes {(LAYERS, *names[path][1:])}",
        )
        for path, leaf in leaves
        if (*leaf.shape[:1], *names[path][:1]) != (num_layers, LAYERS)
    ]


def refuse_weights(params: Params, trained: Params) -> None:
    """Checks that each weight of a task can be stored under a distinct name, and that trained weights have gradients.

    Args:
      params: abstract parameters of the task.
      trained: abstract parameters that the optimizer updates.

    Raises:
      UserError: has one line for each weight without elements, each pair of weights with the same name in a checkpoint,
        and each trained weight of integers.
    """
    problems, taken = list[Problem](), dict[str, str]()
    for path, leaf in leaves_with_paths(params):
        name = path.replace("/", ".")  # the name of the array in Orbax
        if other := taken.get(name):
            problems.append(
                Problem(
                    "parameters",
                    got=f"{other} and {path}, which have the same name in a checkpoint",
                    allowed="keys that differ without '.' and '/'",
                    nearest="'_' instead of them",
                )
            )
        taken[name] = path
        if leaf.size == 0:
            problems.append(
                Problem(
                    "parameters",
                    got=f"{path} of shape {leaf.shape}, without elements",
                    allowed="dims of at least 1",
                    nearest="leave it out",
                )
            )
    for path, leaf in leaves_with_paths(trained):
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            problems.append(
                Problem(
                    "parameters",
                    got=f"{path} of {leaf.dtype}, which has no gradient",
                    allowed="floats, or weights that optimizer.trainable freezes",
                    nearest="float32",
                    depends_on=["optimizer.trainable"],
                )
            )
    refuse(problems)


def check_after_update(after_update: AfterUpdate) -> AfterUpdate:
    """Wraps `Task.after_update` to check, while JAX traces it, that parameters keep their structure and shapes.

    The returned function raises UserError for the first parameter that is missing, is new, or has a different shape.
    """

    def checked(params: Params, metrics: Metrics) -> Params:
        after = after_update(params, metrics)
        wanted, got = ({path: jnp.shape(leaf) for path, leaf in leaves_with_paths(tree)} for tree in (params, after))
        if wanted == got:
            return after
        path = next(path for path in wanted | got if path not in wanted or path not in got or wanted[path] != got[path])
        has, gets = (str(shapes[path]) if path in shapes else "nothing" for shapes in (got, wanted))
        raise UserError(
            Problem(
                "Task.after_update",
                got=f"{has} for {path}",
                allowed=f"the structure of its argument, with {gets} there",
                nearest="return {**params, ...}",
            )
        )

    return checked


def with_layer_sums(loss: Loss, sums: LayerSums, loss_name: str) -> Loss:
    """Returns the loss and metrics of a batch, with the layers' auxiliary loss and metrics added.

    Metrics with the same name are added up.

    Args:
      loss: (loss sum, weight, metrics), returned by `Stages.last`.
      sums: (auxiliary loss, metrics), returned by `Stages.repeated`; None: `loss` is returned unchanged.
      loss_name: name of a metric for the loss sum without the auxiliary loss; '': no such metric.
    """
    if sums is None:
        return loss
    total, weight, metrics = loss
    addend, of_layers = sums
    metrics = {**metrics, **({loss_name: jax.lax.stop_gradient(total)} if loss_name else {})}
    both = {name: jax.tree.map(jnp.add, metrics[name], of_layers[name]) for name in metrics.keys() & of_layers.keys()}
    return total + addend, weight, {**metrics, **of_layers, **both}


def loss_of_stages(stages: Stages, casts_first: bool = False) -> Callable[[Params, Batch, jax.Array, bool], Loss]:
    """Builds `Task.loss` from the functions of `Stages`: all layers run in one call, with None for `axis`.

    If `casts_first` is true and `Stages.cast` is a function, training casts all layers before the first layer runs.
    """

    def loss(params: Params, batch: Batch, rng: jax.Array, train: bool) -> Loss:
        outer = {name: value for name, value in params.items() if name != LAYERS}
        x = stages.first(outer, batch, rng, train, None)
        layers = stages.cast(params[LAYERS]) if stages.cast and casts_first and train else params[LAYERS]
        y, sums = stages.repeated(layers, x, batch, rng, 0, train)
        return with_layer_sums(stages.last(outer, y, batch, None), sums, stages.loss_name)

    return loss


def token_batch(batch_size: int, sequence_length: int) -> dict[str, Entry]:
    """Returns `Task.batch` of a text model: the arrays of packed tokens, which the loader fills.

    B is `batch_size`, T is `sequence_length`. `tokens`, `targets`, `segment_ids` (0 is padding) and `positions` (within
    the document) are int32 [B, T]. `weights` are float32 [B, T]: 1 if the target is part of the loss, else 0.

    >>> {name: entry.shape for name, entry in token_batch(8, 128).items() if name != "positions"}
    {'tokens': (8, 128), 'targets': (8, 128), 'segment_ids': (8, 128), 'weights': (8, 128)}
    """
    shape, axes = (batch_size, sequence_length), ("batch", "sequence")
    ints, floats = Entry(shape, jnp.int32, axes), Entry(shape, jnp.float32, axes)
    return {"tokens": ints, "targets": ints, "segment_ids": ints, "positions": ints, "weights": floats}


def limits(task: Task) -> dict[str, int]:
    """Returns the exclusive upper bounds of the integers in a batch, as a dict from entry name to bound.

    A bound comes from `Entry.below`. Without it, the bound of `tokens` and `targets` is the task's vocabulary size, if
    the task states it. Entries without a bound are left out.
    """
    ids = {name: task.vocab_size for name in ("tokens", "targets") if name in task.batch and task.vocab_size}
    own = {name: entry.below for name, entry in task.batch.items() if isinstance(entry, Entry) and entry.below}
    return ids | own


def entries(task: Task, batch_size: int) -> dict[str, Entry]:
    """Returns the task's batch as a dict from name to `Entry`, after checking it.

    Args:
      task: the task whose batch and unit are checked. A `jax.ShapeDtypeStruct` in its batch becomes an entry with
        "batch" for the first dim and None for the other dims.
      batch_size: B, the required first dim of each entry.

    Raises:
      UserError: has one line for each problem. Each value must have a shape and a dtype. Its first dim must be B with
        the axis "batch", and each dim needs an axis or None. The name `SEQUENCE_INDEX` is reserved. The batch must not
        be empty, and the task's unit must be an identifier.
    """
    result, problems = dict[str, Entry](), list[Problem]()
    given: Tree = task.batch
    for name, leaf in given.items():
        if not (isinstance(name, str) and _is_shaped(leaf)):
            allowed = "strings as keys, and values with a shape and a dtype: Entry or jax.ShapeDtypeStruct"
            fix = f"{{'x': Entry(({batch_size},), jnp.float32, ('batch',))}}"
            problems.append(Problem("Task.batch", got=f"{{{name!r}: {leaf!r}}}", allowed=allowed, nearest=fix))
            continue
        axes = leaf.axes if isinstance(leaf, Entry) else ("batch", *(None,) * (len(leaf.shape) - 1))
        below = leaf.below if isinstance(leaf, Entry) else 0
        entry = result[name] = Entry(tuple(leaf.shape), leaf.dtype, tuple(axes), below)
        if entry.shape[:1] != (batch_size,) or entry.axes[:1] != ("batch",) or len(entry.axes) != len(entry.shape):
            others = (entry.axes[1:] + (None,) * len(entry.shape))[: max(len(entry.shape) - 1, 0)]
            fix = f"Entry({(batch_size, *entry.shape[1:])}, {jnp.dtype(entry.dtype).name}, {('batch', *others)})"
            examples = f"batch_size = {batch_size} examples as the first dim"
            problems.append(
                Problem(
                    f"Task.batch['{name}']",
                    got=f"shape {entry.shape}, axes {entry.axes}",
                    allowed=f"{examples}, 'batch' as the first axis, and an axis or None for each dim",
                    nearest=fix,
                )
            )
        if name == SEQUENCE_INDEX:
            got = "a name that the step uses for its own entry"
            problems.append(Problem(f"Task.batch['{name}']", got=got, allowed="any other name", nearest=f"'{name}s'"))
    if not task.unit.isidentifier():
        problems.append(Problem("Task.unit", got=f"'{task.unit}'", allowed="an identifier", nearest="images"))
    if not given:
        problems.append(Problem("Task.batch", got="no entry", allowed="at least one", nearest="token_batch(B, T)"))
    refuse(problems)
    return result


def _is_shaped(given: Leaf) -> bool:
    try:
        return isinstance(given.shape, tuple) and bool(jnp.dtype(given.dtype))
    except (AttributeError, TypeError):
        return False


def batch_axes(batch: Mapping[str, Entry]) -> dict[str, tuple[str | None, ...]]:
    """Returns the logical axes of each batch entry by name, including the sequence index that the step adds."""
    return {**{name: entry.axes for name, entry in batch.items()}, SEQUENCE_INDEX: ("batch",)}


def sequence_keys(rng: jax.Array, batch: Batch) -> jax.Array:
    """Returns one random key per sequence, [b]: `rng` with the sequence's index in the global batch folded in.

    Random numbers from these keys are the same on every mesh and with any number of microbatches. The indices are the
    batch's entry `SEQUENCE_INDEX`.
    """
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(rng, batch[SEQUENCE_INDEX])


def num_parameters(init: Callable[[jax.Array], Arrays], sizes: dict[str, int]) -> int:
    """Returns the number of a model's parameters without padding, computed from shapes without using a device.

    Args:
      init: rng -> parameters, each boxed with its logical axes.
      sizes: logical axis -> size without padding, for dims that are stored with padding, such as `vocab`.
    """
    params, axes = params_with_axes(init)

    def count(leaf: jax.ShapeDtypeStruct, names: Names) -> int:
        dims = zip(leaf.shape, names, strict=True)
        return math.prod(sizes[name] if name in sizes else size for size, name in dims)

    return sum(jax.tree.leaves(jax.tree.map(count, params, axes)))
