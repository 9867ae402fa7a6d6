"""The mesh that a run's command line asks for."""

import argparse

from meshtrain.config.config import configure
from meshtrain.layout.mesh import MeshOptions


def mesh_options(arguments: argparse.Namespace) -> MeshOptions:
    """Returns the sizes of the mesh of a configuration.

    Args:
      arguments: what `flags.arguments` returns.

    Raises:
      UserError: all problems of the configuration.
    """
    return configure(arguments).mesh
