"""The state that a run starts from: its own newest checkpoint, another run's weights, or initial weights.

A checkpoint has the residual of each replica. On a mesh with as many replicas they go on bitwise, on another one as
`Reduction.reshard` has them.
"""

import dataclasses
import importlib.metadata
import json
import platform
import shlex
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from meshtrain.assemble import Assembly, compiled, kept_params, learning_rates, stored_params
from meshtrain.checkpoint.checkpoint import AVERAGES, CHECKPOINTS, Checkpoints
from meshtrain.checkpoint.other_runs import find, newest
from meshtrain.cli import flags
from meshtrain.config.fields import CONFIG_FILE, Config
from meshtrain.config.resume import from_json
from meshtrain.errors import Problem, UserError, warn
from meshtrain.files import hash_of_sources, is_url, read_json, what_is_at
from meshtrain.hf import adapters
from meshtrain.hf.folder import by_name, read_by_name
from meshtrain.launch import peers
from meshtrain.models import lora
from meshtrain.models.layers import A
from meshtrain.models.task import Params
from meshtrain.observe import trackers
from meshtrain.optim.average import Averaged
from meshtrain.options import Values
from meshtrain.run import weights, workdir
from meshtrain.sharding.rules import DATA
from meshtrain.sharding.stored import named_params
from meshtrain.sharding.trainable import is_adapter, is_frozen
from meshtrain.sharding.trees import Arrays, leaves_with_paths, merged, path_text, select
from meshtrain.step.shardings import shardings
from meshtrain.step.state import RESIDUAL, TrainState
from meshtrain.store.buckets import Unreached

_PACKAGE = Path(__file__).parents[1]
_RATE_TOLERANCE = 0.01  # relative: a smaller change of the learning rate gives no warning


def saved_step(run: Path, directory: str = "") -> int:
    """Returns the step of a run's newest complete checkpoint, in its folder or `checkpoint.directory`; 0 for none."""
    try:
        with find(directory or run / CHECKPOINTS, is_place=True) as checkpoints:
            return checkpoints.latest_step() or 0
    except Unreached:
        raise
    except UserError:
        return 0


def check(config: Config, run: Path, start_step: int) -> list[Problem]:
    """Returns one line for each reason why a run cannot begin or resume in its folder; reads no array, writes nothing.

    Args:
      config: of the run.
      run: its folder; it need not exist.
      start_step: from `saved_step`. From 1 on the run resumes from its own weights, and `init_from` is not read.
    """
    problems = workdir.check(run, config, is_saved=start_step > 0) or trackers.check(run)
    if not start_step and not problems:
        problems = workdir.vanished(run, config.checkpoint.directory or str(run / CHECKPOINTS))
    problems += trackers.missing(config.observe)
    if start_step > config.num_steps:
        problems.append(
            Problem(
                "num_steps",
                got=f"{config.num_steps}, and the workdir's run is at step {start_step}",
                allowed=f"at least {start_step}",
                nearest=start_step,
            )
        )
    if not start_step and _has_weights_alone(run):
        problems.append(
            Problem(
                "workdir",
                got=f"{run}, which has imported weights and no state of training",
                allowed="a new workdir that begins with them",
                nearest=f"--config.init_from={run} with another --workdir",
            )
        )
    if config.init_from and not start_step:
        problems += [problem.at("init_from") for problem in weights.weights_problems(config, config.init_from)]
    if (warmup := config.learning_rate.warmup_steps) > config.num_steps and peers.is_main_process():
        warn(f"learning_rate.warmup_steps: got {warmup}, and num_steps = {config.num_steps} end before the peak; "
             f"nearest: --config.learning_rate.warmup_steps={config.num_steps // 10}")  # fmt: skip
    return problems


def _has_weights_alone(run: Path) -> bool:
    """Returns whether a folder's only checkpoint is an import; an interruption before the first step saves a state."""
    if what_is_at(run / CHECKPOINTS / "0") != "a folder":
        return False
    try:
        with find(run / CHECKPOINTS, is_place=True) as checkpoints:
            return checkpoints.latest_step() == 0 and all(path.startswith("params/") for path in checkpoints.shapes(0))
    except UserError:
        return False


