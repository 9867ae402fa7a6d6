"""The part of the doctor that needs JAX: the job's configuration and errors, collectives along axes and in pairs."""

import argparse
from collections.abc import Callable, Mapping

import jax

from meshtrain.config.mesh_checks import check_filled
from meshtrain.config.resolve import configure
from meshtrain.config.schema import Config
from meshtrain.errors import Problem, UserError, refuse
from meshtrain.files import JsonObject
from meshtrain.launch import distributed, peers
from meshtrain.probe import job_mesh
from meshtrain.probe.bench.timed import measure_collective
from meshtrain.probe.checks.pairwise_times import time_pairs
from meshtrain.run import preflight, workdir
from meshtrain.sharding.mesh import MeshOptions, make_mesh, mesh_shape, num_needed
from meshtrain.sharding.rules import AXES, batch_axes, storage_axes

_NUM_BYTES = 2**20  # the size of a device's array
_NUM_ROUNDS = 3


def compared(given: argparse.Namespace) -> dict[str, str]:
    """Returns the values that must be equal in all processes of a run, as text: workdir and all configuration fields.

    The workdir is not included if checkpoints are in a bucket.

    Args:
      given: the result of `flags.arguments`.

    Raises:
      UserError: an error that a run would raise before JAX starts. Without a configuration file, only the mesh sizes
        are checked.
    """
    facts = preflight.process_settings(_configuration(given), given.workdir.absolute())
    return {name: repr(value) for name, value in facts.items()}


def exercised(given: argparse.Namespace, begin: Callable[[str], None]) -> JsonObject:
    """Starts JAX, runs collectives, and returns this process's observations as a JSON object.

    Its keys are `devices` (number and kind of local devices), `without_gpus` (whether JAX cannot use existing GPUs),
    `times` (axis -> number of devices, seconds of an all-reduce), `wrong` (an error line for each process with wrong
    results), and `pairs` (partner process -> seconds of an exchange in each round).

    Args:
      given: the result of `flags.arguments`. If it sets no mesh sizes, the mesh has two axes: data over the processes,
        and fsdp over the devices of each process.
      begin: a function that is called with the name of each part of the work before the part starts.

    Raises:
      UserError: JAX cannot start, the mesh does not fit the devices, or a run would be rejected.
    """
    config = _configuration(given)
    options = config.mesh if job_mesh.names_mesh(given) else None
    is_open = options is not None and -1 in (getattr(options, axis) for axis in AXES)
    devices, _ = distributed.start(None if options is None else num_needed(options), is_open=is_open)
    own = [device for device in devices if device.process_index == peers.index()]
    shape = _shape(options, devices)
    if given.config is not None:
        run = given.workdir.absolute()
        begun = workdir.newest_step(run, config.checkpoint.directory)
        problems = check_filled(config, shape) + preflight.check(config, run, begun)
        refuse(peers.share_problems("job", problems))
    mesh = make_mesh(shape, devices)
    times, wrong = {}, list[str]()
    for axis in [axis for axis in AXES if mesh.shape[axis] > 1]:
        begin(f"an all-reduce on {axis}")
        one = measure_collective(mesh, axis, "all-reduce", _NUM_BYTES, num_rounds=_NUM_ROUNDS)
        times[axis] = (mesh.shape[axis], one.fastest_seconds)
        wrong += one.wrong
    pairs: dict[int, list[float]] = {}
    counts = [sum(device.process_index == process for device in devices) for process in range(peers.count())]
    if peers.count() > 1 and len(set(counts)) == 1:
        begin("an exchange in pairs")
        pairs = time_pairs(devices, peers.index())
    seen = {"devices": (len(own), devices[0].device_kind), "without_gpus": distributed.leaves_gpus(devices)}
    return {**seen, "times": times, "wrong": wrong, "pairs": pairs}


def _configuration(given: argparse.Namespace) -> Config:
    return job_mesh.build_config(given) if given.config is None else configure(given)


def _shape(options: MeshOptions | None, devices: list[jax.Device]) -> Mapping[str, int]:
    if options is not None:
        simulated = devices[0].platform == "cpu"
        return mesh_shape(options, len(devices), simulated=simulated, num_processes=peers.count())
    across, inside = batch_axes()[0], storage_axes()[0]
    each, left = divmod(len(devices), peers.count())
    if left:
        raise UserError(
            Problem(
                "devices", got=f"{len(devices)} in {peers.count()} processes", allowed="the same number in each process"
            )
        )
    return dict.fromkeys(AXES, 1) | {inside: each} | {across: peers.count()}
