"""A run that is there, for commands that read its weights: its configuration, its assembly here, its weights.

A workdir or a Hugging Face folder, of this user or a stranger.
"""

import argparse
import dataclasses
import json
import shlex
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from meshtrain.assemble import Assembly, assemble, stored_params
from meshtrain.checkpoint import other_runs
from meshtrain.cli import flags
from meshtrain.config.config import CONFIG_FILE, Config, built, configure, file_content, resolve
from meshtrain.config.former import FORMER
from meshtrain.config.from_hugging_face import of_folder
from meshtrain.config.resume import from_json
from meshtrain.data.sources import reads_documents
from meshtrain.data.tokenizer import TOKENIZER, settings, tokenizer_file
from meshtrain.errors import UserError, warn
from meshtrain.files import expanded, is_url, read_json, what_is_at
from meshtrain.hf import adapters, tensor_files
from meshtrain.hf import config_json as hf_config
from meshtrain.hf import folder as hf_folder
from meshtrain.hf.adapters import Adapters
from meshtrain.hf.export import byte_tokenizer
from meshtrain.launch import distributed, peers
from meshtrain.models.task import Params
from meshtrain.run.generating import without_pipeline
from meshtrain.run.memory_check import refuse_large_weights
from meshtrain.sharding.mesh import mesh_shape, num_needed

LAST, AVERAGE = WEIGHTS = ("last", "average")


def add_weights_flag(parser: argparse.ArgumentParser) -> None:
    """Adds the flag that says which weights of a checkpoint are read."""
    text = "last, or average: what optimizer.average has made of them (default: last)"
    parser.add_argument("--weights", default=LAST, help=text)


def choice_problems(which: str, directory: str | Path) -> list[str]:
    """Returns one line if `--weights` has no meaning in a directory, else none; reads no checkpoint."""
    if which not in WEIGHTS:
        return [f"--weights: got '{which}'; allowed: {', '.join(WEIGHTS)}; nearest: --weights={LAST}"]
    if which == AVERAGE and hf_config.is_described(directory):
        return [
            f"--weights: got {AVERAGE} with a Hugging Face folder, which has no averages; allowed: {LAST}; nearest: "
            "leave it out"
        ]
    return []


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
    if hf_config.is_described(arguments.workdir):
        ignore = arguments.overrides.get("init_ignore") or ""
        hf_folder.opened(arguments.workdir, ignore)  # problems of config.json and of the files together
        given = of_folder(arguments.workdir, ignore)
        return resolve(given, arguments.overrides, [*arguments.problems, *also], reads_data=reads_data)
    if is_url(str(arguments.workdir)):
        own, was = arguments.workdir, other_runs.recorded(arguments.workdir)
        if "config" not in was:
            raise UserError(f"{own}: got no complete checkpoint; allowed: where a run has saved; nearest: another")
        return _changed(json.dumps(was["config"]), own, arguments, also, reads_data=reads_data)
    own = arguments.workdir / CONFIG_FILE
    if what_is_at(own) != "a file":
        return configure(arguments, also, reads_data=reads_data)
    if arguments.config is not None and arguments.workdir != flags.default_workdir(arguments.config):
        warn(f"--config={arguments.config} is not read: {own} describes the weights; --config.GROUP.FIELD changes it")
    try:
        text = own.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{own}: not UTF-8 ({error}); allowed: what a run wrote; nearest: another --workdir") from error
    return _changed(text, own, arguments, also, reads_data=reads_data)


def _changed(
    text: str, place: str | Path, arguments: argparse.Namespace, also: Sequence[str], *, reads_data: bool
) -> Config:
    instead = {key: value for key, value in arguments.overrides.items() if key in FORMER}
    given = from_json(text, instead | _refuse_functions(text, place, arguments))
    return resolve(given, arguments.overrides, [*arguments.problems, *also], reads_data=reads_data)


