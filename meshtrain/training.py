"""A run from top to bottom: devices, mesh, data, state, steps, and the summary at the end."""

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path

from meshtrain import options
from meshtrain.assembly.assemble import Assembly
from meshtrain.config.build import Given
from meshtrain.config.resolve import resolve
from meshtrain.config.schema import Config
from meshtrain.config.tasks import MakeTask
from meshtrain.data.dataset import MakeData
from meshtrain.files import expand_user
from meshtrain.launch.endings import telling_errors
from meshtrain.launch.watchdog import Watchdog
from meshtrain.run import elastic, memory_check, preflight, saving, summary
from meshtrain.run.generating import sample_texts
from meshtrain.run.initial_state import begin
from meshtrain.run.session import Session, run_loop
from meshtrain.sharding.rules import Rules
from meshtrain.step.state import TrainState


@dataclasses.dataclass(frozen=True)
class Result:
    """What `train` returns.

    Attributes:
      state: the last state.
      values: the metrics last logged and evaluated.
      directory: the run's folder.
      assembly: mesh, task, shardings and functions of the run.
    """

    state: TrainState
    values: Mapping[str, float | None]
    directory: Path
    assembly: Assembly


def train(
    config: Given,
    directory: str | Path = "runs/default",
    make_task: MakeTask | None = None,
    make_data: MakeData | None = None,
    rules: Rules | None = None,
) -> Result:
    """Trains from the beginning, or from the newest checkpoint in the directory. `meshtrain.train` is this function.

    In a notebook::

        import meshtrain

        config = meshtrain.default()
        config.mesh.data = 2
        config.num_steps = 100
        result = meshtrain.train(config, "runs/mine")
        print(result.values["eval_loss"])

    Args:
      config: a ConfigDict as `meshtrain.config.default` returns it, a dict of the values that differ from the defaults,
        or a frozen `Config`.
      directory: the run's folder, for configuration, metrics and checkpoints.
      make_task: a task function (config, placement) -> Task; None for the one that `config.task` names.
      make_data: a function config -> `data.dataset.Dataset`; None for what `config.data` says.
      rules: logical axis -> mesh axes for the task's weights, activations and batch; None for the built-in table.

    Raises:
      UserError: a problem of configuration, data or task that the user can fix.
      TrainingStopped, Interrupted, SaveFailed: see `loop.run`.
    """
    begun_seconds = time.monotonic()
    preflight.check_arguments(directory, make_task, make_data, rules)
    source = {"data.source": options.function_name(make_data)} if make_data else {}
    config = resolve(config, source, make_task=make_task, rules=rules, reads_data=make_data is None)
    return train_resolved(config, directory, make_task, make_data, rules, begun_seconds=begun_seconds)


def train_resolved(
    config: Config,
    directory: str | Path,
    make_task: MakeTask | None = None,
    make_data: MakeData | None = None,
    rules: Rules | None = None,
    *,
    begun_seconds: float,
) -> Result:
    """Trains a configuration from `resolve`. For the other arguments and the errors see `train`.

    Args:
      begun_seconds: when the program began, by `time.monotonic`; goodput counts from there.
    """
    run = expand_user(directory).absolute()
    # Every process runs this same program. `devices` are those of all processes, in the same order everywhere.
    devices = elastic.start_devices(config)
    with telling_errors(), Watchdog(config.watchdog_seconds) as watchdog:
        config, opened = preflight.set_num_steps(config, make_task, make_data)
        # A mesh arranges the devices in a grid with named axes. `assemble` reads only shapes: it decides which device
        # stores which part of each array, and writes the step as a function of whole arrays. No array exists yet.
        assembly = preflight.checked_assembly(config, devices, make_task, rules, run)
        # A batch is a pure function of the seed and the number of its step, so the state of the data is that number.
        corpus = preflight.checked_data(assembly, opened, make_data, run)
        texts = sample_texts(assembly, corpus, make_task, rules)
        with saving.open_checkpoints(assembly, run) as checkpoints:
            session = Session(assembly, corpus, checkpoints, run, watchdog, begun_seconds)
            # Each device creates or reads its own part of the state. The whole state is never in one place.
            start = begin(session)
            # The loop's step donates its state: the new weights take the memory of the old ones, which are then gone.
            state, values = run_loop(session, start, texts)
        with watchdog.patient(), memory_check.explain_memory(assembly):
            summary.show(session, state, values, make_task, rules)
    return Result(state, values, run, assembly)
