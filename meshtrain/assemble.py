"""Config and devices -> everything that a run is made of, from shapes alone. No array is made here.

config -> mesh -> task (abstract) -> placements -> sharded init -> step
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.core import meta
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshtrain.config import Config, num_microbatches
from meshtrain.errors import UserError
from meshtrain.layout import partition, zero
from meshtrain.layout.explain import Row, rows
from meshtrain.layout.mesh import make_mesh
from meshtrain.layout.placement import Placement
from meshtrain.layout.replicas import Home, Replicas
from meshtrain.layout.rules import Rules, default_rules
from meshtrain.models.decoder_task import decoder
from meshtrain.models.task import Batch, Params, Task
from meshtrain.optim.learning_rate import learning_rate
from meshtrain.optim.optimizers import optimizer, state_axes
from meshtrain.pipeline import executor, storage
from meshtrain.pipeline.program import Program, executable
from meshtrain.pipeline.table import chosen
from meshtrain.step.accumulate import Gradients, accumulated, cut, summed
from meshtrain.step.precision import compute_dtype
from meshtrain.step.state import TrainState, init_state
from meshtrain.step.step import eval_step, train_step, with_sequence_index

# (config, placement) -> task: the built-in decoder, or a model of one's own.
MakeTask = Callable[[Config, Placement], Task]


@dataclasses.dataclass(frozen=True)
class Assembly:
    """What `assemble` decided; no arrays in it.

    Attributes:
      config: the configuration.
      mesh: the mesh, axes in mesh order.
      rules: logical axis -> mesh axes.
      task: what is trained.
      program: the pipeline's schedule, None on a pipeline of size 1.
      state: abstract `TrainState`, each leaf a `jax.ShapeDtypeStruct` with its sharding.
      kept_state: the same with layers in layer order, as checkpoints hold it.
      batch: abstract batch, likewise.
      names: logical axes of each leaf of `state`, in the order of `jax.tree.leaves`.
      init: uint32 key data -> state, jitted, each array born where it lives.
      train_step: (state, batch) -> (state, metrics), jitted, the state donated.
      eval_step: (params, batch) -> sums, jitted.
      logits: (params, batch) -> float32 [B, T, vocabulary], jitted; None where the task has none.
      to_kept: state -> kept_state, and `from_kept` back, jitted; the identity but for interleaved schedules.
    """

    config: Config
    mesh: Mesh
    rules: Rules
    task: Task
    program: Program | None
    state: TrainState
    kept_state: TrainState
    batch: Mapping[str, jax.ShapeDtypeStruct]
    names: list[tuple[str | None, ...]]
    init: Callable[[jax.Array], TrainState]
    train_step: Any
    eval_step: Any
    logits: Callable[[Params, Batch], jax.Array] | None
    to_kept: Callable[[TrainState], TrainState]
    from_kept: Callable[[TrainState], TrainState]


def assemble(
    config: Config,
    shape: Mapping[str, int],
    devices: Sequence[jax.Device],
    make_task: MakeTask | None = None,
    rules: Rules | None = None,
) -> Assembly:
    """Decides where everything lives and what a step is.

    Args:
      config: a checked configuration.
      shape: the size of each mesh axis, -1 filled in.
      devices: as many as the mesh has, there or not.
      make_task: a model of one's own, None for the built-in decoder.
      rules: logical axis -> mesh axes, None for the built-in table.

    Raises:
      UserError: what cannot be placed, or a task that cannot be cut into stages.
    """
    mesh = make_mesh(shape, devices)
    rules = rules or default_rules(config.layout)
    placement = Placement(rules, mesh)
    task = (make_task or built_in)(config, placement)
    program = pipeline_program(config, shape)
    num_chunks = program.schedule.num_chunks if program else 1

    params, axes = _abstract_params(task, num_chunks, mesh.size)
    level = config.zero.effective_level
    replicas = _replicas(params, axes, partition.placements(params, axes, rules, mesh), mesh, level)
    num_parameters = task.num_parameters or sum(leaf.size for leaf in jax.tree.leaves(params))
    task = dataclasses.replace(task, num_parameters=num_parameters)
    schedule_of_rates = learning_rate(
        config.learning_rate,
        num_steps=config.num_steps,
        embed_dim=config.model.embed_dim,
        batch_size=config.batch_size,
    )
    transformation = optimizer(config.optimizer, schedule_of_rates, axes)

    def init(key_data: jax.Array) -> TrainState:
        rng = jax.random.wrap_key_data(key_data)
        params = meta.unbox(task.init(jax.random.fold_in(rng, 0)))
        return init_state(_stored(params, num_chunks), transformation, jax.random.fold_in(rng, 1))

    abstract = jax.eval_shape(init, jax.random.key_data(jax.random.key(0)))
    names = _state_names(abstract, transformation, params, axes)
    state = _placed(abstract, names, rules, mesh, level)
    in_layer_order = [storage.layer_order_names(n) for n in names]
    kept = _placed(_in_layer_order(abstract, names), in_layer_order, rules, mesh, level)
    batch = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=_batch_sharding(name, leaf, rules, mesh))
        for name, leaf in task.batch.items()
    }
    gradients, evaluate, logits = _computations(config, task, program, placement, replicas, shape)
    step = train_step(gradients, transformation, schedule_of_rates, config.optimizer.clip_norm, config.guard)
    whole = NamedSharding(mesh, PartitionSpec())
    homes = _shardings(state)
    return Assembly(
        config=config,
        mesh=mesh,
        rules=rules,
        task=task,
        program=program,
        state=state,
        kept_state=kept,
        batch=batch,
        names=names,
        init=jax.jit(init, out_shardings=homes),
        train_step=jax.jit(step, donate_argnums=0, out_shardings=(homes, whole)),
        eval_step=jax.jit(eval_step(evaluate), out_shardings=whole),
        logits=jax.jit(logits, out_shardings=whole) if logits else None,
        to_kept=_reshaper(state, kept),
        from_kept=_reshaper(kept, state),
    )


def built_in(config: Config, placement: Placement) -> Task:
    """Returns the decoder that a configuration describes."""
    return decoder(
        config.model,
        batch_size=config.batch_size,
        sequence_length=config.sequence_length,
        dtype=compute_dtype(config.precision),
        remat=config.remat.policy,
        placement=placement,
    )


def pipeline_program(config: Config, shape: Mapping[str, int]) -> Program | None:
    """Returns the schedule, proven and ready to run; None on a pipeline of size 1."""
    if shape["pipeline"] == 1:
        return None
    parts = num_microbatches(config, shape)
    return executable(chosen(config.pipeline, num_stages=shape["pipeline"], num_microbatches=parts))


def array_rows(assembly: Assembly) -> list[Row]:
    """Returns a row for each array of the state, for `layout.txt` and `explain`; layers as they are stored."""
    leaves = dict(zip(map(str, range(len(assembly.names))), assembly.names, strict=True))
    names = jax.tree.unflatten(jax.tree.structure(assembly.state), leaves.values())
    return rows(assembly.state, names, _shardings(assembly.state))


def stored_params(assembly: Assembly, kept_params: Params) -> Params:
    """Returns parameters in layer order (as checkpoints hold them) as the step wants them."""
    return _reshaper(assembly.kept_state.params, assembly.state.params)(kept_params)


def _abstract_params(task: Task, num_chunks: int, num_devices: int) -> tuple[Any, Any]:
    """Returns abstract parameters as they are stored, and their logical axes; a bare leaf has none (None)."""
    boxed = jax.eval_shape(task.init, jax.random.key(0))
    is_box = lambda leaf: isinstance(leaf, meta.AxisMetadata)  # noqa: E731

    def names(leaf: Any) -> tuple[str | None, ...] | None:
        if is_box(leaf):
            return tuple(leaf.names)
        return (None,) * leaf.ndim if num_devices == 1 else None

    params, axes = meta.unbox(boxed), jax.tree.map(names, boxed, is_leaf=is_box)
    if num_chunks > 1:
        chunked = lambda leaf: storage.chunked_names(leaf, num_chunks)  # noqa: E731
        axes = {**axes, "layers": jax.tree.map(chunked, axes["layers"], is_leaf=partition.is_names)}
    return jax.eval_shape(
        lambda: _stored(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), params), num_chunks)
    ), axes


def _stored(params: Params, num_chunks: int) -> Params:
    return params if num_chunks == 1 else {**params, "layers": storage.chunked(params["layers"], num_chunks)}


def _state_names(
    abstract: TrainState, transformation: optax.GradientTransformation, params: Any, axes: Any
) -> list[tuple[str | None, ...]]:
    """Returns the logical axes of each leaf of the state."""
    of_params = jax.tree.leaves(axes, is_leaf=partition.is_names)
    of_optimizer = state_axes(transformation, params, axes)
    whole: list[tuple[str | None, ...]] = [(None,) * abstract.step.ndim]
    rest = jax.tree.leaves((abstract.rng, abstract.skipped))
    return whole + of_params + of_optimizer + [(None,) * leaf.ndim for leaf in rest]


def _replicas(params: Params, axes: Any, shardings: Any, mesh: Mesh, level: int) -> Replicas:
    """Returns how the replicas of the data axis share out these parameters' gradients."""

    def home(leaf: Any, names: tuple[str | None, ...], sharding: NamedSharding) -> Home:
        dim = zero.dim_over_data(sharding.spec, leaf.shape, names, mesh.shape)
        spec = zero.over_data(sharding.spec, leaf.ndim, dim) if level == zero.MAX_LEVEL else sharding.spec
        return Home(spec, leaf.ndim, dim)

    return Replicas(mesh, jax.tree.map(home, params, axes, shardings), level)


