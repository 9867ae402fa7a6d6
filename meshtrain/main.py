"""Trains: `python -m meshtrain train --config=configs/3d.py [--workdir=DIR] [--config.mesh.tensor=4 ...]`."""

import sys

from meshtrain import user_functions
from meshtrain.cli import output_files
from meshtrain.cli import first_signals

if __name__ == "__main__":
    first_signals.begin(is_training=True)  # before the other imports, which take time

import argparse
import os
import time
from collections.abc import Sequence

from meshtrain.cli import flags
from meshtrain.errors import Problem, run
from meshtrain.launch.early_errors import tell_before_meeting
from meshtrain.launch.signals import stops_at_signals


def main(argv: Sequence[str]) -> int:
    """Trains a configuration, or resumes the run in the workdir, and returns the exit code.

    Args:
      argv: the words after the command.

    Raises:
      UserError: all problems of arguments, configuration and workdir.
    """
    begun_seconds = time.monotonic()  # before the import of JAX, so that goodput includes it
    tell_before_meeting(os.environ)
    extra = argparse.ArgumentParser(
        prog="python -m meshtrain train",
        description="Trains a transformer on a mesh. The same command again resumes the run in its workdir.",
        add_help=False,
    )
    with stops_at_signals():
        arguments = flags.arguments(argv, extra)
        # Imported here, by name: JAX takes seconds to load, and `--help` must be fast.
        # JAX first: if another module has the name jax, packages that import it would log their own warnings.
        _, config, training = user_functions.import_modules(
            "jax.numpy", "meshtrain.config.resolve", "meshtrain.training"
        )
        problems = output_files.unwritable(arguments.workdir)
        if arguments.config is None and all(problem.key != "--config" for problem in arguments.problems):
            allowed = "a file with get_config(), or a name"
            problems.append(Problem("--config", got="nothing", allowed=allowed, nearest=flags.EXAMPLE))
        configuration = config.configure(arguments, problems)
        training.train_resolved(configuration, arguments.workdir, begun_seconds=begun_seconds)
    return 0


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))