def _refuse_functions(text: str, place: str | Path, arguments: argparse.Namespace) -> dict[str, str]:
    """Returns dotted key -> the command line's value, of the options that may name a function.

    Raises:
      UserError: config.json names one that neither the command line nor the file of `--config` names; one line.
    """
    keys = [key for key, entry in flags.schema(Config()).items() if entry.names.startswith("function")]
    chosen = {key: arguments.overrides[key] for key in keys if key in arguments.overrides}
    try:
        values = flags.flatten(read_json(text))
    except (ValueError, TypeError):
        return chosen  # `from_json` says what is wrong
    foreign = {key: str(values[key]) for key in keys if key in values and ":" in str(values[key]) and key not in chosen}
    if foreign and arguments.config is not None:
        of_user = flags.flatten(built(file_content(arguments.config), {})[0])
        foreign = {key: name for key, name in foreign.items() if of_user[key] != name}
    if not foreign:
        return chosen
    got = ", ".join(f"{key}: got '{name}'" for key, name in foreign.items())
    fix = shlex.join([*arguments.command, *(f"--config.{key}={name}" for key, name in foreign.items())])
    allowed = "a function that the command line or the file of --config names too, because it would run here"
    raise UserError(f"{place}: {got}; allowed: {allowed}; nearest: {fix}")


def assembled(config: Config, workdir: str | Path, step: int | None, *, folds_pipeline: bool = False) -> Assembly:
    """Returns the assembly of a run's configuration on the devices of this machine; reads no weights, compiles nothing.

    Args:
      config: of the run in the workdir, overrides included.
      workdir: the run's folder, or a Hugging Face folder.
      step: of the checkpoint; None: the newest.
      folds_pipeline: whether the pipeline axis is folded into others, see `without_pipeline`; one line says so.

    Raises:
      UserError: the configuration does not fit the devices, or there is no such checkpoint.
    """
    devices, _ = distributed.start(num_needed(config.mesh), is_open=-1 in dataclasses.astuple(config.mesh))
    shape = mesh_shape(config.mesh, len(devices), simulated=devices[0].platform == "cpu")
    also = weights_problems(config, workdir, step)
    if folds_pipeline and not also:
        config, shape, line = without_pipeline(config, shape)
        if line and peers.is_main_process():
            print(f"meshtrain: {line}", file=sys.stderr, flush=True)
    assembly = assemble(config, shape, devices, also=also)
    refuse_large_weights(assembly)
    return assembly


def restored(assembly: Assembly, workdir: str | Path, step: int | None, which: str = LAST) -> tuple[Params, int]:
    """Returns the weights of a checkpoint, as `assembly.state.params` has them, and its step; see `assembled`.

    Raises:
      UserError: the checkpoint is damaged, of another model, or without averages where `which` asks for them.
    """
    kept, found = restore_params(workdir, step, assembly.kept_state.params, averaged=which == AVERAGE)
    return stored_params(assembly, kept), found


def beneath(config: Config) -> tuple[str, Adapters | None]:
    """Returns the place of the weights that a run begins with, and the adapters of `init_from` where they are peft's.

    Raises:
      UserError: the adapters cannot be read, or have no model here.
    """
    found = adapters.opened(config.init_from) if adapters.is_folder(config.init_from) else None
    if found is None and config.init_base:
        raise UserError(f"init_base: got '{config.init_base}' without adapters of peft; allowed: ''; nearest: ''")
    base = config.init_from if found is None else config.init_base or found.base
    if found and not hf_config.is_decoder(config.model):
        raise UserError(f"got adapters of peft with task={config.task}; allowed: decoder; nearest: task=decoder")
    if found and not is_url(base) and (not base or what_is_at(expanded(base)) != "a folder"):
        raise UserError(f"got adapters of '{base}', which is no folder here; allowed: the model beneath them, or a run "
                        "with it; nearest: --config.init_base=DIR")  # fmt: skip
    return base, found


def is_by_name(config: Config, base: str | Path) -> bool:
    """Returns whether tensors of a Hugging Face folder have the names of a run's weights: its task is no decoder."""
    return hf_config.is_described(base) and not hf_config.is_decoder(config.model)