def _placed(
    abstract: TrainState, names: list[tuple[str | None, ...]], rules: Rules, mesh: Mesh, level: int
) -> TrainState:
    """Returns the abstract state with a sharding on each leaf."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(abstract)
    placed = []
    problems: list[str] = []
    for (path, leaf), axes in zip(leaves, names, strict=True):
        text = jax.tree_util.keystr(path, simple=True, separator="/")
        found = partition.problems(text, leaf.shape, axes, rules.parameters, mesh.shape)
        problems += found
        if not found:
            spec = partition.spec(text, leaf.shape, axes, rules.parameters, mesh.shape)
            if path[0].name in zero.SPLIT_FROM and level >= zero.SPLIT_FROM[path[0].name]:
                dim = zero.dim_over_data(spec, leaf.shape, axes, mesh.shape)
                spec = zero.over_data(spec, leaf.ndim, dim)
            placed.append(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)))
    if problems:
        raise UserError(*problems)
    return jax.tree.unflatten(structure, placed)


def _in_layer_order(abstract: TrainState, names: list[tuple[str | None, ...]]) -> TrainState:
    leaves, structure = jax.tree.flatten(abstract)
    shapes = [storage.layer_order_shape(leaf.shape, axes) for leaf, axes in zip(leaves, names, strict=True)]
    kept = [jax.ShapeDtypeStruct(shape, leaf.dtype) for shape, leaf in zip(shapes, leaves, strict=True)]
    return jax.tree.unflatten(structure, kept)


def _shardings(abstract: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.sharding, abstract)


def _reshaper(before: Any, after: Any) -> Callable[[Any], Any]:
    """Returns the function from one storage to the other, which costs nothing where they are the same."""
    if jax.tree.map(lambda x: x.shape, before) == jax.tree.map(lambda x: x.shape, after):
        return lambda state: state
    reshape = lambda tree: jax.tree.map(lambda x, like: x.reshape(like.shape), tree, after)  # noqa: E731
    return jax.jit(reshape, out_shardings=_shardings(after))


def _batch_sharding(name: str, leaf: jax.ShapeDtypeStruct, rules: Rules, mesh: Mesh) -> NamedSharding:
    names = ("batch", *(None,) * (leaf.ndim - 1))
    return partition.activation_sharding(leaf.shape, names, rules, mesh, path=f"batch/{name}")


def _computations(
    config: Config,
    task: Task,
    program: Program | None,
    placement: Placement,
    replicas: Replicas,
    shape: Mapping[str, int],
) -> tuple[Gradients, Any, Any]:
    """Returns (gradients, evaluation, logits) of a batch: through the pipeline, or microbatch after microbatch."""
    num_parts, mesh = num_microbatches(config, shape), placement.mesh
    if program is None or mesh is None:
        whole = task.logits
        plain = whole and (lambda params, batch: whole(params, with_sequence_index(batch)))
        whole_step = accumulated(task.loss, num_parts, placement, replicas)
        return whole_step, summed(task.loss, num_parts, placement), plain
    stages = task.stages
    if stages is None:
        raise UserError(
            f"mesh.pipeline: got {shape['pipeline']}, and this task has no stages; allowed: 1; nearest: mesh.pipeline=1"
        )
    specs, num_chunks = replicas.specs, program.schedule.num_chunks

    def gradients(params: Params, batch: Batch, rng: jax.Array) -> Any:
        return executor.gradients(stages, program, replicas, params, cut(batch, num_parts, placement), rng)

    def evaluate(params: Params, batch: Batch, rng: jax.Array) -> Any:
        return executor.evaluate(stages, num_chunks, mesh, specs, params, cut(batch, num_parts, placement), rng)

    def logits(params: Params, batch: Batch) -> jax.Array:
        one = cut(with_sequence_index(batch), 1, placement)
        return executor.logits(stages, num_chunks, mesh, specs, params, one)[0]

    return gradients, evaluate, logits if stages.logits else None
