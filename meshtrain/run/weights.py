"""Starting weights: finds a checkpoint, a Hugging Face folder or adapters, checks them against a model, reads them."""

import json
import shlex
import sys
from collections.abc import Collection
from pathlib import Path

from meshtrain.checkpoint import other_runs
from meshtrain.cli import foreign
from meshtrain.config.schema import Config
from meshtrain.data.encoding.tokenizer_folder import TOKENIZER, settings, tokenizer_file
from meshtrain.data.sources import reads_documents
from meshtrain.errors import Problem, UserError, warn
from meshtrain.files import Json, download_command, expand_user, is_url, read_json, what_is_at
from meshtrain.hf import adapters, tensor_files
from meshtrain.hf import config_json as hf_config
from meshtrain.hf import folder as hf_folder
from meshtrain.hf.adapters import Adapters
from meshtrain.hf.export import byte_tokenizer
from meshtrain.launch import peers
from meshtrain.models.task import Params


def base_weights(config: Config) -> tuple[str, Adapters | None]:
    """Returns the path of a run's starting weights, and the adapters of `init_from` if it is a peft folder.

    The path is `init_from`, or the base model of a peft folder; '' without `init_from`. The second result is None if
    `init_from` is not a peft folder.

    Raises:
      UserError: the adapters cannot be read, their base model is not on this machine, the task is not the decoder, or
        `init_base` is set without adapters.
    """
    found = adapters.open_adapters(config.init_from) if adapters.is_folder(config.init_from) else None
    if found is None and config.init_base:
        raise UserError(
            Problem("init_base", got=f"'{config.init_base}' without peft adapters", allowed="''", nearest="''")
        )
    base = config.init_from if found is None else config.init_base or found.base
    if found and not hf_config.is_decoder(config.model):
        raise UserError(
            Problem(None, got=f"peft adapters with task={config.task}", allowed="decoder", nearest="task=decoder")
        )
    if found and (is_url(base) or not base or what_is_at(expand_user(base)) != "a folder"):
        download = download_command(base)
        place = "init_base" if config.init_base else str(found.directory / hf_config.ADAPTERS_FILE)
        fix = f"--config.init_base=DIR{f', after {download}' if download else ''}"
        raise UserError(
            Problem(
                place,
                got=f"adapters of '{base}', which is not a folder on this machine",
                allowed="the base model of the adapters, or a run with it",
                nearest=fix,
            )
        )
    if found and not config.init_base:
        file = found.directory / hf_config.ADAPTERS_FILE
        named = foreign.outside(read_json(file.read_text(encoding="utf-8")), file, (foreign.WEIGHTS,))
        foreign.refuse(named, file, f"--config.init_base={shlex.quote(base)}")
    return base, found


def content(config: Config) -> dict[str, Json]:
    """Returns {name: value} that identifies the content of a run's starting weights, to compare them across machines.

    For a Hugging Face folder, the value is a hash of its tensors. For another run, it is the step and the hash of its
    newest checkpoint.
    """
    base, _ = base_weights(config)
    if hf_config.is_described(base):
        return {"tensors": tensor_files.content_hash(tensor_files.tensors(expand_user(base))[0])}
    return {"newest checkpoint": other_runs.newest(base)}


def is_by_name(config: Config, base: str | Path) -> bool:
    """Returns whether tensors of `base` are matched with parameters by name.

    It is true if `base` is a Hugging Face folder and the task is not a decoder.
    """
    return hf_config.is_described(base) and not hf_config.is_decoder(config.model)


def weights_problems(config: Config, directory: str | Path, step: int | None = None) -> list[Problem]:
    """Returns an error line for each reason why a run cannot take its weights from a directory; reads no array.

    Args:
      config: the run's configuration; its model must be equal to the model of a Hugging Face folder.
      directory: a workdir, its directory `checkpoints`, or a Hugging Face folder.
      step: the step whose checkpoint must exist; None: the newest.
    """
    try:
        if directory == config.init_from:
            directory, _ = base_weights(config)
        if is_by_name(config, directory):
            return tensor_files.tensors(expand_user(directory))[1]
        if not hf_config.is_described(directory):
            with other_runs.find(directory) as checkpoints:
                if step is not None:
                    checkpoints.refuse_unknown(step)
            return []
        opened = hf_folder.open_folder(directory, config.init_ignore)
    except UserError as error:
        return list(error.problems)
    if step is not None:
        return [
            Problem(
                "--step",
                got=f"{step} with a Hugging Face folder, which has no steps",
                allowed="none",
                nearest="leave it out",
            )
        ]
    lines = hf_config.differences(config.model, opened.model.options, config.sequence_length, directory)
    lines += _tokenizer_problem(config, opened.directory)
    if not lines and peers.is_main_process():
        for note in hf_config.notes(directory, opened.model):
            warn(note)
    if opened.left_out and not lines and peers.is_main_process():
        warn(f"{directory}: {opened.left_out} tensors of its image model are ignored; only its text model is used")
    if 0 < opened.model.max_length < config.sequence_length and not lines and peers.is_main_process():
        most = opened.model.max_length
        warn(f"sequence_length: got {config.sequence_length}; the model in {directory} was trained on at most {most}")
    return lines


