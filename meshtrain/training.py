"""Trains a configuration: starts the devices, builds mesh, data and state, runs the steps, and prints a summary."""

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path

from meshtrain import user_functions
from meshtrain.assembly.assemble import Assembly
from meshtrain.config.build import ConfigLike
from meshtrain.config.resolve import resolve
from meshtrain.config.schema import Config
from meshtrain.config.tasks import MakeTask
from meshtrain.data.dataset import MakeData
from meshtrain.files import expand_user
from meshtrain.launch.endings import publish_errors
from meshtrain.launch.watchdog import Watchdog
from meshtrain.run import elastic, memory_check, preflight, saving, summary
from meshtrain.run.generating import sample_texts
from meshtrain.run.initial_state import begin
from meshtrain.run.session import Session, run_loop
from meshtrain.sharding.rules import Rules
from meshtrain.step.state import TrainState


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of `train`.

    Attributes:
      state: the training state after the last step.
      values: metric name -> value in the last logged row and the last evaluation.
      directory: the run's folder.
      assembly: mesh, task, shardings and jitted functions of the run.
    """

    state: TrainState
    values: Mapping[str, float | None]
    directory: Path
    assembly: Assembly


def train(
    config: ConfigLike,
    directory: str | Path = "runs/default",
    make_task: MakeTask | None = None,
    make_data: MakeData | None = None,
    rules: Rules | None = None,
) -> Result:
    """Trains a run from its newest checkpoint, or from step 0 if there is none; exported as `meshtrain.train`.

    In a notebook::

        import meshtrain

        config = meshtrain.default()
        config.mesh.data = 2
        config.num_steps = 100
        result = meshtrain.train(config, "runs/mine")
        print(result.values["eval_loss"])

    Args:
      config: a ConfigDict from `meshtrain.default`, a dict of the values that differ from the defaults, or a frozen
        `Config`.
      directory: the run's folder, for configuration, metrics and checkpoints.
      make_task: a task function (config, placement) -> Task; None: the function that `config.task` names.
      make_data: a function config -> `data.dataset.Dataset`; None: the dataset that `config.data` describes.
      rules: logical axis -> mesh axes for the task's weights, activations and batch; None: the built-in table.

    Raises:
      UserError: a problem of configuration, data or task that the user can fix.
      TrainingStopped, Interrupted, SaveFailed: see `loop.run`.
    """
    begun_seconds = time.monotonic()
    preflight.check_arguments(directory, make_task, make_data, rules)
    overrides = {"data.source": user_functions.function_name(make_data)} if make_data else {}
    config = resolve(config, overrides, make_task=make_task, rules=rules, reads_data=make_data is None)
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
    """Trains a configuration that `resolve` has checked; `meshtrain.main` and `train` call it.

    The other arguments and the errors are explained in `train`.

    Args:
      begun_seconds: the time, by `time.monotonic`, at which the program started. Goodput is the share of useful time
        since then.
    """
    folder = expand_user(directory).absolute()
    # A job has one process per host, and every process runs this same program. `devices` lists the devices of all
    # processes, in the same order in each process. With fewer hosts than configured, an elastic job uses those there.
    devices, device_lines = elastic.start_devices(config)
    with publish_errors(), Watchdog(config.watchdog_seconds) as watchdog:
        config, opened_data = preflight.set_num_steps(config, make_task, make_data)  # opened only to count epochs
        # A mesh arranges the devices in a grid with named axes. The assembly is planned from shapes only, before any
        # array exists. It decides which device stores which part of each array. The step is written as if each array
        # were on a single device; the compiler splits the work and adds the communication.
        assembly = preflight.checked_assembly(config, devices, device_lines, make_task, rules, folder)
        # The seed and the step number determine each batch. So a resumed run needs no saved position in the data: the
        # step number is enough.
        dataset = preflight.checked_data(assembly, opened_data, make_data, folder)
        generate_samples = sample_texts(assembly, dataset, make_task, rules)
        with saving.open_checkpoints(assembly, folder) as checkpoints:
            session = Session(assembly, dataset, checkpoints, folder, watchdog, begun_seconds)
            # The state is the weights, the optimizer's moments and a few counters. Each device creates or reads only
            # its part, so the state may be larger than the memory of any device. Meanwhile a thread compiles the step.
            start = begin(session)
            # A step computes gradients, and `WeightUpdate` (step/step.py) applies them. The step donates its input
            # state: JAX may reuse the memory of the old weights for the new weights. After the step the old arrays are
            # deleted, and reading them raises an error.
            state, values = run_loop(session, start, generate_samples)
        with watchdog.longer_limit(), memory_check.explain_memory(assembly):
            summary.show(session, state, values, make_task, rules)
    return Result(state, values, folder, assembly)
