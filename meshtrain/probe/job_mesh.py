"""The configuration and the mesh that a command line asks for, in the words of `train`."""

import argparse
import dataclasses

from meshtrain.config.config import Config, built, file_content
from meshtrain.errors import refuse
from meshtrain.sharding.mesh import MeshOptions, check
from meshtrain.sharding.rules import AXES


def names_mesh(given: argparse.Namespace) -> bool:
    """Returns whether a command line names sizes of the mesh, by itself or in a file."""
    return given.config is not None or any(key.startswith("mesh.") for key in given.overrides)


def typed(given: argparse.Namespace) -> Config:
    """Returns the configuration of a command line that need not name a file, and whose rest need not fit the mesh.

    A batch that does not divide is no matter here. Where no size is named, all devices are on the first axis.

    Raises:
      UserError: all problems of the file, of the overrides and of the sizes.
    """
    made, problems = built(file_content(given.config), given.overrides)
    refuse([*problems, *check(made.mesh)])
    return made if names_mesh(given) else dataclasses.replace(made, mesh=MeshOptions(**{AXES[0]: -1}))
