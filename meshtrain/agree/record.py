"""Records of a side: one `.npz` file of arrays and a JSON text, which another commit or JAX can read. Never unpickled.

The configurations of a record and of the sides compared with it may differ only in options that do not change the
numbers in exact arithmetic, such as the mesh, the attention kernel or a dtype.
"""

import dataclasses
import hashlib
import io
import json
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np

import meshtrain
from meshtrain.agree.comparison import Figure, Key
from meshtrain.agree.sides import Side
from meshtrain.cli import output_files
from meshtrain.cli.flags import flatten
from meshtrain.config.schema import Config
from meshtrain.data.dataset import Dataset
from meshtrain.data.loader import content_hash, order_hash
from meshtrain.errors import Problem, UserError, refuse
from meshtrain.files import JsonObject, read_json, what_is_at

ENDING = ".npz"
_ABOUT = "about"  # the name of the JSON text in the file, as bytes
_ARRAYS = ("batches", "initial", "sums", "gradients", "final")  # fields of `Side` with arrays
# Options in which sides may differ: a dotted key, or the name of a group.
FREE = (
    *(
        "mesh",
        "layout",
        "zero",
        "offload",
        "pipeline",
        "accumulation_steps",
        "remat",
        "precision",
        "observe",
        "profile",
    ),
    *("checkpoint", "model.attention", "model.loss_chunk", "log_every", "eval_every", "num_eval_batches"),
    *("eval_prompts", "eval_tokens", "sample_tokens", "watchdog_seconds", "early_stop", "guard"),
    *("data.num_threads", "data.num_prefetch_batches"),
)


@dataclasses.dataclass(frozen=True)
class Record:
    """A recorded side.

    Attributes:
      side: the reference.
      rounding: the yardstick: the differences that nudged weights cause.
      unit: the unit in the last place of the record's compute dtype, relative to float32.
      about: versions, configuration and data of the record, see `about`.
    """

    side: Side
    rounding: Mapping[Key, Figure]
    unit: float
    about: JsonObject

    @property
    def is_exact(self) -> bool:
        """Whether initial weights must have the same bits: the record has the JAX and the platform of this process."""
        return (self.about["jax"], self.about["platform"]) == (jax.__version__, jax.default_backend())


def about(config: Config, dataset: Dataset, num_steps: int) -> JsonObject:
    """Returns the facts that identify a record: configuration, hashes of the data, number of steps, versions.

    Args:
      config: the configuration of the side, with all cuts.
      dataset: the data.
      num_steps: the number of training steps.
    """
    facts = [dataset.fingerprint, len(dataset.train), content_hash(dataset.train)]
    facts.append(order_hash(dataset.train, seed=config.seed, first_sample=0))
    return {
        "config": dataclasses.asdict(config),
        "data": hashlib.sha256(repr(facts).encode()).hexdigest(),
        "steps": num_steps,
        "meshtrain": meshtrain.__version__,
        "jax": jax.__version__,
        "platform": jax.default_backend(),
    }


def write(path: str, record: Record) -> None:
    """Writes a record into the file that `--record` names.

    Raises:
      UserError: the file cannot be written.
    """
    side, arrays = record.side, dict[str, np.ndarray]()
    for field in _ARRAYS:
        arrays |= {f"{field}/{name}": leaf for name, leaf in getattr(side, field).items()}
    rounding = [[*key, *figure] for key, figure in record.rounding.items()]
    text = {**record.about, "losses": [*side.losses], "norms": [*side.norms], "rounding": rounding, "unit": record.unit}
    arrays[_ABOUT] = np.frombuffer(json.dumps(text).encode(), np.uint8)
    content = io.BytesIO()
    np.savez_compressed(content, allow_pickle=False, **arrays)
    output_files.write("--record", path, content.getvalue())


def read(path: str) -> Record:
    """Reads a record from the file that `--against` names.

    Raises:
      UserError: the file does not exist, is damaged, contains pickled objects, or is not a record.
    """
    if (what := what_is_at(path)) != "a file":
        raise UserError(_problem(f"'{path}': {what}"))
    try:
        # `np.load` does not close a damaged file that it has opened itself.
        with Path(path).open("rb") as content, np.load(content, allow_pickle=False) as file:
            if _ABOUT not in file.files:
                raise UserError(_problem(f"'{path}', which is no record"))
            arrays = {name: file[name] for name in file.files}
        text = read_json(arrays.pop(_ABOUT).tobytes())
        fields: dict[str, dict[str, np.ndarray]] = {field: {} for field in _ARRAYS}
        for name, leaf in arrays.items():
            field, _, rest = name.partition("/")
            fields[field][rest] = leaf
        rounding = {(kind, where): Figure(*numbers) for kind, where, *numbers in text.pop("rounding")}
        scalars = text.pop("losses"), text.pop("norms")
        side = Side(
            fields["batches"], fields["initial"], fields["sums"], fields["gradients"], *scalars, fields["final"]
        )
        return Record(side, rounding, text.pop("unit"), text)
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OSError,
        EOFError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(_problem(f"'{path}', which is damaged or contains pickled objects")) from error


def refuse_other(path: str, recorded: JsonObject, own: JsonObject) -> None:
    """Checks that a record has the same configuration, data and number of steps, except for options in FREE.

    An option is not compared if one version of meshtrain lacks it.

    Args:
      path: the file that `--against` names.
      recorded: the facts of the record, from `about`.
      own: the facts of this command, from `about`.

    Raises:
      UserError: an option, the data or the number of steps differ; one line for each.
    """
    theirs, ours = flatten(recorded["config"]), flatten(own["config"])
    problems = [
        Problem(
            key,
            got=f"{ours[key]!r}, but {theirs[key]!r} in the record {path}",
            allowed="the record's value",
            nearest=f"--config.{key}={theirs[key]}",
        )
        for key in ours
        if key in theirs and ours[key] != theirs[key] and not _is_free(key)
    ]
    if recorded["steps"] != own["steps"]:
        problems.append(
            Problem("--steps", got=own["steps"], allowed="the number of steps in the record", nearest=recorded["steps"])
        )
    if not problems and recorded["data"] != own["data"]:
        problems.append(_problem(f"'{path}', which was recorded with other training data"))
    refuse(problems)


def _is_free(key: str) -> bool:
    return any(key == free or key.startswith(f"{free}.") for free in FREE)


def _problem(got: str) -> Problem:
    return Problem(
        "--against", got=got, allowed="a file that --record has written", nearest="--record=before.npz first"
    )
