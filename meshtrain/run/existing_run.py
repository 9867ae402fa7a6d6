"""Loads the configuration, the assembly and the weights of an existing run, for commands that read its weights.

A run is a workdir or a Hugging Face folder. It may come from another user, so its config.json is not trusted.
"""

import argparse
import contextlib
import dataclasses
import json
import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from meshtrain.assembly.assemble import Assembly, assemble
from meshtrain.assembly.facts import stored_params
from meshtrain.checkpoint import other_runs
from meshtrain.checkpoint.checkpoint import CHECKPOINTS
from meshtrain.cli import flags, foreign
from meshtrain.config.build import build, file_content
from meshtrain.config.from_hugging_face import of_folder
from meshtrain.config.resolve import configure, resolve
from meshtrain.config.resume import from_json
from meshtrain.config.schema import CONFIG_FILE, Config
from meshtrain.errors import Problem, UserError, warn
from meshtrain.files import JsonObject, is_url, read_json, what_is_at
from meshtrain.hf import config_json as hf_config
from meshtrain.hf import folder as hf_folder
from meshtrain.launch import distributed, peers
from meshtrain.models.task import Params
from meshtrain.run.generating import without_pipeline
from meshtrain.run.memory_check import refuse_large_weights
from meshtrain.run.weights import restore_params, weights_problems
from meshtrain.sharding.mesh import mesh_shape, num_needed

LAST, AVERAGE = WEIGHTS = ("last", "average")


def add_weights_flag(parser: argparse.ArgumentParser) -> None:
    """Adds the flag `--weights`, which selects the last or the averaged weights of a checkpoint."""
    text = "last, or average: the averaged weights from optimizer.average (default: last)"
    parser.add_argument("--weights", default=LAST, help=text)


def choice_problems(which: str, directory: str | Path) -> list[Problem]:
    """Returns a problem if the value of `--weights` is invalid for a directory, else []; reads no checkpoint.

    Args:
      which: the value of `--weights`, which must be `last` or `average`.
      directory: a workdir or a Hugging Face folder; the latter has no averages.
    """
    if which not in WEIGHTS:
        return [Problem("--weights", got=f"'{which}'", allowed=", ".join(WEIGHTS), nearest=f"--weights={LAST}")]
    if which == AVERAGE and hf_config.is_described(directory):
        return [
            Problem(
                "--weights",
                got=f"{AVERAGE} with a Hugging Face folder, which has no averages",
                allowed=LAST,
                nearest="leave it out",
            )
        ]
    return []


def configuration(
    arguments: argparse.Namespace, also: Sequence[str], *, reads_data: bool, reads_origin: bool = False
) -> Config:
    """Returns the configuration of the run in the workdir, changed by the command line's overrides.

    The configuration comes from the workdir's config.json, so options of the run's command line need not be repeated.
    If the workdir has no config.json (a bare folder of checkpoints), the file of `--config` is read instead; otherwise
    `--config` only names the workdir. For a bucket, the newest checkpoint contains the configuration. For a Hugging
    Face folder, `of_folder` converts its config.json. A workdir or folder may come from another user: `foreign`
    restricts the paths and functions that its config.json may name.

    Args:
      arguments: the parsed command line, from `flags.arguments`.
      also: problems of other flags, to be reported together with problems of the arguments and the configuration.
      reads_data: whether the command reads the run's data, so that the data files must exist on this machine.
      reads_origin: whether the command also reads the folder from which the run got its starting weights.

    Raises:
      UserError: all problems, one line each.
    """
    uses = {foreign.WEIGHTS, foreign.TEXT, *([foreign.DATA] * reads_data), *([foreign.ORIGIN] * reads_origin)}
    if hf_config.is_described(arguments.workdir):
        ignore = arguments.overrides.get("init_ignore") or ""
        hf_folder.open_folder(arguments.workdir, ignore)  # problems of config.json and of the files together
        given = of_folder(arguments.workdir, ignore)
        return resolve(given, arguments.overrides, [*arguments.problems, *also], reads_data=reads_data)
    if is_url(str(arguments.workdir)):
        own, was = arguments.workdir, other_runs.extra_of_newest(arguments.workdir)
        if "config" not in was:
            raise UserError(
                Problem(own, got="no complete checkpoint", allowed="the checkpoints of a run", nearest="another")
            )
        return _change(json.dumps(was["config"]), own, arguments, also, uses)
    own = arguments.workdir / CONFIG_FILE
    if what_is_at(own) != "a file":
        return configure(arguments, also, reads_data=reads_data)
    if arguments.config is not None and arguments.workdir != flags.default_workdir(arguments.config):
        warn(
            f"--config={arguments.config} is not read: {own} describes the weights; use --config.GROUP.FIELD "
            "to change a field"
        )
    try:
        text = own.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            Problem(own, fault=f"not UTF-8 ({error})", allowed="the file that a run wrote", nearest="another --workdir")
        ) from error
    return _change(text, own, arguments, also, uses)


