"""The configuration of a run that is there, for commands that read its weights."""

import argparse
import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path

from meshtrain.cli import flags
from meshtrain.cli.config_file import load
from meshtrain.config.config import CONFIG_FILE, Config, built, configure, resolve
from meshtrain.config.former import FORMER
from meshtrain.config.from_hugging_face import of_folder
from meshtrain.config.resume import from_json
from meshtrain.errors import UserError, warn
from meshtrain.files import read_json, what_is_at
from meshtrain.hf.config_json import is_described
from meshtrain.hf.folder import opened


def configuration(arguments: argparse.Namespace, also: Sequence[str], *, reads_data: bool) -> Config:
    """Returns the configuration of the run in the workdir, changed by the command line's overrides.

    The base is the run's own config.json, so options of its command line need not be repeated. `--config` is read only
    if the workdir has no config.json (a bare folder of checkpoints); otherwise it only names the workdir. Of a Hugging
    Face folder in place of a workdir, it is what `of_folder` makes of its config.json. Either may be a stranger's: no
    function is imported that only its config.json names.

    Args:
      arguments: from `flags.arguments`.
      also: problems of other flags, to be reported with those of the arguments and the configuration.
      reads_data: see `resolve`.

    Raises:
      UserError: all problems, one line each.
    """
    if is_described(arguments.workdir):
        ignore = arguments.overrides.get("init_ignore") or ""
        opened(arguments.workdir, ignore)  # problems of config.json and of the files together
        given = of_folder(arguments.workdir, ignore)
        return resolve(given, arguments.overrides, [*arguments.problems, *also], reads_data=reads_data)
    own = arguments.workdir / CONFIG_FILE
    if what_is_at(own) != "a file":
        return configure(arguments, also, reads_data=reads_data)
    if arguments.config is not None and arguments.workdir != flags.default_workdir(arguments.config):
        warn(f"--config={arguments.config} is not read: {own} describes the weights; --config.GROUP.FIELD changes it")
    try:
        text = own.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{own}: not UTF-8 ({error}); allowed: what a run wrote; nearest: another --workdir") from error
    instead = {key: value for key, value in arguments.overrides.items() if key in FORMER}
    given = from_json(text, instead | _refuse_functions(text, own, arguments))
    return resolve(given, arguments.overrides, [*arguments.problems, *also], reads_data=reads_data)


def _refuse_functions(text: str, place: Path, arguments: argparse.Namespace) -> dict[str, str]:
    """Returns dotted key -> the command line's value, of the options that may name a function.

    Raises:
      UserError: config.json names one that neither the command line nor the file of `--config` names; one line.
    """
    schema = flags.schema(Config())
    keys = [key for key, entry in schema.items() if entry.names.startswith("function")]
    chosen = {key: arguments.overrides[key] for key in keys if key in arguments.overrides}
    try:
        values = flags.flatten(read_json(text))
    except (ValueError, AttributeError):
        return chosen  # `from_json` says what is wrong
    foreign = {key: str(values[key]) for key in keys if key in values and ":" in str(values[key]) and key not in chosen}
    if foreign and arguments.config is not None:
        of_user = flags.flatten(dataclasses.asdict(built(load(arguments.config, list(schema)), {})[0]))
        foreign = {key: name for key, name in foreign.items() if of_user[key] != name}
    if not foreign:
        return chosen
    got = ", ".join(f"{key}: got '{name}'" for key, name in foreign.items())
    fix = shlex.join([*arguments.command, *(f"--config.{key}={name}" for key, name in foreign.items())])
    allowed = "a function that the command line or the file of --config names too, because it would run here"
    raise UserError(f"{place}: {got}; allowed: {allowed}; nearest: {fix}")
