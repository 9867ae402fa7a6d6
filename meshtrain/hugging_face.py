"""Hugging Face folders: prints a configuration file for one, or imports one into a workdir.

python -m meshtrain hf config DIR > configs/mine.py
python -m meshtrain hf import DIR --to=runs/mine
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

from meshtrain.config.config import CONFIG_FILE, to_json
from meshtrain.config.of_folder import as_file
from meshtrain.config.of_run import configuration
from meshtrain.hf.config import is_described
from meshtrain.launch import peers
from meshtrain.run import weights_from
from meshtrain.run.weights import assembled
from meshtrain.store.checkpoint import CHECKPOINTS, Checkpoints
from meshtrain.words import flags
from meshtrain.words.errors import UserError, run
from meshtrain.words.files import write_whole
from meshtrain.words.paths import expanded, what_is_at

ACTIONS = ("config", "import")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m meshtrain hf", description="Reads Hugging Face folders.", add_help=False
    )
    parser.add_argument("action", help="config prints a configuration file, import writes a workdir")
    parser.add_argument("directory", help="the folder, with config.json and safetensors files")
    parser.add_argument("--to", metavar="WORKDIR", help="for import: the workdir, which is new or empty")
    return parser


def _problems(arguments: argparse.Namespace) -> list[str]:
    """Returns one line for each wrong argument."""
    found = []
    if arguments.action not in ACTIONS:
        found.append(f"hf: got '{arguments.action}'; allowed: {', '.join(ACTIONS)}; nearest: hf config DIR")
    if not is_described(arguments.directory):
        what = what_is_at(expanded(arguments.directory))
        got = "a folder without config.json of a model" if what == "a folder" else what
        found.append(f"{arguments.directory}: got {got}; allowed: a Hugging Face folder; nearest: download one")
    if arguments.action == "config" and arguments.to is not None:
        found.append(
            f"--to: got '{arguments.to}' with config, which prints; allowed: none; nearest: hf import DIR --to=W"
        )
    if arguments.action == "import":
        found += _target_problems(arguments.to)
    return found


def _target_problems(to: str | None) -> list[str]:
    if not to:
        return ["--to: got nothing; allowed for import: a new folder; nearest: --to=runs/imported"]
    target = expanded(to).absolute()
    what = what_is_at(target)
    if what == "a folder" and any(target.iterdir()):
        return [f"--to: got '{to}', which is not empty; allowed: a new folder; nearest: --to={to}-imported"]
    return flags.unwritable(target)


def _import(arguments: argparse.Namespace) -> None:
    """Writes a workdir with the configuration of a folder, and its weights as the checkpoint of step 0."""
    arguments.workdir = expanded(arguments.directory)
    config = configuration(arguments, [], reads_data=False)
    assembly = assembled(config, arguments.workdir, None)
    like = assembly.kept_state.params
    weights_from.refuse_other_params(arguments.workdir, like)
    params, _ = weights_from.restore_params(arguments.workdir, None, like)
    target = expanded(arguments.to).absolute()
    extra = {"config": json.loads(to_json(config)), "versions": {"jax": jax.__version__}}
    with Checkpoints(target / CHECKPOINTS, config.checkpoint) as checkpoints:
        checkpoints.save(0, {"params": params}, extra)
        checkpoints.wait()
    if peers.is_main_process():
        write_whole(target / CONFIG_FILE, to_json(config))
        print(f"{assembly.task.num_parameters:,} parameters in {Path(arguments.to)}")


def main(argv: Sequence[str]) -> int:
    """Runs `hf config` or `hf import`; returns the exit code.

    Raises:
      UserError: a wrong argument, or a folder with problems; one line for each.
    """
    arguments = flags.arguments(argv, _parser())
    if problems := [*arguments.problems, *_problems(arguments)]:
        raise UserError(*problems)
    if arguments.action == "config":
        print(as_file(arguments.directory), end="")
    else:
        _import(arguments)
    return 0


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))
