"""The mesh that a command line asks for, in the words of `train`."""

import argparse

from meshtrain.config.config import Config, built
from meshtrain.layout.axes import AXES
from meshtrain.layout.mesh import MeshOptions, check
from meshtrain.words import flags
from meshtrain.words.config_file import load
from meshtrain.words.errors import UserError


def mesh_options(given: argparse.Namespace) -> MeshOptions:
    """Returns the sizes of the mesh that the command line names; without any, all devices are on the first axis.

    The rest of a configuration need not fit the mesh: a batch that does not divide is no matter here.

    Args:
      given: what `flags.arguments` returns.

    Raises:
      UserError: all problems of the file, of the overrides and of the sizes.
    """
    overrides = dict(given.overrides)
    if given.config is None and not any(key.startswith("mesh.") for key in overrides):
        overrides[f"mesh.{AXES[0]}"] = "-1"
    content = {} if given.config is None else load(given.config, list(flags.schema(Config())))
    made, found = built(content, overrides)
    if found := [*found, *check(made.mesh)]:
        raise UserError(*found)
    return made.mesh