def _tokenizer_problem(config: Config, folder: Path) -> list[Problem]:
    """Returns a problem if the vocabularies of the run's and a Hugging Face folder's tokenizer differ, else [].

    Added tokens may differ.
    """
    used, own = config.data.tokenizer, folder / TOKENIZER
    if not reads_documents(config.data) or TOKENIZER in config.init_ignore or what_is_at(own) != "a file":
        return []
    if has_same_vocabulary(used, own):
        return []
    return [
        Problem(
            "data.tokenizer",
            got=f"'{used}', but the model was trained with the tokens of {own}",
            allowed=f"this tokenizer, or any tokenizer with --config.init_ignore={TOKENIZER}",
            nearest=f"--config.data.tokenizer={folder}",
        )
    ]


def has_same_vocabulary(used: str, file: Path) -> bool:
    """Returns whether two tokenizers have the same vocabulary, except for added tokens.

    Args:
      used: the value of `data.tokenizer`: `bytes`, or the path of a tokenizer.
      file: the path of a tokenizer.json.
    """
    other = json.loads(byte_tokenizer()) if used == "bytes" else settings("", str(tokenizer_file(used)))
    models = [one.get("model") for one in (other, settings("", str(file)))]
    ours, theirs = (model.get("vocab") if isinstance(model, dict) else None for model in models)
    return bool(ours == theirs)


def paths(directory: str | Path) -> list[str]:
    """Returns the tree paths of arrays in a workdir's newest checkpoint, or of the weights in a Hugging Face folder.

    Args:
      directory: a workdir, its directory `checkpoints`, or a Hugging Face folder; `weights_problems` returns [] for it.
    """
    if hf_config.is_described(directory):
        return [weight.path for weight in hf_folder.open_folder(directory, ignore=None).table]
    with other_runs.find(directory) as checkpoints:
        return list(checkpoints.shapes(checkpoints.steps()[-1]))


def refuse_other_params(directory: str | Path, abstract_params: Params, rounded: Collection[str] = ()) -> None:
    """Checks that saved weights have a model's shapes, and in a workdir also its dtypes; reads no array.

    Args:
      directory: a workdir, its directory `checkpoints`, or a Hugging Face folder; `weights_problems` returns [] for it.
      abstract_params: the model's parameters, a pytree of jax.ShapeDtypeStruct.
      rounded: tree paths of weights whose dtype may differ from the saved dtype.

    Raises:
      UserError: shapes or dtypes differ.
    """
    if hf_config.is_described(directory):
        hf_folder.refuse_other_params(hf_folder.open_folder(directory, ignore=None), abstract_params)
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
    """Reads weights onto the shardings of `abstract_params`. All processes call it together.

    Args:
      directory: a workdir, its directory `checkpoints`, or a Hugging Face folder; `weights_problems` returns [] for it.
      step: the step of the checkpoint; None: the newest undamaged checkpoint.
      abstract_params: a pytree of jax.ShapeDtypeStruct with shardings. Stacked layers are in layer order, not grouped
        by pipeline stage.
      rounded: tree paths of weights to cast if their saved dtype differs; weights of a Hugging Face folder are always
        cast.
      averaged: whether to read averaged weights instead of the last weights. A Hugging Face folder has no averages.

    Returns:
      A pytree of jax.Array with the structure of `abstract_params`, and the step (0 for a Hugging Face folder).

    Raises:
      UserError: the files are damaged or of another model, there are no averages, or processes see different files.
    """
    if not hf_config.is_described(directory):
        return other_runs.restore_params(directory, step, abstract_params, rounded, averaged=averaged)
    found = hf_folder.open_folder(directory, ignore=None)
    hf_folder.refuse_differences(found)
    return hf_folder.read(found, abstract_params, shows_bar=peers.is_main_process() and sys.stderr.isatty()), 0
