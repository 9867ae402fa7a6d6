"""`device.json` in a run's folder: the mesh, and what one device holds by arithmetic and by the compiler's account."""

import json
from pathlib import Path
from typing import Any

from meshtrain.assemble import Assembly
from meshtrain.observe.folder import DEVICE_FILE
from meshtrain.step.held import bytes_of_device, held, statistics
from meshtrain.words.errors import warn
from meshtrain.words.files import write_whole


def record(run: Path, assembly: Assembly, step: Any, *, writes: bool) -> None:
    """Writes `device.json`, anew at each start, because the mesh may change on resume. A disk error is one warning.

    Args:
      run: the run's folder.
      assembly: what is trained.
      step: its compiled step.
      writes: whether this process is the one that writes (process 0).
    """
    if not writes:
        return
    path = run / DEVICE_FILE
    try:
        write_whole(path, json.dumps(facts(assembly, step), indent=2) + "\n")
    except OSError as error:
        warn(f"{path}: {error}; a report of this run will not show the memory of a device")


def facts(assembly: Assembly, step: Any) -> dict[str, Any]:
    """Returns `mesh` (axis -> size), `device` (the kind), and the bytes of one device.

    `parameters_bytes`, `gradients_bytes`, `moments_bytes`, `residual_bytes`, `on_host_bytes` and `batch_bytes` follow
    from shapes and shardings. `temporary_bytes` and `peak_bytes` are the compiler's account of the step, None where it
    gives none; the gradients are among its temporaries.

    Args:
      assembly: what is trained.
      step: its compiled step.
    """
    state = held(assembly.state, assembly.replicas)
    analysis = step.memory_analysis()
    of_compiler = None if analysis is None else statistics(analysis)
    return {
        "mesh": {axis: int(size) for axis, size in assembly.mesh.shape.items()},
        "device": assembly.mesh.devices.flat[0].device_kind,
        "parameters_bytes": state.parameters,
        "gradients_bytes": state.gradients,
        "moments_bytes": state.moments,
        "residual_bytes": state.residual,
        "on_host_bytes": state.on_host,
        "batch_bytes": bytes_of_device(assembly.batch),
        "temporary_bytes": of_compiler and of_compiler.temporary_bytes,
        "peak_bytes": of_compiler and of_compiler.peak_bytes,
    }
