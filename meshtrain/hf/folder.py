"""A Hugging Face folder, opened: what its config.json describes, and its tensors compared with that."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from meshtrain.errors import Problems, UserError, nearest
from meshtrain.files import expanded, what_is_at
from meshtrain.hf import names, tensor_files
from meshtrain.hf.config_json import Described, described
from meshtrain.hf.names import Weight
from meshtrain.launch import peers


@dataclasses.dataclass(frozen=True)
class Folder:
    """A folder whose files and config.json agree.

    Attributes:
      directory: absolute.
      model: what config.json describes.
      table: a row for each weight of the model, with the names of these files.
      stored: name -> tensor, those of the table alone.
    """

    directory: Path
    model: Described
    table: Sequence[Weight]
    stored: Mapping[str, tensor_files.Stored]


def opened(directory: str | Path, ignore: str | None = "") -> Folder:
    """Opens a folder with config.json and one or several safetensors files. It reads headers and no tensor.

    For `ignore` see `config.described`.

    Raises:
      UserError: one line for each problem of config.json and of the files, all at once.
    """
    folder = expanded(directory).absolute()
    if (what := what_is_at(folder)) != "a folder":
        raise UserError(
            f"{directory}: got {what}; allowed: a folder with config.json; nearest: download the model there"
        )
    stored, problems = tensor_files.tensors(folder)
    try:
        model = described(folder, ignore)
    except UserError as error:
        raise UserError(*error.problems, *problems) from error
    table = names.as_in_files(names.weights(model.family, model.options), stored)
    if problems:
        raise UserError(*problems)
    if found := _mismatches(folder, model, table, stored):
        raise UserError(*found)
    size = names.sizes(model.options)
    wanted = {name for weight in table for name in names.tensor_names(weight, size)}
    return Folder(folder, model, table, {name: one for name, one in stored.items() if name in wanted})


def refuse_differences(folder: Folder) -> None:
    """Compares what all processes see of a folder: they read their own parts of it. All processes call it.

    Raises:
      UserError: a process sees other options, or other tensors.
    """
    tensors = [(name, one.file.name, one.dtype, one.shape, one.begin) for name, one in sorted(folder.stored.items())]
    facts = {"config": dataclasses.asdict(folder.model), "tensors": tensors}
    hashes = {name: hashlib.sha256(json.dumps(fact).encode()).hexdigest() for name, fact in facts.items()}
    peers.refuse_differences("the Hugging Face folder", hashes)


def _mismatches(
    folder: Path, model: Described, table: Sequence[Weight], stored: Mapping[str, tensor_files.Stored]
) -> list[str]:
    """Returns one line for each tensor that is missing, left over, or of another shape or dtype than the table's."""
    size, problems = names.sizes(model.options), Problems()
    wanted = {name: names.stored_shape(weight, size) for weight in table for name in names.tensor_names(weight, size)}
    left = [name for name in stored if name not in wanted and not names.is_ignored(name, model.options)]
    for name, shape in wanted.items():
        if name not in stored:
            fix = nearest(name, left) if len(left) < 100 else ""
            problems.add(
                f"{folder}: {name}: not in the files; allowed: all tensors of the model in config.json"
                f"{fix or '; nearest: the files that belong to it'}"
            )
            continue
        got = stored[name]
        if got.shape != shape:
            problems.add(
                f"{got.file}: {name}: got shape {list(got.shape)}; allowed: {list(shape)}, by config.json; nearest: "
                "the files that belong to it"
            )
        if got.dtype not in tensor_files.READABLE:
            problems.add(
                f"{got.file}: {name}: got dtype {got.dtype}; allowed: {', '.join(tensor_files.READABLE)}; nearest: the "
                "model before it was quantized"
            )
    for name in left:
        problems.add(
            f"{stored[name].file}: {name}: the model in config.json has no such tensor; allowed: its {len(wanted)} "
            "tensors; nearest: the config.json that belongs to the files"
        )
    return problems.lines()
