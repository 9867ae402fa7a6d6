"""The command line `python -m meshtrain COMMAND ...`; `meshtrain COMMAND ...` after the package is installed."""

import sys

from meshtrain import user_functions
from meshtrain.cli import first_signals

if __name__ == "__main__":
    first_signals.begin(is_training=sys.argv[1:2] == ["train"])  # before the other imports, which take time

import importlib.metadata
import importlib.util
from collections.abc import Sequence
from typing import NoReturn

from meshtrain import __version__
from meshtrain.cli.flags import program
from meshtrain.cli.tables import align
from meshtrain.errors import Problem, UserError, fold, nearest, run

# command -> (module whose `main(argv)` runs it, one line of text). Each module also runs by itself, with `python -m`.
COMMANDS = {
    "train": ("meshtrain.main", "train, or resume the run in the workdir"),
    "explain": ("meshtrain.explain", "print how each array of a configuration is sharded"),
    "plan": ("meshtrain.plan.__main__", "compile the step for a cluster, which need not exist: memory, time, traffic"),
    "pipeline": ("meshtrain.pipeline.__main__", "print or draw a pipeline schedule"),
    "generate": ("meshtrain.generate", "continue or answer prompts with a run's weights"),
    "evaluate": ("meshtrain.evaluate", "score a run's weights: loss, perplexity, bits per byte, metrics"),
    "agree": ("meshtrain.agree.__main__", "compare meshes with one device: losses, gradients, steps, array by array"),
    "report": ("meshtrain.report.__main__", "write a page about runs: curves, differences, memory, mesh, samples"),
    "prepare": ("meshtrain.data.prepare", "turn text into a token file"),
    "verify": ("meshtrain.verify", "compare checkpoints and token files with their checksums"),
    "bench-collectives": ("meshtrain.probe.bench_collectives", "time every collective along every axis of the mesh"),
    "doctor": ("meshtrain.probe.doctor", "check the machines of a job before it starts"),
    "hf": (
        "meshtrain.hugging_face",
        "Hugging Face folders: print a configuration file, import into a workdir, export a run",
    ),
    "launch": ("meshtrain.launch.__main__", "start a program in several processes on this machine"),
    "config": ("meshtrain.config.__main__", "list the fields of a configuration: type, default, meaning"),
}
_EXAMPLE = "train --config=3d"
# Command or flag -> other words that users may type for it.
_OTHER_WORDS = {
    _EXAMPLE: "fit finetune run sft pretrain resume",
    "generate": "sample infer inference predict chat",
    "evaluate": "eval test validate score",
    "prepare": "tokenize preprocess",
    "hf": "import export convert",
    "doctor": "check",
    "--version": "version v",
    "--help": "help usage",
}
_NAMED_WITH = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint")  # printed by `--version`


def usage() -> str:
    """Returns the text of `--help`: one line for each command."""
    rows = [(command, text) for command, (_, text) in COMMANDS.items()]
    return "\n".join(
        [
            f"usage: {program()} COMMAND [ARGUMENT ...]",
            "",
            align(rows, ("command", "what it does")),
            "",
            (
                f"`{program()} COMMAND --help` lists a command's arguments, `{program()} --version` the installed "
                "versions."
            ),
            f"An example: {program()} {_EXAMPLE}",
        ]
    )


def versions() -> str:
    """Returns the text of `--version`: the versions of meshtrain and of packages that affect its results."""
    lines = [f"meshtrain {__version__}"]
    for name in _NAMED_WITH:
        found = [distribution.version for distribution in importlib.metadata.distributions(name=name)]
        lines.append(f"{name} {found[0] if found else 'not installed'}")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Runs the command named by the first word, passes it the remaining words, and returns its exit code.

    Args:
      argv: the words after `python -m meshtrain`.

    Raises:
      UserError: the command is unknown, or the command itself raises it.
    """
    command, *rest = argv or ["--help"]
    if command in ("-h", "--help"):
        print(usage())
        return 0
    if command == "--version":
        print(versions())
        return 0
    if command not in COMMANDS:
        meant = [ours for ours, words in _OTHER_WORDS.items() if fold(command) in words.split()]
        fix, example = ("", meant[0]) if meant else (nearest(command, COMMANDS), _EXAMPLE)
        raise UserError(Problem("command", got=f"'{command}'", allowed=", ".join(COMMANDS), fix=fix, nearest=example))
    module, _ = COMMANDS[command]
    package = module.split(".")[1]
    if not importlib.util.find_spec(f"meshtrain.{package}"):
        raise UserError(
            Problem(
                "command",
                got=f"'{command}', but the folder meshtrain/{package} is missing",
                allowed="commands whose folder is installed",
                nearest="install the package again",
            )
        )
    # Import only this module: others may load JAX, which is too slow for `--help`.
    imported = user_functions.import_modules(module)[0]
    if command != "train":  # train handles signals itself from its first line on
        first_signals.over()
    return imported.main(rest) or 0


def console() -> NoReturn:
    """Runs the program `meshtrain`, the entry point of an installed package."""
    run(lambda: main(sys.argv[1:]))


if __name__ == "__main__":
    console()
