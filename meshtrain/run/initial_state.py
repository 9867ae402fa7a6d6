"""Creates the state from which a run starts: its newest checkpoint, another run's weights, or initial weights."""

import dataclasses
import functools
import time
from concurrent.futures import ThreadPoolExecutor

import jax

from meshtrain.assembly.assemble import Assembly
from meshtrain.assembly.compiling import compile_program
from meshtrain.assembly.facts import array_rows, kept_params, parameters_text, stored_params
from meshtrain.assembly.steps import compiled_step, trace_steps
from meshtrain.checkpoint.checkpoint import AVERAGES, Checkpoints
from meshtrain.errors import warn
from meshtrain.launch import peers
from meshtrain.launch.endings import publish_errors
from meshtrain.observe.progress import phase
from meshtrain.optim.average import Averaged
from meshtrain.run import base_weights, memory_check, workdir
from meshtrain.run.session import Session, Start
from meshtrain.sharding.placement_text import table
from meshtrain.sharding.trees import Arrays, leaves_with_paths, merge, path_text
from meshtrain.step.shardings import shardings
from meshtrain.step.state import TrainState


def begin(session: Session) -> Start:
    """Creates or restores the training state while the step compiles; returns the state and the compiled step.

    Also writes the run's configuration, its layout and the memory of a device into the run's folder.

    Args:
      session: the objects of the run.

    Raises:
      UserError: the arrays of the checkpoint do not match the model, all checkpoints are damaged, or a device is out of
        memory.
    """
    assembly, run, is_main = session.assembly, session.run, peers.is_main_process()
    config = assembly.config
    with memory_check.explain_memory(assembly), ThreadPoolExecutor(1) as thread, publish_errors():
        is_saved = workdir.newest_step(run, config.checkpoint.directory) > 0
        with phase("restore" if is_saved else "init", is_main=is_main) as say:
            # The compiler releases the interpreter, so the state is initialized or restored while the step compiles.
            traced = trace_steps(assembly.steps, assembly.states)
            compiling = thread.submit(compiled_step, traced, assembly.extension.join)
            state, step, restored = restore_or_initialize(assembly, session.checkpoints)
            say(f"from {config.init_from}" if config.init_from and not step else f"step {step}")
        if is_main and step:
            workdir.warn_of_another_rate(assembly, run, state)
        workdir.record(run, config, session.corpus.fingerprint, table(array_rows(assembly)))
        with phase("compile", is_main=is_main) as say:
            program, train_step = compiling.result()
            workdir.record_device(run, assembly, program)
            memory_check.warn_of_large_step(assembly, program)
            say(parameters_text(assembly))
    return Start(state, step, restored, program, train_step)


def restore_or_initialize(assembly: Assembly, checkpoints: Checkpoints) -> tuple[TrainState, int, dict[str, float]]:
    """Returns the newest undamaged saved state, its step, and values to log about the restore.

    If nothing was saved, it returns `initial_state`, step 0, and no values.

    Raises:
      UserError: the arrays of the checkpoint do not match the model; or all checkpoints are damaged.
    """
    start_seconds = time.perf_counter()
    step, damaged = checkpoints.newest_whole()
    for line in damaged if peers.is_main_process() else ():
        warn(f"{line}; moved it to the folder 'damaged' and used the checkpoint before it")
    if step is None:
        return initial_state(assembly), 0, {}
    state = assembly.steps.from_kept(_restore(assembly, checkpoints, step))
    jax.block_until_ready(state)
    return state, step, {"restore_seconds": time.perf_counter() - start_seconds}


def _restore(assembly: Assembly, checkpoints: Checkpoints, step: int) -> TrainState:
    """Restores the saved state of a step, with stacked layers in layer order; adds or drops weight averages.

    If `optimizer.average` is set but no averages were saved, the averages start from the saved weights. If
    `optimizer.average` is not set, saved averages are ignored.
    """
    kept, has = assembly.states.kept, isinstance(assembly.states.kept.opt_state, Averaged)
    had = any(path.startswith(f"{AVERAGES}/") for path in checkpoints.shapes(step))
    if has == had:
        return _as_today(assembly, checkpoints, step, kept)
    if peers.is_main_process():
        what = "no averages; they start from the weights of this step" if has else "averages, which this run ignores"
        warn(f"optimizer.average: got {assembly.config.optimizer.average}, but step {step} has {what}")
    saved = kept.opt_state.inner if has else Averaged(kept.opt_state, ())
    state = _as_today(assembly, checkpoints, step, dataclasses.replace(kept, opt_state=saved))
    return averages_begun(state, kept) if has else dataclasses.replace(state, opt_state=state.opt_state.inner)


def _as_today(assembly: Assembly, checkpoints: Checkpoints, step: int, kept: TrainState) -> TrainState:
    """Restores the saved state of a step. The run's extension converts its arrays if they were saved on another mesh.

    Args:
      assembly: the run's assembly.
      checkpoints: the run's checkpoints.
      step: the step to restore.
      kept: the abstract state to restore, with shardings. Stacked layers are in layer order, not grouped by pipeline
        stage.
    """
    read = functools.partial(checkpoints.restore, step)
    return assembly.extension.restore(read, checkpoints.shapes(step), kept)


def averages_begun(state: TrainState, like: TrainState) -> TrainState:
    """Returns a state whose weight averages are equal to its current weights.

    Args:
      state: the training state; its optimizer state may or may not be wrapped in `Averaged`.
      like: an abstract state with averages, which gives their dtypes and shardings.
    """
    averages = like.opt_state.averaged_weights

    def begun(weights: dict[str, jax.Array]) -> Arrays:
        return jax.tree_util.tree_map_with_path(lambda path, of: weights[path_text(path)].astype(of.dtype), averages)

    first = jax.jit(begun, out_shardings=shardings(averages))(dict(leaves_with_paths(state.params)))
    inner = state.opt_state.inner if isinstance(state.opt_state, Averaged) else state.opt_state
    return dataclasses.replace(state, opt_state=Averaged(inner, first))


def initial_state(assembly: Assembly) -> TrainState:
    """Returns the state before the first step: initial weights, or the weights of `init_from` plus adapters.

    Raises:
      UserError: the weights of `init_from` differ from the model's weights in shapes or dtypes.
    """
    config = assembly.config
    # Read before the initial state is compiled, so that wrong shapes raise an error early.
    kept = base_weights.read(assembly) if config.init_from else None
    key = jax.random.key_data(jax.random.key(config.seed))
    init = assembly.steps.init
    state = compile_program("initial state", init.trace(key))(key) if peers.count() > 1 else init(key)
    if kept is None:
        return state
    if config.lora.rank or assembly.task.begin is not None:
        kept = merge(kept, kept_params(assembly, state.params))
    if assembly.task.begin is not None:
        kept = jax.jit(assembly.task.begin, out_shardings=shardings(assembly.states.kept.params))(kept)
    weights_of_step = stored_params(assembly, kept)
    if config.optimizer.average:  # the averages from `init` are of the replaced weights
        return averages_begun(dataclasses.replace(state, params=weights_of_step), assembly.state)
    return assembly.extension.with_weights(state, weights_of_step)
