"""The weights of a run that is there, on this machine's devices, for commands that only compute with them."""

import dataclasses
import sys
from pathlib import Path
from typing import NamedTuple

from meshtrain.assemble import Assembly, assemble, stored_params
from meshtrain.config.config import Config
from meshtrain.config.folded import without_pipeline
from meshtrain.launch import distributed, peers
from meshtrain.layout.mesh import mesh_shape, num_needed
from meshtrain.models.task import Params
from meshtrain.run import weights_from


class Weights(NamedTuple):
    """A run's weights with what computes with them.

    Attributes:
      assembly: mesh, task, shardings and functions.
      params: with the shapes and shardings of `assembly.state.params`.
      step: of the checkpoint that they are from.
    """

    assembly: Assembly
    params: Params
    step: int


def assembled(config: Config, workdir: Path, step: int | None, *, folds_pipeline: bool = False) -> Assembly:
    """Returns the assembly of a run's configuration on the devices of this machine; reads no weights, compiles nothing.

    Args:
      config: of the run in the workdir, overrides included.
      workdir: the run's folder, or a Hugging Face folder.
      step: of the checkpoint; None: the newest.
      folds_pipeline: whether the pipeline axis is folded into others, see `config.folded`; one line says so.

    Raises:
      UserError: the configuration does not fit the devices, or there is no such checkpoint.
    """
    devices, _ = distributed.start(num_needed(config.mesh), is_open=-1 in dataclasses.astuple(config.mesh))
    shape = mesh_shape(config.mesh, len(devices), simulated=devices[0].platform == "cpu")
    also = weights_from.problems(config, workdir, step)
    if folds_pipeline and not also:
        config, shape, line = without_pipeline(config, shape)
        if line and peers.is_main_process():
            print(f"meshtrain: {line}", file=sys.stderr, flush=True)
    return assemble(config, shape, devices, also=also)


def restored(assembly: Assembly, workdir: Path, step: int | None) -> Weights:
    """Returns the weights of a checkpoint; for the arguments see `assembled`.

    Raises:
      UserError: the checkpoint is damaged, or of another model.
    """
    kept, found = weights_from.restore_params(workdir, step, assembly.kept_state.params)
    return Weights(assembly, stored_params(assembly, kept), found)
