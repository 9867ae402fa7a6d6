"""Elastic jobs, which continue with fewer processes. Only this module handles missing processes.

A launcher that cannot replace a lost machine starts the remaining processes, and writes the number of all processes
into the environment variable `cluster.FULL`. The global batch stays the same, and a device's microbatch becomes no
larger than with all processes.
"""

import dataclasses
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import jax

from meshtrain.assembly.assemble import Assembly, assemble
from meshtrain.config.mesh_checks import batch_shards, num_microbatches
from meshtrain.config.schema import Config
from meshtrain.config.tasks import MakeTask
from meshtrain.errors import Problem, TooFew, UserError, refuse
from meshtrain.launch import cluster, distributed, peers
from meshtrain.run import memory_check
from meshtrain.sharding.mesh import mesh_shape, num_needed
from meshtrain.sharding.rules import DATA, Rules, default_rules


def start_devices(config: Config) -> tuple[list[jax.Device], list[str]]:
    """Starts JAX, connects the processes, and returns the devices of all processes, with lines about them to print.

    Raises:
      UserError: the job may continue with fewer processes, but `mesh.data` has a fixed size; the errors of
        `distributed.start`.
    """
    if os.environ.get(cluster.FULL):
        refuse(check(config))
    return distributed.start(num_needed(config.mesh), is_open=-1 in dataclasses.astuple(config.mesh))


def assemble_run(
    config: Config,
    devices: Sequence[jax.Device],
    make_task: MakeTask | None,
    rules: Rules | None,
    problems: Sequence[Problem] = (),
) -> tuple[Assembly, list[str]]:
    """Returns the assembly of a run on the running processes, and lines to print (none if no process is missing).

    Args:
      config: the configuration, from `resolve`.
      devices: the devices of all running processes.
      make_task: a task function; None: the function that `config.task` names.
      rules: logical axis -> mesh axes; None: the built-in table.
      problems: earlier problems, to be reported together with the problems of this function.

    Raises:
      TooFew: processes are missing, and the run does not fit the running processes.
      UserError: the configuration does not fit the mesh, or the training state does not fit the memory.
    """
    num_processes = peers.count()
    full = cluster.full_size(os.environ, num_processes)
    with refusing(num_processes, full):
        simulated = devices[0].platform == "cpu" and full == 1
        shape, lines = mesh_shape(config.mesh, len(devices), simulated=simulated), list[str]()
        if num_processes < full:
            config, line = spread(config, shape, num_processes, full, rules)
            lines.append(line)
        assembly = assemble(config, shape, devices, make_task, rules, problems)
        memory_check.refuse_too_large(assembly, make_task, rules)
        return assembly, lines


def check(config: Config) -> list[Problem]:
    """Returns an error line if `mesh.data` is not -1; a job that may continue with fewer processes needs -1."""
    if config.mesh.data == -1:
        return []
    got = f"{config.mesh.data}, in a job that may continue with fewer processes"
    return [Problem(f"mesh.{DATA}", got=got, allowed="-1, the remaining devices", nearest=f"mesh.{DATA}=-1")]


@contextmanager
def refusing(num_processes: int, full: int) -> Iterator[None]:
    """Context manager: converts a UserError of the block to `TooFew` if processes are missing.

    The configuration was valid with all processes, so another number of processes may be valid, too.

    Args:
      num_processes: the number of running processes.
      full: the number of processes of the complete job.
    """
    try:
        yield
    except UserError as error:
        if num_processes == full or isinstance(error, TooFew):
            raise
        got = f"{num_processes} of {full}, with the problems above"
        problem = Problem(
            "processes", got=got, allowed="a number without problems", nearest=f"one process less, or {full}"
        )
        raise TooFew(*error.problems, problem) from error


def spread(
    config: Config, mesh_shape: Mapping[str, int], num_processes: int, full: int, rules: Rules | None = None
) -> tuple[Config, str]:
    """Adapts `accumulation_steps` to the remaining processes; returns the configuration, and a line about it to print.

    The number of devices per process is unchanged. `accumulation_steps` becomes the smallest number with which a
    device's microbatch has no more sequences than with all processes.

    Args:
      config: the run's configuration, written for all processes.
      mesh_shape: the size of each mesh axis on the remaining processes.
      num_processes: the number of remaining processes.
      full: the number of all processes.
      rules: logical axis -> mesh axes; None: the built-in table.

    Raises:
      TooFew: the global batch is not divisible by the shards on the remaining processes.
    """
    rules = rules or default_rules(config.layout)
    in_pipeline = num_microbatches(config, mesh_shape) // config.accumulation_steps
    num_devices = math.prod(mesh_shape.values())

    def shards(num_processes_then: int) -> int:
        """Returns the number of parts into which `num_processes_then` processes split an accumulation step's batch.

        This is the number of batch shards times the number of pipeline microbatches; 0 if so many processes cannot form
        a mesh.
        """
        data, left = divmod(mesh_shape[DATA] * num_processes_then, num_processes)
        return 0 if left else math.prod(batch_shards(rules, {**mesh_shape, DATA: data}).values()) * in_pipeline

    sequences, left = divmod(config.batch_size, shards(num_processes))
    if left:
        allowed = [n for n in range(1, full + 1) if shards(n) and config.batch_size % shards(n) == 0]
        below = max((n for n in allowed if n < num_processes), default=full)
        got = f"{num_processes} of {full}, {num_devices} devices"
        got += f", whose shards do not divide batch_size = {config.batch_size}"
        raise TooFew(Problem("processes", got=got, allowed=", ".join(map(str, allowed)), nearest=below))
    least = next(
        steps
        for steps in range(1, sequences + 1)
        if sequences % steps == 0 and steps * shards(num_processes) >= config.accumulation_steps * shards(full)
    )
    was = f" (of {config.accumulation_steps})" if least != config.accumulation_steps else ""
    line = f"{num_processes} of {full} processes: accumulation_steps={least}{was}"
    return dataclasses.replace(config, accumulation_steps=least), line
