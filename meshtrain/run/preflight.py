"""Checks a run before it writes, compiles or trains, because a later failure would cost more time."""

import importlib.metadata
import os
import platform
from collections.abc import Sequence
from pathlib import Path

import jax

from meshtrain.assembly.assemble import Assembly
from meshtrain.checkpoint.checkpoint import CHECKPOINTS
from meshtrain.checkpoint.other_runs import find, newest
from meshtrain.cli import flags
from meshtrain.config.schema import Config
from meshtrain.config.tasks import MakeTask, abstract_task
from meshtrain.data.dataset import Dataset, MakeData
from meshtrain.errors import Problem, UserError, refuse, warn
from meshtrain.files import hash_of_sources, is_url, url_problems, what_is_at
from meshtrain.launch import peers
from meshtrain.observe import trackers
from meshtrain.observe.progress import phase
from meshtrain.options import Values
from meshtrain.run import base_weights, elastic, saving, weights, workdir
from meshtrain.run.dataset import open_data, refuse_unequal_data, warn_many_epochs, with_steps
from meshtrain.sharding.mesh import advice, describe
from meshtrain.sharding.rules import Rules

_PACKAGE = Path(__file__).parents[1]


def check_arguments(directory: object, make_task: object, make_data: object, rules: object) -> None:
    """Checks the types of the arguments of `meshtrain.train`.

    Raises:
      UserError: one line for each wrong argument.
    """
    task_fix = f"default(task='{make_task}')" if isinstance(make_task, str) else "train(config, directory, my_task)"
    data_fix = "train(..., rules=rules)" if isinstance(make_data, Rules) else "lambda config: Dataset(...)"
    rules_fix = "sharding.rules.extend(default_rules(LayoutOptions()), Rule(...))"
    arguments = (
        ("directory", directory, isinstance(directory, str | os.PathLike), "a folder's path", "runs/default"),
        ("make_task", make_task, callable(make_task), "a function (config, placement) -> Task", task_fix),
        ("make_data", make_data, callable(make_data), "a function config -> Dataset", data_fix),
        ("rules", rules, isinstance(rules, Rules), "sharding.rules.Rules", rules_fix),
    )
    problems = [
        Problem(name, got=type(given).__name__, allowed=wanted, nearest=fix)
        for name, given, is_right, wanted, fix in arguments
        if not is_right and (given is not None or name == "directory")
    ]
    refuse(problems or url_problems("directory", str(directory)))


def set_num_steps(
    config: Config, make_task: MakeTask | None, make_data: MakeData | None
) -> tuple[Config, tuple[Dataset, str] | None]:
    """Replaces `num_epochs` by `num_steps`, which depends on the number of training examples.

    Returns:
      The configuration, and the pair (opened data, a line about the change). Without `num_epochs` the configuration is
      unchanged, the data are not opened, and None replaces the pair.
    """
    if not config.num_epochs:
        return config, None
    corpus = open_data(config, abstract_task(config, make_task), make_data)
    config, line = with_steps(config, corpus)
    return config, (corpus, line)


def checked_assembly(
    config: Config,
    devices: Sequence[jax.Device],
    device_lines: Sequence[str],
    make_task: MakeTask | None,
    rules: Rules | None,
    run: Path,
) -> Assembly:
    """Returns the assembly of a run after the processes, the run's folder and the memory were checked.

    Args:
      config: the configuration, from `resolve`.
      devices: the devices of all processes, from `elastic.start_devices`.
      device_lines: lines about the devices, to print with the mesh.
      make_task: the caller's task function; None: the function that `config.task` names.
      rules: the caller's rules, logical axis -> mesh axes; None: the built-in table.
      run: the run's folder.

    Raises:
      UserError: processes have different versions or configurations, the folder belongs to another run or cannot be
        written, the configuration does not fit the mesh, or the training state does not fit the memory.
    """
    refuse_unequal_processes(config, run)
    saved = workdir.newest_step(run, config.checkpoint.directory)
    problems = peers.share_problems("workdir", check(config, run, saved))
    with phase("mesh", is_main=peers.is_main_process()) as say:
        assembly, lines = elastic.assemble_run(config, devices, make_task, rules, problems)
        machines = peers.num_machines()
        say("; ".join([describe(assembly.mesh, machines), *assembly.cost.exchanges, *device_lines, *lines]))
    lines = [f"mesh: {what}; nearest: {change}" for what, change in advice(assembly.mesh, machines)]
    lines += [kernel.fallback_line for kernel in assembly.cost.kernels if kernel.fallback]
    for line in lines if peers.is_main_process() else ():
        warn(line)
    return assembly