def refuse_unequal_processes(config: Config, run: Path) -> None:
    """Compares versions and configuration of all processes: different ones would deadlock in their first collective.

    Raises:
      UserError: all differences of the versions, else those of the configuration; the same lines in all processes.
    """
    if peers.count() == 1:
        return
    versions = {name: importlib.metadata.version(name) for name in ("meshtrain", "jax", "jaxlib", "flax", "optax")}
    # Two commits of one version have other sources.
    versions |= {"python": platform.python_version(), "meshtrain's source": hash_of_sources(_PACKAGE)}
    peers.refuse_differences("versions", versions)
    peers.refuse_differences("configuration", compared(config, run))
    saved = {"newest checkpoint": newest(config.checkpoint.directory or run / CHECKPOINTS)}
    peers.refuse_differences("workdir", saved, peers.SAME_FILES)


def compared(config: Config, run: Path) -> Values:
    """Returns name -> value of what has to be the same in all processes besides versions: workdir and configuration.

    With a bucket between them, each machine may have a workdir of its own.
    """
    own = {} if is_url(config.checkpoint.directory) else {"workdir": str(run)}
    return {**own, **flags.flatten(config)}


def refuse_other_weights(assembly: Assembly, run: Path) -> None:
    """Compares the weights of `init_from` with those of this model, before anything is written.

    Raises:
      UserError: they differ, or its adapters are not those of `lora`.
    """
    config = assembly.config
    if not config.init_from or saved_step(run, config.checkpoint.directory):
        return
    base, found = weights.beneath(config)
    params, rounded = _taken(assembly, base, found)
    if peers.count() > 1:  # each reads its own copy
        peers.refuse_differences("init_from", weights.content(config), peers.SAME_FILES)
    if weights.is_by_name(config, base):
        by_name(base, params)
    else:
        weights.refuse_other_params(base, params, rounded)
    if found is None:
        return
    theirs, factors = adapters.factors(found, base, config.model)
    own = {path.removesuffix(A) for path, _ in leaves_with_paths(assembly.kept_state.params) if path.endswith(A)}
    wanted = {key: value for key, value in vars(theirs).items() if value != getattr(config.lora, key)}
    wanted = {key: value for key, value in wanted.items() if key != "targets" or own != factors.keys()}
    if config.lora.rank and wanted:
        fix = " ".join(shlex.quote(f"--config.lora.{key}={value}") for key, value in wanted.items())
        raise UserError(
            Problem(
                "init_from",
                got="adapters unlike those of lora",
                allowed="equal ones, or lora.rank=0, which merges them",
                nearest=fix,
            )
        )
    if config.lora.rank and peers.is_main_process():
        for paths in adapters.split_factors(factors):
            together = f"{', '.join(paths)} share one lora_A"
            effect = "its losses differ from peft's after the first step; lora.rank=0 merges the adapters"
            warn(
                f"{config.init_from}: {together}, and this run trains a separate copy for each, another "
                f"parametrization: {effect}"
            )


def _taken(assembly: Assembly, base: str, found: adapters.Adapters | None) -> tuple[Params, list[str]]:
    """Returns which of its abstract parameters a run takes from `init_from`, and the paths of those that it rounds.

    It takes all of them. From weights without adapters, or beneath those of peft, it takes all but the adapters, and
    None stands in their place; likewise of those that a task never trains. Frozen weights may have been saved in
    another dtype than that of `precision.frozen_dtype`. `base` and `found` are what `weights.beneath` returns.
    """
    params, config = assembly.kept_state.params, assembly.config
    if config.lora.rank or assembly.task.begin is not None:
        is_bare = bool(found) or weights.is_by_name(config, base)
        missing = [kind for kind in (is_adapter, is_frozen) if is_bare or not any(map(kind, weights.paths(base)))]
        own = [not any(kind(path) for kind in missing) for path, _ in leaves_with_paths(params)]
        params = select(params, jax.tree.unflatten(jax.tree.structure(params), own))[0]
    if config.precision.frozen_dtype == "auto":
        return params, []
    return params, [path for path, is_trained in leaves_with_paths(assembly.replicas.trained) if not is_trained]


