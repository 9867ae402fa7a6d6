"""The part of `bench-collectives` that needs JAX: builds the mesh, measures, prints and writes the results."""

import argparse
import dataclasses
import json
import sys

import tqdm

from meshtrain.cli import output_files
from meshtrain.cli.tables import format_bytes
from meshtrain.errors import Problem, UserError
from meshtrain.hardware.links import OPERATIONS
from meshtrain.launch import distributed, peers
from meshtrain.probe import job_mesh
from meshtrain.probe.bench import bandwidth_chart, measurements
from meshtrain.probe.bench.sweep import room_bytes, sizes, sweep
from meshtrain.sharding.mesh import describe, make_mesh, mesh_shape, num_needed
from meshtrain.sharding.rules import AXES


def measured(given: argparse.Namespace, ends: tuple[int, int], limit_seconds: float) -> bool:
    """Measures all collectives of a mesh, prints and writes the results; returns whether all results were correct.

    Args:
      given: the checked arguments of the command line.
      ends: the smallest and the largest size of a device's array, in bytes.
      limit_seconds: maximum expected time for measuring one size of a collective; if a size would take longer, it and
        all larger sizes of this collective are skipped.

    Raises:
      UserError: the mesh has only one device or does not fit the devices, or processes have different arguments.
      LostPeer: another process does not answer.
    """
    options = job_mesh.build_config(given).mesh
    is_open = -1 in dataclasses.astuple(options)
    devices, notes = distributed.start(num_needed(options), is_open=is_open)
    is_main = peers.is_main_process()
    facts = {"mesh": dataclasses.asdict(options), "sizes": list(ends), "limit": limit_seconds}
    peers.refuse_differences("arguments", facts)
    simulated = devices[0].platform == "cpu"
    mesh = make_mesh(mesh_shape(options, len(devices), simulated=simulated, num_processes=peers.count()), devices)
    along = [axis for axis in AXES if mesh.shape[axis] > 1]
    if not along:
        raise UserError(
            Problem(
                "mesh",
                got="one device, which cannot send to another device",
                allowed="an axis of at least 2",
                nearest=f"--config.mesh.{AXES[0]}=-1 on several devices",
            )
        )
    all_bytes = sizes(ends[0], max(ends[0], min(ends[1], room_bytes(mesh))))
    num_machines = peers.num_machines()
    if is_main:
        room = "" if all_bytes == sizes(*ends) else "; larger sizes do not fit on a device"
        lines = [f"mesh         {describe(mesh, num_machines)}", *(f"note         {note}" for note in notes)]
        lines.append(f"sizes        {format_bytes(all_bytes[0])} to {format_bytes(all_bytes[-1])}{room}")
        print("\n".join(lines), flush=True)
    total = len(along) * len(OPERATIONS) * len(all_bytes)
    with tqdm.tqdm(total=total, disable=None if is_main else True, unit="size", file=sys.stderr) as bar:
        found = sweep(mesh, all_bytes, limit_seconds, tell=lambda _: bar.update())
    if is_main:
        print(f"\n{measurements.text(found)}")
        if given.json:
            output_files.write("--json", given.json, json.dumps(measurements.json_of(found), indent=2) + "\n")
            print(f"written      {given.json}")
        if given.out:
            output_files.write_picture("--out", given.out, bandwidth_chart.figure(found), dpi=130)
            print(f"written      {given.out}")
    return not any(row.wrong for row in found.rows)