def checked_data(
    assembly: Assembly, opened: tuple[Dataset, str] | None, make_data: MakeData | None, run: Path
) -> Dataset:
    """Checks a run's data, its weights of `init_from`, and the metrics that its options name; returns the data.

    The data must be the same in all processes, and the same as at the run's first start.

    Args:
      assembly: the run's assembly.
      opened: the data that `set_num_steps` has opened, and the line that it has returned; None: this function opens the
        data.
      make_data: the caller's data function; None: the source or function in `config.data.source`.
      run: the run's folder.

    Raises:
      UserError: the data differ, the weights of `init_from` do not fit the model, or a metric is unknown.
    """
    config = assembly.config
    with phase("data", is_main=peers.is_main_process()) as say:
        corpus, line = opened or (open_data(config, assembly.task, make_data), "")
        workdir.refuse_other_corpus(run, corpus.fingerprint, config.checkpoint.directory)
        refuse_unequal_data(config, corpus, workdir.newest_step(run, config.checkpoint.directory))
        say("; ".join(filter(None, (corpus.summary, line))))
    warn_many_epochs(config, assembly.task, corpus)
    base_weights.refuse_other_weights(assembly, run)
    saving.refuse_unknown_metric(assembly, corpus)
    return corpus


def check(config: Config, run: Path, start_step: int) -> list[Problem]:
    """Returns an error line for each reason why a run cannot start or resume in its folder.

    It reads no array and writes nothing.

    Args:
      config: the run's configuration.
      run: the run's folder, which need not exist.
      start_step: the step of the newest checkpoint, from `workdir.newest_step`; 0 if there is none. From 1 on the run
        resumes from its own weights, and `init_from` is not read.
    """
    problems = workdir.check(run, config, is_saved=start_step > 0) or trackers.check(run)
    if not start_step and not problems:
        problems = workdir.lost_checkpoint(run, config.checkpoint.directory or str(run / CHECKPOINTS))
    problems += trackers.missing(config.observe)
    if start_step > config.num_steps:
        problems.append(
            Problem(
                "num_steps",
                got=f"{config.num_steps}, but the run in the workdir is at step {start_step}",
                allowed=f"at least {start_step}",
                nearest=start_step,
            )
        )
    if not start_step and _has_weights_alone(run):
        problems.append(
            Problem(
                "workdir",
                got=f"{run}, which has imported weights but no training state",
                allowed="a new workdir that starts with these weights",
                nearest=f"--config.init_from={run} with another --workdir",
            )
        )
    if config.init_from and not start_step:
        problems += [problem.at("init_from") for problem in weights.weights_problems(config, config.init_from)]
    if (warmup := config.learning_rate.warmup_steps) > config.num_steps and peers.is_main_process():
        warn(f"learning_rate.warmup_steps: got {warmup}, but num_steps = {config.num_steps} end before the peak; "
             f"nearest: --config.learning_rate.warmup_steps={config.num_steps // 10}")  # fmt: skip
    return problems


def _has_weights_alone(run: Path) -> bool:
    """Returns whether the folder's newest checkpoint is step 0 without a training state, as `hf import` writes it.

    A run that is interrupted before its first step also saves step 0, but with a training state.
    """
    if what_is_at(run / CHECKPOINTS / "0") != "a folder":
        return False
    try:
        with find(run / CHECKPOINTS, is_place=True) as checkpoints:
            return checkpoints.latest_step() == 0 and all(path.startswith("params/") for path in checkpoints.shapes(0))
    except UserError:
        return False


def refuse_unequal_processes(config: Config, run: Path) -> None:
    """Checks that all processes have the same versions, the same configuration and the same newest checkpoint.

    Processes that differ would deadlock in their first collective. All processes call it.

    Raises:
      UserError: one line for each difference in versions. If versions are equal, one line for each difference in
        configurations; if these are equal as well, in the newest checkpoint. Every process raises the same lines.
    """
    if peers.count() == 1:
        return
    versions = {name: importlib.metadata.version(name) for name in ("meshtrain", "jax", "jaxlib", "flax", "optax")}
    # Two commits of one version have other sources.
    versions |= {"python": platform.python_version(), "meshtrain's source": hash_of_sources(_PACKAGE)}
    peers.refuse_differences("versions", versions)
    peers.refuse_differences("configuration", process_settings(config, run))
    saved = {"newest checkpoint": newest(config.checkpoint.directory or run / CHECKPOINTS)}
    peers.refuse_differences("workdir", saved, peers.SAME_FILES)


def process_settings(config: Config, run: Path) -> Values:
    """Returns the settings that must match across processes: the configuration (dotted key -> value) and the workdir.

    If checkpoints are in a bucket, each machine may have a different workdir, so the workdir is not included.
    """
    own = {} if is_url(config.checkpoint.directory) else {"workdir": str(run)}
    return {**own, **flags.flatten(config)}
