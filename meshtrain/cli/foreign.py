"""Protects users from files of other users: restricts the functions, paths and addresses that such files can name.

A run's config.json, the metadata of a checkpoint and adapter_config.json may come from another user. `FIELDS` lists the
fields of these files that can import, read or contact something. Commands call `outside` before they use such a file:

- A function is imported only if the user names it too: on the command line, or in the file of `--config`.
- A path is read, or an address is contacted, only if it lies in the same folder, if the user names it too, or if this
  user's own run wrote the file. Each run records the hash of the file that it writes, outside of the run's folder.

Fields that a command does not read cause no error. `train` takes its configuration only from the user.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path

from meshtrain.cli import flags
from meshtrain.errors import Problem, UserError
from meshtrain.files import Json, JsonObject, expand_user, is_url, real

FUNCTION, PATH = "function", "path"
# Uses of a run's folder: to read its weights; its tokenizer and chat template; its data; the folder from which its run
# got the initial weights.
WEIGHTS, TEXT, DATA, ORIGIN = USES = ("weights", "text", "data", "origin")
BASE = "base_model_name_or_path"  # a key of adapter_config.json
_ALLOWED = {
    FUNCTION: "a function that the command line or the --config file also names, because this command would run it",
    PATH: (
        "a path in that folder, or a path that the command line or the --config file also names, because this "
        "command would read it"
    ),
}


@dataclasses.dataclass(frozen=True)
class Field:
    """A field of a file from another user that can import a function, read a path or contact an address.

    Attributes:
      kind: FUNCTION if the value names a function to import; PATH if it is a path to read or an address to contact.
      read_for: the uses of the folder (elements of USES) for which a command reads the field; if empty, only training
        reads it.
      default: the value with which the field is not a path, such as `bytes` for the built-in tokenizer; `outside` does
        not return a field with this value.
    """

    kind: str
    read_for: Collection[str] = USES
    default: str = ""


# Keys are dotted keys of config.json, except BASE. A tracker may send rows over the network; only training starts it.
FIELDS: Mapping[str, Field] = {
    "task": Field(FUNCTION),
    "reduction.name": Field(FUNCTION),
    "pipeline.schedule": Field(FUNCTION),
    "optimizer.name": Field(FUNCTION),
    "learning_rate.name": Field(FUNCTION),
    "data.source": Field(FUNCTION),
    "observe.tracker": Field(FUNCTION),
    "data.path": Field(PATH, (DATA,)),
    "data.validation_path": Field(PATH, (DATA,)),
    "data.tokenizer": Field(PATH, (DATA, TEXT), "bytes"),
    "data.chat_template": Field(PATH, (DATA, TEXT)),
    "checkpoint.directory": Field(PATH, (WEIGHTS,)),
    "init_from": Field(PATH, (ORIGIN,)),
    "init_base": Field(PATH, (ORIGIN,)),
    "eval_prompts": Field(PATH, ()),
    BASE: Field(PATH, (WEIGHTS,)),
}


def outside(
    content: JsonObject, file: str | Path, uses: Collection[str], fields: Mapping[str, Field] = FIELDS
) -> dict[str, str]:
    """Returns dotted key -> value for the fields of a file that name a function, or a path outside of its folder.

    An address counts as a path. Reads none of these paths. For a file that this user's own run wrote, only functions
    are returned.

    Args:
      content: the nested content of the file.
      file: the path of the file, or the address of the bucket with the checkpoints to which the metadata belong.
      uses: the uses for which the folder is opened, elements of USES. Functions are returned for every use.
      fields: dotted key -> field to check: FIELDS, or a part of it.
    """
    values, is_own = flags.flatten(content), is_written(content)
    named = {key: str(values[key]) for key in fields if isinstance(values.get(key), str)}
    folder = str(file) if is_url(str(file)) else real(Path(file).parent)
    found = {}
    for key, value in named.items():
        field = fields[key]
        if field.kind == FUNCTION:
            reaches = ":" in value
        else:
            is_read = not is_own and value != field.default and bool(set(uses) & set(field.read_for))
            reaches = is_read and not all(_is_inside(path, folder) for path in _paths(value))
        if reaches:
            found[key] = value
    return found


def refuse(found: Mapping[str, str], file: str | Path, command: str, fields: Mapping[str, Field] = FIELDS) -> None:
    """Raises UserError with one line for all values in `found`, unless `found` is empty.

    Args:
      found: dotted key -> value from `outside`, without the values that the user names too.
      file: the path of the file, for the error.
      command: the words with which the user can allow the values.
      fields: dotted key -> field, for the keys in `found`.
    """
    if found:
        got = ", ".join(f"{key}: got '{value}'" for key, value in found.items())
        allowed = ", ".join(_ALLOWED[kind] for kind in dict.fromkeys(fields[key].kind for key in found))
        raise UserError(Problem(file, fault=got, allowed=allowed, nearest=command))


def _paths(value: str) -> set[str]:
    """Returns each part of an option's value that may be a path.

    A value may be FILE, NAME=FILE, FILE:WEIGHT, or a list of these separated by commas.
    """
    paths = {value, *(piece.strip() for piece in value.split(","))}
    for piece in list(paths):
        parts = piece.split("=")
        paths |= {"=".join(parts[start:]) for start in range(len(parts))}
    weighted = [path.rpartition(":") for path in paths]
    return (paths | {path for path, _, weight in weighted if "/" not in weight}) - {""}


def _is_inside(path: str, folder: str) -> bool:
    """Returns whether a path is inside of a folder, or an address is below the address of a bucket."""
    if is_url(folder) or is_url(path):
        below = f"{folder.rstrip('/')}/"
        return f"{path.rstrip('/')}/".startswith(below) and ".." not in path.split("/")
    try:
        return Path(os.path.realpath(expand_user(path))).is_relative_to(folder)
    except ValueError:  # an impossible file name, which the check of its type rejects
        return True


def record_written(content: JsonObject) -> None:
    """Records that this user wrote a file with this content.

    If the home folder is not writable, nothing is recorded, and users must name the paths in the file again.
    """
    with contextlib.suppress(OSError):
        (place := _record()).mkdir(parents=True, exist_ok=True)
        (place / _digest(content)).touch()


def is_written(content: Json) -> bool:
    """Returns whether `record_written` has recorded that this user wrote a file with this content."""
    return os.path.exists(_record() / _digest(content))


def _record() -> Path:
    """Returns the folder of the records. It contains an empty file for each content, named after the content's hash."""
    return expand_user(os.environ.get("XDG_STATE_HOME") or "~/.local/state") / "meshtrain" / "written"


def _digest(content: Json) -> str:
    try:
        text = json.dumps(content, sort_keys=True)
    except RecursionError:  # nested deeper than any file of ours
        text = ""
    return hashlib.sha256(text.encode()).hexdigest()