def _change(
    text: str, place: str | Path, arguments: argparse.Namespace, also: Sequence[str], uses: Collection[str]
) -> Config:
    """Returns the configuration that a run's JSON describes, changed by the command line's overrides.

    Args:
      text: the configuration as JSON.
      place: the config.json, or the bucket with the checkpoint that contains the configuration; for errors.
      arguments: the parsed command line, from `flags.arguments`.
      also: earlier problems, to be reported together with the problems of this function.
      uses: the purposes for which the command reads the run: elements of `foreign.USES`.

    Raises:
      UserError: the text is not a configuration, or names functions or files outside of the run's folder.
    """
    overrides = arguments.overrides
    instead = {key: value for key, value in overrides.items() if _names_function(key)}
    content = JsonObject()
    with contextlib.suppress(ValueError, TypeError):  # `from_json` reports the error
        content = dict(read_json(text))
    _refuse_foreign(content, place, arguments, uses, foreign.FIELDS)
    given = from_json(text, instead)
    # The options of a custom task are known only after its function is imported.
    own = {key: foreign.Field(foreign.PATH) for key, entry in flags.schema(given).items() if entry.names == "path"}
    _refuse_foreign(content, place, arguments, uses, {**own, **foreign.FIELDS})
    return resolve(given, overrides, [*arguments.problems, *also], reads_data=foreign.DATA in uses)


def _names_function(key: str) -> bool:
    return key in foreign.FIELDS and foreign.FIELDS[key].kind == foreign.FUNCTION


def _refuse_foreign(
    content: JsonObject,
    place: str | Path,
    arguments: argparse.Namespace,
    uses: Collection[str],
    fields: Mapping[str, foreign.Field],
) -> None:
    """Rejects a run's configuration that names a function, or a file outside of the run's folder.

    Such a value is allowed if the user names the same value: on the command line or in the file of `--config`.

    Args:
      content: the run's configuration as a nested JSON object.
      place: the config.json, or the bucket with the checkpoint that contains the configuration.
      arguments: the parsed command line.
      uses: the purposes for which the command reads the run; only fields that these purposes need are checked.
      fields: dotted key -> the field that may name a function or a path.

    Raises:
      UserError: one line with all rejected values, and the command line that allows them.
    """
    values, overrides = flags.flatten(content), arguments.overrides
    source = overrides["data.source"] if "data.source" in overrides else values.get("data.source")
    if source == "tokens":  # the tokenizer is in the folder of the data
        uses = {*uses, foreign.DATA}
    found = foreign.outside(content, place, uses, fields)
    found = {key: value for key, value in found.items() if key not in overrides}
    if found and arguments.config is not None:
        of_user = flags.flatten(build(file_content(arguments.config), {})[0])
        found = {key: value for key, value in found.items() if key not in of_user or of_user[key] != value}
    again = [f"--config.{key}={value}" for key, value in found.items()]
    foreign.refuse(found, place, shlex.join([*arguments.command, *again]), fields)


def checkpoints_of(config: Config, workdir: str | Path) -> str | Path:
    """Returns the folder or bucket of a run's checkpoints.

    Args:
      config: the run's configuration, including the command line's overrides.
      workdir: a workdir; a folder or bucket of checkpoints and a Hugging Face folder are returned unchanged.
    """
    if is_url(str(workdir)) or what_is_at(Path(workdir) / CONFIG_FILE) != "a file" or hf_config.is_described(workdir):
        return workdir
    inner = Path(workdir) / CHECKPOINTS
    return config.checkpoint.directory or (inner if what_is_at(inner) == "a folder" else workdir)


def assemble_run(config: Config, workdir: str | Path, step: int | None, *, folds_pipeline: bool = False) -> Assembly:
    """Starts JAX and returns the assembly of an existing run; reads no weights, compiles nothing.

    Args:
      config: the run's configuration, including the command line's overrides.
      workdir: the run's folder, or a Hugging Face folder.
      step: the step whose checkpoint must exist; None: the newest.
      folds_pipeline: whether to fold the pipeline axis into tensor and fsdp, and print a line about it.

    Raises:
      UserError: the configuration does not fit the devices, the weights do not fit the memory, or there is no such
        checkpoint.
    """
    devices, _ = distributed.start(num_needed(config.mesh), is_open=-1 in dataclasses.astuple(config.mesh))
    shape = mesh_shape(config.mesh, len(devices), simulated=devices[0].platform == "cpu")
    also = weights_problems(config, checkpoints_of(config, workdir), step)
    if folds_pipeline and not also:
        config, shape, line = without_pipeline(config, shape)
        if line and peers.is_main_process():
            print(f"meshtrain: {line}", file=sys.stderr, flush=True)
    assembly = assemble(config, shape, devices, also=also)
    refuse_large_weights(assembly)
    return assembly


def restore_weights(assembly: Assembly, workdir: str | Path, step: int | None, which: str = LAST) -> tuple[Params, int]:
    """Returns the weights of a checkpoint and its step.

    Args:
      assembly: the run's assembly, from `assemble_run`; the weights have the shapes and shardings of
        `assembly.state.params`.
      workdir: the run's folder, or a Hugging Face folder.
      step: the step of the checkpoint; None: the newest undamaged checkpoint.
      which: `last`, or `average` for the averaged weights.

    Raises:
      UserError: the checkpoint is damaged, is of another model, or has no averages although `which` requests them.
    """
    place = checkpoints_of(assembly.config, workdir)
    kept, found = restore_params(place, step, assembly.states.kept.params, averaged=which == AVERAGE)
    return stored_params(assembly, kept), found
