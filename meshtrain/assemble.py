"""Config and devices -> mesh, task, shardings and compiled functions of a run, from shapes alone, without any array.

config -> mesh -> task (abstract) -> placements -> sharded init -> step
"""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import optax
from flax.core import meta
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshtrain.config import reductions
from meshtrain.config.fields import Config
from meshtrain.config.mesh_checks import check_filled, num_microbatches, units_on_device
from meshtrain.config.tasks import MakeTask, made
from meshtrain.config.tasks import names as task_names
from meshtrain.errors import Problem, UserError, refuse
from meshtrain.hardware.accelerators import find as find_accelerator
from meshtrain.hardware.accelerators import peak_flops_per_second
from meshtrain.hardware.compiler_options import CompilerOption, init_compiler_options, options_of
from meshtrain.launch import peers
from meshtrain.models.cost import Cost
from meshtrain.models.remat import gathers_early
from meshtrain.models.task import (
    Batch,
    Entry,
    Loss,
    Params,
    Sums,
    Task,
    batch_axes,
    checked,
    entries,
    refuse_weights,
)
from meshtrain.observe.throughput import Throughput
from meshtrain.optim.learning_rate import NAMES as RATES
from meshtrain.optim.learning_rate import Schedule, learning_rate
from meshtrain.optim.optimizers import NAMES, optimizer
from meshtrain.pipeline import executor, forward
from meshtrain.pipeline.program import Program, executable, worth_reducing_early
from meshtrain.pipeline.schedules import chosen
from meshtrain.pipeline.stages import Stack, stack_of
from meshtrain.sharding import offload
from meshtrain.sharding.gradients import Replicas
from meshtrain.sharding.mesh import make_mesh
from meshtrain.sharding.placement import Placement
from meshtrain.sharding.placement_text import Row, rows
from meshtrain.sharding.reduction import SUM
from meshtrain.sharding.ring import wire_share
from meshtrain.sharding.rules import DATA, EXPERT, PIPELINE, Rules, default_rules, partitioned_axes
from meshtrain.sharding.stored import (
    MAX_LEVEL,
    Names,
    activation_sharding,
    axes_in,
    is_names,
    named_params,
    num_parts,
    rules_of_level,
    stored_tree,
)
from meshtrain.sharding.trainable import trained_mask
from meshtrain.sharding.trees import NamesTree, Shardings, leaves_with_paths, select
from meshtrain.step import health, loss_scale
from meshtrain.step.accumulate import Axes, Gradients, accumulated, cut, summed
from meshtrain.step.precision import as_stored, compute_name, in_fp8, product_name, reduce_dtype
from meshtrain.step.shardings import (
    abstract_metrics,
    abstract_params,
    after_update_of,
    axes_of_fields,
    axes_of_leaves,
    layer_bytes,
    placed_states,
    reshaper,
    shardings,
    splits_masters,
    stacked,
)
from meshtrain.step.state import TrainState, init_state
from meshtrain.step.step import Apart, Update, WeightUpdate, eval_step, train_step, with_sequence_index

REFERENCE = "NVIDIA H100 80GB HBM3"  # the device whose rates stand for those that are not known

OuterStep: TypeAlias = Any  # state -> state, jitted or compiled; None without groups that train apart
TracedSteps = tuple[jax.stages.Traced, jax.stages.Traced | None]


