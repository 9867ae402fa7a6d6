"""Reads checkpoints of other runs: restores their weights onto this run's shardings after verifying the checksums."""

import contextlib
import hashlib
import os
import shlex
from collections.abc import Collection
from pathlib import Path

from meshtrain.checkpoint.checkpoint import CHECKPOINTS, Checkpoints
from meshtrain.checkpoint.integrity import MANIFEST, is_sealed
from meshtrain.checkpoint.manager import EXTRA, STATE
from meshtrain.checkpoint.retention import checkpoint_steps
from meshtrain.cli import foreign
from meshtrain.errors import Problem, UserError, warn
from meshtrain.files import Json, JsonObject, download_command, expand_user, is_url, read_json, snapshot_of, what_is_at
from meshtrain.launch import peers
from meshtrain.sharding.trees import Arrays
from meshtrain.store import buckets
from meshtrain.store.buckets import Place, Unreached, wrap_bucket_errors

_CONFIG_FILE = "config.json"
_PLACE = {"checkpoint.directory": foreign.FIELDS["checkpoint.directory"]}


def restore_params(
    directory: str | Path,
    step: int | None,
    abstract_params: Arrays,
    rounded: Collection[str] = (),
    *,
    averaged: bool = False,
) -> tuple[Arrays, int]:
    """Reads the weights of another run's checkpoint onto this run's shardings.

    Args:
      directory: a workdir, or the directory `checkpoints` inside it.
      step: the step of the checkpoint; None: the newest undamaged checkpoint.
      abstract_params: pytree of jax.ShapeDtypeStruct with shardings.
      rounded: paths of weights that are converted if their saved dtype differs from `abstract_params`.
      averaged: whether to read the averages of weights (`optimizer.average`) instead of the weights.

    Returns:
      The weights, a pytree of jax.Array with the structure of `abstract_params`, and the step. The weights are bitwise
      equal to the saved arrays, except for converted weights (`rounded`).

    Raises:
      UserError: the directory does not exist, or has no complete checkpoint of that step; the checkpoint is damaged; or
        the weights differ from `abstract_params` in paths, shapes or dtypes.
    """
    with find(directory) as checkpoints:
        if step is not None:
            checkpoints.refuse_damaged(step)
        else:
            step, damaged = checkpoints.newest_whole()
            assert step is not None, "find returns only directories with a complete step"
            for line in damaged if peers.is_main_process() else ():
                warn(line)
        return checkpoints.restore_params(step, abstract_params, rounded, averaged=averaged), step


def extra_of_newest(directory: str | Path) -> JsonObject:
    """Returns the `extra` object of the newest readable checkpoint in a folder or bucket; {} if there is none.

    `extra` contains data position, configuration, corpus and versions. JAX is not initialized.

    Raises:
      UserError: the bucket cannot be reached.
    """
    with wrap_bucket_errors(place := buckets.place(directory)):
        for step in reversed(checkpoint_steps(place)):
            with contextlib.suppress(FileNotFoundError, ValueError, TypeError):  # a damaged checkpoint
                if is_sealed(place / str(step)):
                    return dict(read_json((place / str(step) / EXTRA / "metadata").read_text(encoding="utf-8")))
    return {}


def newest(directory: str | Path) -> list[Json]:
    """Returns [step, hexadecimal sha256 of the manifest] for the newest checkpoint; [] if there is no checkpoint.

    The two values identify the checkpoint's content.

    Args:
      directory: a workdir, the directory `checkpoints` inside it, or gs://bucket/prefix.
    """
    try:
        with find(directory) as checkpoints:
            step = checkpoints.latest_step()
            with wrap_bucket_errors(place := checkpoints.directory / str(step) / MANIFEST):
                return [step, hashlib.sha256(place.read_bytes()).hexdigest()]
    except Unreached:
        raise
    except (UserError, FileNotFoundError):
        return []


def place_of(directory: str | Path, command: str = "--config.init_from=") -> Place:
    """Returns the folder or bucket prefix that contains a run's checkpoints.

    For a workdir, this is the `checkpoint.directory` in its config.json, else the folder `checkpoints` inside it. Other
    folders and buckets are returned unchanged.

    Args:
      directory: a workdir, the directory `checkpoints` inside it, or gs://bucket/prefix.
      command: the option with which the user can name the checkpoint folder directly, for the error.

    Raises:
      UserError: another user's run wrote the config.json, and its `checkpoint.directory` is outside of the workdir; or
        the bucket cannot be listed.
    """
    if is_url(str(directory)):
        return buckets.place(directory)
    given, elsewhere = expand_user(directory).absolute(), ""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        content = read_json((given / _CONFIG_FILE).read_text(encoding="utf-8"))
        elsewhere = content["checkpoint"]["directory"]
    if elsewhere and isinstance(elsewhere, str):
        foreign.refuse(
            foreign.outside(content, given / _CONFIG_FILE, (foreign.WEIGHTS,), _PLACE), given / _CONFIG_FILE,
            f"{command}{shlex.quote(elsewhere)}",
        )  # fmt: skip
        return buckets.place(elsewhere)
    return given / CHECKPOINTS if what_is_at(given / CHECKPOINTS) == "a folder" else given


def find(directory: str | Path, *, is_place: bool = False) -> Checkpoints:
    """Opens another run's checkpoints for reading.

    Args:
      directory: a workdir, the directory `checkpoints` inside it, or gs://bucket/prefix.
      is_place: whether `directory` is the checkpoint folder itself; then no config.json is read.

    Returns:
      `Checkpoints` with at least one complete step. The caller must close this object.

    Raises:
      UserError: the directory does not exist, or has no complete checkpoint; the error lists its contents.
    """
    given = expand_user(directory).absolute()
    if not is_url(str(directory)) and (what := what_is_at(given)) != "a folder":
        raise UserError(
            Problem(
                directory,
                got=what,
                allowed=f"a workdir of meshtrain, or its directory '{CHECKPOINTS}', or a Hugging Face folder",
                nearest=download_command(str(directory)) or "the --workdir of a run with a saved checkpoint",
            )
        )
    inner = buckets.place(directory) if is_place else place_of(directory)
    try:
        if isinstance(inner, Path):
            os.scandir(inner).close()
    except OSError as error:
        raise UserError(
            Problem(
                inner,
                got=f"a folder that cannot be read ({error.strerror})",
                allowed="a workdir of meshtrain",
                nearest=f"chmod -R a+rX '{inner}'",
            )
        ) from error
    checkpoints = Checkpoints(inner, None)
    if checkpoints.latest_step() is None:
        checkpoints.close()
        names = sorted(entry.name for entry in inner.iterdir()) if inner.is_dir() else []
        listing = f"only {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}" if names else "an empty directory"
        snapshot = snapshot_of(given)
        other = ", or a Hugging Face folder" if snapshot else ""
        raise UserError(
            Problem(
                checkpoints.directory,
                got=listing,
                allowed=f"a workdir with at least one complete checkpoint{other}",
                nearest=snapshot or _nearest_workdir(given),
            )
        )
    return checkpoints


def _nearest_workdir(given: Path) -> str:
    """Returns the workdir that an error suggests instead of `given`, as text.

    If `given` is the folder of a step, the result is the path of its parent folder. Otherwise it is the description of
    a valid workdir.
    """
    is_step = given.name.isdecimal() and (given / STATE).is_dir()
    return str(given.parent) if is_step else "the --workdir of a run with a saved checkpoint"