def weights_problems(config: Config, directory: str | Path, step: int | None = None) -> list[str]:
    """Returns one line for each reason why a run cannot take its weights from a directory; reads no array.

    Args:
      config: of the run; its model has to be that of a Hugging Face folder.
      directory: a workdir, its directory `checkpoints`, or a Hugging Face folder.
      step: of the checkpoint; None: the newest.
    """
    try:
        if directory == config.init_from:
            directory, _ = beneath(config)
        if is_by_name(config, directory):
            return tensor_files.tensors(expanded(directory))[1]
        if not hf_config.is_described(directory):
            with other_runs.find(directory) as checkpoints:
                if step is not None:
                    checkpoints.refuse_unknown(step)
            return []
        opened = hf_folder.opened(directory, config.init_ignore)
    except UserError as error:
        return list(error.problems)
    if step is not None:
        return [
            f"--step: got {step} with a Hugging Face folder, which has no steps; allowed: none; nearest: leave it out"
        ]
    lines = hf_config.differences(config.model, opened.model.options, config.sequence_length, directory)
    lines += _other_tokenizer(config, opened.directory)
    if (note := hf_config.head_note(directory, opened.model)) and not lines and peers.is_main_process():
        warn(note)
    if opened.left_out and not lines and peers.is_main_process():
        warn(f"{directory}: {opened.left_out} tensors of its model of images are left out; this is its model of text")
    if 0 < opened.model.max_length < config.sequence_length and not lines and peers.is_main_process():
        most = opened.model.max_length
        warn(f"sequence_length: got {config.sequence_length}; the model in {directory} was trained on at most {most}")
    return lines


def _other_tokenizer(config: Config, folder: Path) -> list[str]:
    """Returns one line if a run reads text with other tokens than the folder's tokenizer has; added ones may differ."""
    used, own = config.data.tokenizer, folder / TOKENIZER
    if not reads_documents(config.data) or TOKENIZER in config.init_ignore or what_is_at(own) != "a file":
        return []
    if has_same_vocabulary(used, own):
        return []
    return [f"data.tokenizer: got '{used}', and the model has learned the tokens of {own}; allowed: these, or another "
            f"with --config.init_ignore={TOKENIZER}; nearest: --config.data.tokenizer={folder}"]  # fmt: skip


def has_same_vocabulary(used: str, file: Path) -> bool:
    """Returns whether `data.tokenizer` has the vocabulary of a tokenizer.json, but for added tokens."""
    other = json.loads(byte_tokenizer()) if used == "bytes" else settings("", str(tokenizer_file(used)))
    models = [one.get("model") for one in (other, settings("", str(file)))]
    ours, theirs = (model.get("vocab") if isinstance(model, dict) else None for model in models)
    return bool(ours == theirs)


def paths(directory: str | Path) -> list[str]:
    """Returns the paths of the arrays in a workdir's newest checkpoint, or of the weights in a Hugging Face folder.

    Args:
      directory: see `problems`, of which there are none.
    """
    if hf_config.is_described(directory):
        return [weight.path for weight in hf_folder.opened(directory, ignore=None).table]
    with other_runs.find(directory) as checkpoints:
        return list(checkpoints.shapes(checkpoints.steps()[-1]))


def refuse_other_params(directory: str | Path, abstract_params: Params, rounded: Collection[str] = ()) -> None:
    """Compares shapes of weights with those of a model, for a workdir dtypes too; reads no array.

    Args:
      directory: see `problems`, of which there are none.
      abstract_params: pytree of jax.ShapeDtypeStruct.
      rounded: paths of weights whose dtype may differ from the saved one.

    Raises:
      UserError: they differ.
    """
    if hf_config.is_described(directory):
        hf_folder.refuse_other_params(hf_folder.opened(directory, ignore=None), abstract_params)
        return
    with other_runs.find(directory) as checkpoints:
        checkpoints.refuse_other_params(checkpoints.steps()[-1], abstract_params, rounded)


def restore_params(
    directory: str | Path,
    step: int | None,
    abstract_params: Params,
    rounded: Collection[str] = (),
    *,
    averaged: bool = False,
) -> tuple[Params, int]:
    """Reads weights onto this run's shardings. All processes call it together.

    Args:
      directory: see `problems`, of which there are none.
      step: of the checkpoint; None: the newest one that is whole.
      abstract_params: pytree of jax.ShapeDtypeStruct with shardings, layers in layer order.
      rounded: paths of weights whose dtype may differ from the saved one; those of a folder are always converted.
      averaged: see `Checkpoints.restore_params`; a folder has no averages.

    Returns:
      A pytree of jax.Array of the same structure; and the step, 0 for a Hugging Face folder.

    Raises:
      UserError: see `checkpoint.other_runs.restore_params` and `hf.folder.opened`; or processes see other files.
    """
    if not hf_config.is_described(directory):
        return other_runs.restore_params(directory, step, abstract_params, rounded, averaged=averaged)
    found = hf_folder.opened(directory, ignore=None)
    hf_folder.refuse_differences(found)
    return hf_folder.read(found, abstract_params, shows_bar=peers.is_main_process() and sys.stderr.isatty()), 0