@dataclasses.dataclass(frozen=True)
class Assembly:
    """The result of `assemble`. It has no arrays.

    Attributes:
      config: the configuration.
      mesh: the mesh, axes in mesh order.
      rules: logical axis -> mesh axes, with the storage axes of the ZeRO level.
      replicas: how gradients are summed over microbatches and reduced over data.
      apart: the functions of groups that train apart; None for one model.
      task: what is trained.
      program: the pipeline's schedule as tables for the executor; None on a pipeline of size 1.
      state: abstract `TrainState`, each leaf a `jax.ShapeDtypeStruct` with its sharding.
      kept_state: the same with layers in layer order, as checkpoints store it.
      batch: the abstract global batch, each entry with its sharding.
      names: logical axes of each leaf of `state`, in the order of `jax.tree.leaves`.
      layer_bytes: of the gradients of one layer that a device reduces over data inside the backward loop; 0: none.
      gathers_early: whether XLA may gather in one layer's turn of a loop for the next layer.
      options: the devices' compiler options, with which `train_step` and `outer_step` are jitted.
      init: uint32 key data -> state, jitted; each array is created with its sharding.
      train_step: (state, batch) -> (state, metrics), jitted; donates the state.
      outer_step: state -> state, jitted likewise: joins groups that train apart, every `local_steps.period` steps; None
        without groups.
      eval_step: (params, batch) -> sums, jitted.
      logits: (params, batch) -> float32 [B, T, vocabulary], jitted; None where the task has none.
      to_kept: a state like `state` -> one like `kept_state`, jitted; the identity where their shapes are the same.
      from_kept: the inverse of `to_kept`.
    """

    config: Config
    mesh: Mesh
    rules: Rules
    replicas: Replicas
    apart: Apart | None
    task: Task
    program: Program | None
    state: TrainState
    kept_state: TrainState
    batch: Mapping[str, jax.ShapeDtypeStruct]
    names: list[Names]
    layer_bytes: int
    gathers_early: bool
    options: tuple[CompilerOption, ...]
    init: jax.stages.Wrapped
    train_step: jax.stages.Wrapped
    outer_step: OuterStep
    eval_step: jax.stages.Wrapped
    logits: Callable[[Params, Batch], jax.Array] | None
    to_kept: Callable[[TrainState], TrainState]
    from_kept: Callable[[TrainState], TrainState]

    @property
    def stack(self) -> Stack | None:
        """How a pipeline stacks the layers in memory; None without a pipeline."""
        return stack_of(self.task.stages, self.mesh.shape[PIPELINE], self.config.pipeline.num_chunks)

    @property
    def cost(self) -> Cost:
        """What a microbatch costs a device, by the task's own formulas."""
        shape = dict(self.mesh.shape)
        units = units_on_device(self.config, self.task, self.rules, shape) / num_microbatches(self.config, shape)
        return self.task.cost(shape, units)


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
      config: from `resolve`.
      shape: the size of each mesh axis, -1 filled in.
      devices: at least as many as the mesh has, real or ahead-of-time.
      make_task: a task function; None for the one that `config.task` names.
      rules: logical axis -> mesh axes, None for the built-in table.
      also: problems found elsewhere, to be reported together with those found here.

    Raises:
      UserError: `also`, arrays that cannot be sharded as configured, a batch or loss that breaks the contract of
        `Task`, or a pipeline with a task without stages.
    """
    refuse([*check_filled(config, shape, make_task, rules), *also, *_offload_problems(config, devices)])
    mesh = make_mesh(shape, devices)
    rules = rules_of_level(rules or default_rules(config.layout), config.zero.effective_level)
    placement = Placement(rules, mesh, config.zero.keeps_gathered, in_fp8(config.precision))
    task = checked(made(config, placement, make_task))
    return _on_mesh(config, task, pipeline_program(config, shape), placement, rules, mesh)


def _offload_problems(config: Config, devices: Sequence[jax.Device]) -> list[Problem]:
    asked = {"offload.moments=True": config.offload.moments, "remat.policy=offload": config.remat.policy == "offload"}
    return [line for what, is_asked in asked.items() if is_asked for line in offload.problems(what, devices)]


def _on_mesh(
    config: Config, task: Task, program: Program | None, placement: Placement, rules: Rules, mesh: Mesh
) -> Assembly:
    """Returns the state of a task, its shardings and its functions, all abstract."""
    batch = entries(task, config.batch_size)
    stack = stack_of(task.stages, mesh.shape[PIPELINE], config.pipeline.num_chunks)
    params, axes = abstract_params(task, stack, mesh.size)
    num_parameters = task.num_parameters or sum(leaf.size for leaf in jax.tree.leaves(named_params(task.init)[0]))
    task = dataclasses.replace(task, num_parameters=num_parameters)
    replicas = _replicas(config, task, params, axes, rules, mesh)
    refuse_weights(params, select(params, replicas.trained)[0])
    make_apart = reductions.apart(config)
    apart: Apart | None = make_apart and make_apart(config, replicas, placement, batch_axes(batch))
    replicas = apart.replicas if apart else replicas
    program = program and _with_reductions(config, task, program, layer_bytes(params, axes, replicas, 1), mesh)

    rates, scaling = learning_rates(config, task), loss_scaling(config, task)
    transformation = optimizer(config.optimizer, rates, select(axes, replicas.trained)[0])
    init = _initializer(config, task, axes, replicas, apart, transformation, scaling, stack)
    abstract = jax.eval_shape(lambda: init(jax.random.key_data(jax.random.key(0))))
    of_fields = axes_of_fields(abstract, transformation, params, axes, replicas.trained)
    of_fields = apart.axes_of_fields(of_fields, abstract, params, axes) if apart else of_fields
    names = axes_of_leaves(abstract, of_fields)
    split = splits_masters(task, config.precision, replicas.level, mesh.shape, replicas.trained)
    state, kept = placed_states(
        abstract, names, rules, replicas, stack, moments_on_host=config.offload.moments, masters_are_split=split
    )
    state_shardings = shardings(state)
    replicated = NamedSharding(mesh, PartitionSpec())

    gradients, evaluate, logits = _computations(config, task, program, placement, replicas, mesh, batch_axes(batch))
    update = _update(config, task, transformation, rates, scaling, state_shardings, replicas, axes, stack)
    step = (apart.step if apart else train_step)(gradients, update, scaling)
    bytes_of_layer = 0 if program else layer_bytes(params, axes, replicas, config.remat.every)
    early = gathers_early(config.remat, placement, splits_sequence=config.layout.sequence_parallel)
    options = _options(config, program, placement, replicas, params, axes, bytes_of_layer, gathers_early=early)
    jitted = functools.partial(jax.jit, donate_argnums=0, compiler_options={one.name: one.value for one in options})
    return Assembly(
        config=config,
        mesh=mesh,
        rules=rules,
        replicas=replicas,
        apart=apart,
        task=task,
        program=program,
        state=state,
        kept_state=kept,
        batch=placed_batch(batch, rules, mesh),
        names=names,
        layer_bytes=bytes_of_layer,
        gathers_early=early,
        options=options,
        init=jax.jit(init, out_shardings=state_shardings, compiler_options=init_compiler_options(device_kind(mesh))),
        train_step=jitted(step, out_shardings=(state_shardings, replicated)),
        outer_step=apart and jitted(apart.join, out_shardings=state_shardings),
        eval_step=jax.jit(eval_step(evaluate), out_shardings=replicated),
        logits=jax.jit(logits, out_shardings=replicated) if logits else None,
        to_kept=reshaper(state, kept, stack),
        from_kept=reshaper(kept, state, stack),
    )


def device_kind(mesh: Mesh) -> str:
    """Returns `jax.Device.device_kind` of a mesh, whose devices are alike."""
    kind: str = mesh.devices.flat[0].device_kind
    return kind


def _options(
    config: Config,
    program: Program | None,
    placement: Placement,
    replicas: Replicas,
    params: Params,
    axes: NamesTree,
    bytes_of_layer: int,
    *,
    gathers_early: bool,
) -> tuple[CompilerOption, ...]:
    """Returns the compiler options of a step; see `compiler.options_of`."""
    whole = jax.tree.map(lambda leaf, axes: placement.weight_spec(leaf.shape, axes), params, axes)
    # Whether a weight stays split over the axis of experts while it computes.
    splits_experts = any(EXPERT in axes_in(spec) for spec in jax.tree.leaves(whole))
    return options_of(
        device_kind(replicas.mesh),
        bytes_of_layer,
        is_late=replicas.is_late,
        by_chunk=program is not None and (program.reduces_chunks or splits_experts),
        gathers_early=gathers_early,
        splits_experts=program is None and splits_experts,
        is_deterministic=config.precision.deterministic,
    )


def _replicas(config: Config, task: Task, params: Params, axes: NamesTree, rules: Rules, mesh: Mesh) -> Replicas:
    """Returns how gradients are added up and reduced over the data axis, with the shardings of parameters.

    Raises:
      UserError: a weight that cannot be stored as configured; or level 2, or a reduction of one's own over several
        devices, with a task that cannot be traced where data is manual: both reduce gradients in such a region.
    """
    level = config.zero.effective_level
    trained = trained_mask(config.optimizer.trainable, params, has_adapters=config.lora.rank > 0)
    specs = stored_tree(params, axes, rules, mesh.shape, level)
    # A user's rule may shard weights over data. Then data has no replicas of them and is left to the partitioner.
    splits_weights = level < MAX_LEVEL and any(DATA in axes_in(one.parameter) for one in jax.tree.leaves(specs))
    is_manual = (task.takes_manual_axes or num_parts(partitioned_axes(), mesh.shape) == 1) and not splits_weights
    if level == 2 and not is_manual:
        raise UserError(
            Problem(
                "zero.level",
                got=(
                    "2 with fsdp or an axis after it and a task without `takes_manual_axes`, or with weights split "
                    "over data"
                ),
                allowed="0, 1, 3, or a task with it",
                nearest="zero.level=1",
            )
        )
    reduction = reductions.of(config)
    if reduction is not None and mesh.shape[DATA] > 1 and not is_manual:
        raise UserError(
            Problem(
                reductions.KEY,
                got=(
                    f"{reduction.name} with fsdp or an axis after it and a task without `takes_manual_axes`, or with "
                    "weights split over data"
                ),
                allowed=f"{SUM}, or a task with it",
                nearest=f"{reductions.KEY}={SUM}",
            )
        )
    return Replicas(mesh, specs, level, is_manual, reduce_dtype(config.precision), trained, reduction)


def _with_reductions(config: Config, task: Task, program: Program, bytes_of_layer: int, mesh: Mesh) -> Program:
    """Returns a pipeline's program that reduces each chunk's gradients as soon as they are complete, where that pays.

    The estimate reads the configuration, the mesh and the kind of device alone, so that plan and run have one program:
    products at the speed that large ones reach, idle rows, and replicas that are on different hosts. Devices without
    known peaks, such as CPUs, count as REFERENCE.
    """
    accelerator = find_accelerator(device_kind(mesh)) or find_accelerator(REFERENCE)
    assert accelerator is not None
    peak = accelerator.product_share * accelerator.bfloat16_flops_per_second
    computing_seconds = task.flops_per_token * task.num_units / mesh.size / peak / program.cells.active.mean()
    layers = task.stages.num_layers if task.stages else 0
    kind_of_sum = "reduce-scatter" if config.zero.effective_level else "all-reduce"
    sent = wire_share(kind_of_sum, mesh.shape[DATA]) * layers * bytes_of_layer
    rate = accelerator.network_bytes_per_second or accelerator.link_bytes_per_second
    pays = worth_reducing_early(program, sent / rate, float(computing_seconds))
    return dataclasses.replace(program, reduces_chunks=pays)


def _initializer(
    config: Config,
    task: Task,
    axes: NamesTree,
    replicas: Replicas,
    apart: Apart | None,
    transformation: optax.GradientTransformation,
    scaling: loss_scale.Scaling | None,
    stack: Stack | None,
) -> Callable[[jax.Array], TrainState]:
    """Returns the function that makes the state before the first step: uint32 key data -> state."""
    is_late = replicas.is_late and task.after_update is not None
    late_metrics = abstract_metrics(task, entries(task, config.batch_size)) if is_late else ()

    def init(key_data: jax.Array) -> TrainState:
        rng = jax.random.wrap_key_data(key_data)
        params = meta.unbox(task.init(jax.random.fold_in(rng, 0)))
        params = stacked(as_stored(params, axes, replicas.trained, config.precision), stack)
        residual, rng = replicas.residual(select(params, replicas.trained)[0]), jax.random.fold_in(rng, 1)
        state = init_state(params, transformation, rng, scaling, replicas.trained, residual, late_metrics)
        return apart.begun(state) if apart else state

    return init


def _update(
    config: Config,
    task: Task,
    transformation: optax.GradientTransformation,
    rates: Schedule,
    scaling: loss_scale.Scaling | None,
    of_state: Shardings,
    replicas: Replicas,
    axes: NamesTree,
    stack: Stack | None,
) -> Update:
    """Returns the update of a step; `of_state` are the shardings of the state, `axes` those of parameters."""
    reduction, after_update, layers = replicas.reduction, after_update_of(task, stack), None
    if config.observe.layers != "off":
        layers = health.Layers(dict(leaves_with_paths(axes, is_leaf=is_names)), stack)
    update = functools.partial(
        WeightUpdate,
        transformation,
        rates,
        config.optimizer.clip_norm,
        config.guard,
        scaling,
        lambda opt_state, norm: offload.fetched(opt_state, of_state.opt_state, after=norm),
        replicas.trained,
        average_decay=config.optimizer.average,
        layers=layers,
        is_own=config.optimizer.name not in NAMES
        or config.learning_rate.name not in RATES
        or (after_update is not None and config.task not in task_names()),
    )
    if reduction is not None and reduction.update is not None:
        late: Update = reduction.update(update, replicas.reduce, after_update)
        return late
    sends_each_step = reduction is not None and config.local_steps.period == 0
    return update(replicas.reduce if sends_each_step else None, after_update)


def learning_rates(config: Config, task: Task) -> Schedule:
    """Returns the learning rate as a function of the number of updates done so far.

    Raises:
      UserError: `noam`, which is a function of the model's width, with a task that states no width.
    """
    options = config.learning_rate
    if options.name == "noam" and not task.width:
        raise UserError(
            Problem(
                "learning_rate.name",
                got="noam, and this task states no width (Task.width = 0)",
                allowed="a task with a width, or another name",
                nearest="inverse_sqrt",
            )
        )
    return learning_rate(
        options, num_steps=config.num_steps, embed_dim=max(task.width, 1), batch_size=config.batch_size
    )


def loss_scaling(config: Config, task: Task) -> loss_scale.Scaling | None:
    """Returns how the loss is scaled for the backward pass; None: not at all."""
    in_float16 = compute_name(config.precision) == "float16"
    return loss_scale.scaling(config.loss_scale, task.num_units, computes_in_float16=in_float16)


def pipeline_program(config: Config, shape: Mapping[str, int]) -> Program | None:
    """Returns the schedule, proven and compiled to tables for the executor; None on a pipeline of size 1.

    Raises:
      UserError: the schedule has no table for these numbers, or a wrong one.
    """
    if shape["pipeline"] == 1:
        return None
    parts = num_microbatches(config, shape)
    return executable(chosen(config.pipeline, num_stages=shape["pipeline"], num_microbatches=parts))


def array_rows(assembly: Assembly) -> list[Row]:
    """Returns a row for each array of the state, for `layout.txt` and `explain`; layers in the shapes of memory."""
    frozen = {f"params/{path}" for path, is_trained in leaves_with_paths(assembly.replicas.trained) if not is_trained}
    return rows(assembly.state, assembly.names, frozen)


def num_trained(assembly: Assembly) -> tuple[int, int]:
    """Returns how many stored parameters are trained and how many are frozen, without places that are empty."""
    trained, frozen = select(assembly.kept_state.params, assembly.replicas.trained)
    return sum(leaf.size for leaf in jax.tree.leaves(trained)), sum(leaf.size for leaf in jax.tree.leaves(frozen))


def stored_params(assembly: Assembly, kept_params: Params) -> Params:
    """Returns parameters from layer order (as checkpoints store them) in the shapes and shardings of the step."""
    return reshaper(assembly.kept_state.params, assembly.state.params, assembly.stack)(kept_params)


def kept_params(assembly: Assembly, params: Params) -> Params:
    """Returns parameters from the shapes of the step in layer order; the inverse of `stored_params`."""
    return reshaper(assembly.state.params, assembly.kept_state.params, assembly.stack)(params)


def placed_batch(batch: Mapping[str, Entry], rules: Rules, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the abstract global batch, each entry with its sharding by the activation rules.

    Raises:
      UserError: one line for each dim that has no rule or that the mesh does not divide.
    """
    abstract, problems = {}, list[Problem]()
    for name, entry in batch.items():
        try:
            sharding = activation_sharding(entry.shape, entry.axes, rules, mesh, path=f"batch/{name}")
            abstract[name] = jax.ShapeDtypeStruct(entry.shape, entry.dtype, sharding=sharding)
        except UserError as error:
            # A user's own model may have dims that the built-in table does not list.
            hint = ", or a rule of its own: sharding.rules.extend(rules, Rule('...'))"
            problems += [
                one.with_parts(fix=f"{one.fix}{hint}") if "logical axis of dim" in one.key else one
                for one in error.problems
            ]
    refuse(problems)
    return abstract