def starting_state(assembly: Assembly, checkpoints: Checkpoints) -> tuple[TrainState, int, dict[str, float]]:
    """Returns the newest undamaged saved state, its step, and values to log about the restore.

    If nothing was saved: the initial state, or one with the weights of `init_from`, and step 0.

    Raises:
      UserError: the checkpoint has other arrays than this model; or all checkpoints are damaged.
    """
    start_seconds = time.perf_counter()
    step, damaged = checkpoints.newest_whole()
    for line in damaged if peers.is_main_process() else ():
        warn(f"{line}; it is set aside, and the checkpoint before it is used")
    if step is None:
        return beginning(assembly), 0, {}
    state = assembly.from_kept(_restored(assembly, checkpoints, step))
    jax.block_until_ready(state)
    return state, step, {"restore_seconds": time.perf_counter() - start_seconds}


def _restored(assembly: Assembly, checkpoints: Checkpoints, step: int) -> TrainState:
    """Returns the saved state of a step, whatever number of replicas had residuals, with averages or without."""
    kept, has = assembly.kept_state, isinstance(assembly.kept_state.opt_state, Averaged)
    had = any(path.startswith(f"{AVERAGES}/") for path in checkpoints.shapes(step))
    if has == had:
        return _with_residuals(assembly, checkpoints, step, kept)
    if peers.is_main_process():
        what = "no averages; they start from its weights" if has else "averages, which this run ignores"
        warn(f"optimizer.average: got {assembly.config.optimizer.average}, and step {step} has {what}")
    saved = kept.opt_state.inner if has else Averaged(kept.opt_state, ())
    state = _with_residuals(assembly, checkpoints, step, dataclasses.replace(kept, opt_state=saved))
    return averages_begun(state, kept) if has else dataclasses.replace(state, opt_state=state.opt_state.inner)


def _with_residuals(assembly: Assembly, checkpoints: Checkpoints, step: int, kept: TrainState) -> TrainState:
    """Returns the saved state of a step, as `kept` but for the number of replicas that had residuals."""
    reduction = assembly.replicas.reduction
    shapes = [shape for path, shape in checkpoints.shapes(step).items() if path.startswith(f"{RESIDUAL}/")]
    now = jax.tree.leaves(kept.residual)
    if reduction is None or not (shapes and now) or shapes[0][0] == now[0].shape[0]:
        return checkpoints.restore(step, kept)
    return shared_out(checkpoints.restore(step, as_saved(kept, shapes[0][0])), kept, reduction.reshard)


def averages_begun(state: TrainState, like: TrainState) -> TrainState:
    """Returns a state whose averages are its weights, whatever averages it has had.

    Args:
      state: with the optimizer's state inside an `Averaged`, or without one.
      like: abstract, with averages, each leaf with its sharding.
    """
    averages = like.opt_state.averaged_weights

    def begun(weights: dict[str, jax.Array]) -> Arrays:
        return jax.tree_util.tree_map_with_path(lambda path, of: weights[path_text(path)].astype(of.dtype), averages)

    first = jax.jit(begun, out_shardings=shardings(averages))(dict(leaves_with_paths(state.params)))
    inner = state.opt_state.inner if isinstance(state.opt_state, Averaged) else state.opt_state
    return dataclasses.replace(state, opt_state=Averaged(inner, first))


def warn_of_another_rate(assembly: Assembly, run: Path, state: TrainState) -> None:
    """Warns if the learning rate jumps on resume because `num_steps` or `decay_steps` have changed.

    For example, a decay that ended with the run jumps back up if the run is made longer. Call it on one process, before
    the run's config.json is written anew.

    Args:
      assembly: of the new configuration.
      run: its folder; without a config.json, nothing is compared.
      state: the restored state.
    """
    if not (run / CONFIG_FILE).is_file() or int(state.step) >= assembly.config.num_steps:
        return
    now = assembly.config
    given = read_json((run / CONFIG_FILE).read_bytes())
    # Alone: the run's other options may be of a task that is not here, or of a former version.
    name = {"learning_rate.name": now.learning_rate.name}  # a function that its file alone names is not imported
    was = from_json(json.dumps({key: given[key] for key in ("num_steps", "learning_rate") if key in given}), name)
    options = dataclasses.replace(now.learning_rate, decay_steps=was.learning_rate.decay_steps)
    before = dataclasses.replace(now, num_steps=was.num_steps, learning_rate=options)
    # Of groups that train apart, each with its own count, the one that skipped least.
    count, step = int(state.step) - int(np.min(state.skipped.total)), int(state.step)
    last, planned = (float(learning_rates(before, assembly.task)(number)) for number in (max(count - 1, 0), count))
    rate = float(learning_rates(now, assembly.task)(count))
    if abs(rate - planned) > _RATE_TOLERANCE * max(rate, planned):
        ends = [config.learning_rate.decay_steps or config.num_steps for config in (before, now)]
        warn(
            f"learning rate: {last:.3g} at step {step}, {rate:.3g} at step {step + 1}: its decay was to end at step "
            f"{ends[0]} and now ends at {ends[1]}; --config.learning_rate.decay_steps={ends[0]} leaves it as it was"
        )


