"""Builds the configuration and the mesh from command-line arguments like those of `train`."""

import argparse
import dataclasses

from meshtrain.config.build import build, file_content
from meshtrain.config.schema import Config
from meshtrain.errors import refuse
from meshtrain.sharding.mesh import MeshOptions, check
from meshtrain.sharding.rules import AXES


def names_mesh(given: argparse.Namespace) -> bool:
    """Returns whether a command line sets mesh sizes, directly or by a configuration file."""
    return given.config is not None or any(key.startswith("mesh.") for key in given.overrides)


def build_config(given: argparse.Namespace) -> Config:
    """Builds the configuration of a command line, in which `--config` is optional.

    Except for the mesh sizes, the options are not checked against each other: for example, the batch size need not be
    divisible by the mesh. If no mesh size is set, all devices are on the first axis.

    Raises:
      UserError: all problems of the file, of the overrides and of the mesh sizes.
    """
    made, problems = build(file_content(given.config), given.overrides)
    refuse([*problems, *check(made.mesh)])
    return made if names_mesh(given) else dataclasses.replace(made, mesh=MeshOptions(**{AXES[0]: -1}))