def _computations(
    config: Config,
    task: Task,
    program: Program | None,
    placement: Placement,
    replicas: Replicas,
    mesh: Mesh,
    axes: Axes,
) -> tuple[Gradients, Callable[[Params, Batch, jax.Array], Loss], Callable[[Params, Batch], jax.Array] | None]:
    """Returns the functions that compute (gradients, evaluation sums, logits) of a batch, in a pipeline or not."""
    num_parts = num_microbatches(config, mesh.shape)
    if program is None:
        whole = task.logits
        plain = whole and (lambda params, batch: whole(params, with_sequence_index(batch)))
        whole_step = accumulated(task.loss, num_parts, placement, replicas, axes)
        return whole_step, summed(task.loss, num_parts, placement, axes), plain
    stages, size = task.stages, mesh.shape["pipeline"]
    if stages is None:
        raise UserError(
            Problem("mesh.pipeline", got=f"{size}, and this task has no stages", allowed=1, nearest="mesh.pipeline=1")
        )
    specs, num_chunks = replicas.specs, program.schedule.num_chunks

    def gradients(params: Params, batch: Batch, rng: jax.Array, seed: jax.Array) -> Sums:
        return executor.gradients(stages, program, replicas, params, cut(batch, num_parts, placement, axes), rng, seed)

    def evaluate(params: Params, batch: Batch, rng: jax.Array) -> Loss:
        return forward.evaluate(stages, num_chunks, mesh, specs, params, cut(batch, num_parts, placement, axes), rng)

    def logits(params: Params, batch: Batch) -> jax.Array:
        one = cut(with_sequence_index(batch), 1, placement, axes)
        return forward.logits(stages, num_chunks, mesh, specs, params, one)[0]

    return gradients, evaluate, logits if stages.logits else None