def beginning(assembly: Assembly) -> TrainState:
    """Returns the state before the first step: initial weights, or those of `init_from` with adapters beside them.

    Raises:
      UserError: the other run's weights have other shapes or dtypes.
    """
    config = assembly.config
    # Restored first: weights of other shapes are refused before the initial state is compiled.
    kept = None
    if config.init_from:
        base, found = weights.beneath(config)
        params, rounded = _taken(assembly, base, found)
        is_by_name = weights.is_by_name(config, base)
        kept = read_by_name(base, params) if is_by_name else weights.restore_params(base, None, params, rounded)[0]
        kept = kept if found is None else _with_adapters(assembly, base, found, kept)
    key = jax.random.key_data(jax.random.key(config.seed))
    init = compiled("initial state", assembly.init.trace(key)) if peers.count() > 1 else assembly.init
    state = init(key)
    if kept is None:
        return state
    if config.lora.rank or assembly.task.begin is not None:
        kept = merged(kept, kept_params(assembly, state.params))
    if assembly.task.begin is not None:
        kept = jax.jit(assembly.task.begin, out_shardings=shardings(assembly.kept_state.params))(kept)
    state = dataclasses.replace(state, params=stored_params(assembly, kept))
    if config.optimizer.average:
        return averages_begun(state, assembly.state)  # those of `init` are the weights that others have replaced
    if assembly.apart is None:
        return state
    # Each group starts from these weights.
    return jax.jit(assembly.apart.restarted, donate_argnums=0, out_shardings=shardings(assembly.state))(state)


def _with_adapters(assembly: Assembly, base: str, found: adapters.Adapters, kept: Params) -> Params:
    """Returns weights with the adapters of a folder beside them; merged into them in a run without adapters."""
    options, given = adapters.factors(found, base, assembly.config.model)
    like = whole = assembly.kept_state.params
    if not assembly.config.lora.rank:
        everywhere = NamedSharding(assembly.mesh, PartitionSpec())
        shapes, _ = named_params(lora.initializer(assembly.task.init, options))
        whole = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere), shapes)
    leaves = dict(leaves_with_paths(kept)) | adapters.read(given, dict(leaves_with_paths(whole)))
    params = jax.tree.unflatten(jax.tree.structure(whole), [leaves[path] for path, _ in leaves_with_paths(whole)])

    def merge(params: Params) -> Params:
        return jax.tree.map(lambda weight, of: weight.astype(of.dtype), lora.merged(params, options), like)

    return params if assembly.config.lora.rank else jax.jit(merge, out_shardings=shardings(like))(params)


def as_saved(state: TrainState, num_saved: int) -> TrainState:
    """Returns the abstract state with the residuals of `num_saved` replicas, for reading a checkpoint of that many.

    Args:
      state: abstract, each leaf with its sharding; it has residuals.
      num_saved: replicas of the run that saved. Data splits the first dim if it divides it.
    """

    def saved(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        mesh = leaf.sharding.mesh
        replicas = DATA if num_saved % mesh.shape[DATA] == 0 else None
        sharding = NamedSharding(mesh, PartitionSpec(replicas, *leaf.sharding.spec[1:]))
        return jax.ShapeDtypeStruct((num_saved, *leaf.shape[1:]), leaf.dtype, sharding=sharding)

    return dataclasses.replace(state, residual=jax.tree.map(saved, state.residual))


def shared_out(state: TrainState, like: TrainState, reshard: Callable[[jax.Array, int], jax.Array]) -> TrainState:
    """Returns a state from `as_saved` with the residuals of as many replicas as `like` has.

    Args:
      state: as it was read.
      like: abstract, each leaf with its sharding.
      reshard: see `Reduction`.
    """
    share = jax.jit(reshard, static_argnums=1, out_shardings=shardings(like.residual))
    num_replicas = jax.tree.leaves(like.residual)[0].shape[0]
    return dataclasses.replace(state, residual=share(state.residual, num_replicas))