def traced_steps(assembly: Assembly) -> TracedSteps:
    """Returns the training step and the outer step, traced; the second is None without groups that train apart.

    Meanwhile no other thread may trace a Linen module. `nn.scan` and `nn.remat` make subclasses of modules while they
    are traced. For that moment Flax removes fields from the base classes, and another thread that reads them fails.
    """
    outer = assembly.outer_step
    return assembly.train_step.trace(assembly.state, assembly.batch), outer and outer.trace(assembly.state)


def compiled_steps(traced: TracedSteps) -> tuple[jax.stages.Compiled, OuterStep]:
    """Returns the two of `traced_steps`, compiled. No module is traced any more, so this may run in another thread.

    Raises:
      UserError: other processes traced a different program.
    """
    step, outer = traced
    return compiled("step", step), outer and compiled("outer step", outer)


def compiled(name: str, traced: jax.stages.Traced) -> jax.stages.Compiled:
    """Returns a compiled program after all processes have compared it; `name` is used once.

    Raises:
      UserError: other processes traced a different program.
    """
    lowered = traced.lower()
    if peers.count() > 1:
        program = hashlib.sha256(lowered.as_text().encode()).hexdigest()
        peers.refuse_differences(f"the program of the {name}", {"hash": program})
    return lowered.compile()


def throughput_of(assembly: Assembly) -> Throughput:
    """Returns the quantities of throughput: units in a step, model FLOPs a unit, peak FLOP/s of products."""
    task, device = assembly.task, assembly.mesh.devices.flat[0]
    return Throughput(
        unit=task.unit,
        units_per_step=task.num_units,
        flops_per_unit=task.flops_per_token,
        num_devices=assembly.mesh.size,
        peak_flops_per_second=peak_flops_per_second(device.device_kind, product_name(assembly.config.precision)),
    )
