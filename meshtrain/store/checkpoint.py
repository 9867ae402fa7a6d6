"""Checkpoints: the state of a run, written while training goes on, read back onto any mesh.

On disk (Orbax, one directory a step, OCDBT format)::

    <workdir>/checkpoints/<step>/state/   every array of the training state, whole and in its global shape
                                 extra/   one JSON object: data position, configuration, corpus, versions

Arrays are stored under the path of their leaf (`params/layers/attention/query`), never under the Python class that
held them, so neither a mesh nor a container type has to be the same when they are read again.
"""

import dataclasses
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import orbax.checkpoint as ocp

from meshtrain.errors import UserError
from meshtrain.options import option
from meshtrain.store.arrays import leaves_by_path, mismatches, nested

CHECKPOINTS = "checkpoints"  # the directory's name inside a workdir
_STATE, _EXTRA = "state", "extra"
_PARAMS = "params"
_MAX_MISMATCHES = 5
_REPLICA_SLICE_BYTES = 8 << 20


@dataclasses.dataclass(frozen=True)
class CheckpointOptions:
    """When the state is saved and how many saves stay."""

    every: int = option(0, "steps between saves; 0: only after the last step, which is always saved", minimum=0)
    keep_last: int = option(3, "number of newest saves that stay, older ones are deleted", minimum=1)


class Checkpoints:
    """The saves of one run. Every process of the run makes one and calls it at the same steps.

    Args:
      directory: where the steps stand, one directory each; made absolute, and created where `options` is given.
      options: how many saves stay. None only reads: nothing is created, cleaned up or deleted, which is what a
        second program needs that looks at a run while it trains.

    Raises:
      UserError: the directory cannot be created.
    """

    def __init__(self, directory: str | Path, options: CheckpointOptions | None) -> None:
        logging.getLogger("absl").addFilter(_is_no_chatter)
        self.directory = Path(directory).expanduser().absolute()
        self._writes = options is not None
        if options is None:
            manager_options = ocp.CheckpointManagerOptions(create=False)
        else:
            _create(self.directory)
            manager_options = ocp.CheckpointManagerOptions(
                create=False,
                cleanup_tmp_directories=True,
                preservation_policy=ocp.checkpoint_managers.LatestN(n=options.keep_last),
            )
        handlers = {_STATE: _state_handler(), _EXTRA: ocp.JsonCheckpointHandler()}
        self._manager = ocp.CheckpointManager(self.directory, options=manager_options, item_handlers=handlers)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def steps(self) -> list[int]:
        """Returns the steps that are completely written, oldest first. Waits for a save in flight."""
        self.wait()
        return list(self._manager.all_steps())

    def latest_step(self) -> int | None:
        """Returns the newest step that is completely written, or None. Waits for a save in flight."""
        return max(self.steps(), default=None)

    def save(self, step: int, state: Any, extra: Mapping[str, Any]) -> bool:
        """Starts to save a step and returns when the state's buffers may be overwritten; files follow in a thread.

        Waits first for the save before this one. An old step is deleted only after the new one is complete.

        Args:
          step: number of steps done.
          state: pytree of jax.Array, any shardings. Typed random keys go in as their `jax.random.key_data`.
          extra: what JSON can hold: data position, configuration, corpus, versions.

        Returns:
          False where this step is already there and nothing was written.

        Raises:
          TypeError: JSON cannot hold `extra`.
          OSError, ValueError: the save before this one failed in its thread.
        """
        assert self._writes, "opened for reading only"
        if step in self._manager.all_steps():
            return False
        json.dumps(dict(extra))  # fails here, with the caller on the stack, and not later in a thread
        items = ocp.args.Composite(
            **{_STATE: ocp.args.PyTreeSave(nested(leaves_by_path(state))), _EXTRA: ocp.args.JsonSave(dict(extra))}
        )
        return bool(self._manager.save(step, args=items, force=True))

    def restore(self, step: int, abstract_state: Any) -> Any:
        """Reads the whole state of a step, each array straight onto its sharding.

        Args:
          step: one of `steps()`.
          abstract_state: pytree of jax.ShapeDtypeStruct with shardings, of any mesh and any number of processes.

        Returns:
          A pytree of jax.Array of the same structure, bitwise what was saved.

        Raises:
          UserError: no such step; or an array is missing, is left over, or has another shape or dtype.
        """
        wanted = leaves_by_path(abstract_state)
        stored = self._stored(step)
        self._refuse_mismatch(step, stored, wanted)
        return self._read(step, wanted, abstract_state)

    def restore_params(self, step: int, abstract_params: Any) -> Any:
        """Reads only the weights of a step; the optimizer's arrays are not touched.

        Args:
          step: one of `steps()`.
          abstract_params: pytree of jax.ShapeDtypeStruct with shardings, as `params` is in the state.

        Returns:
          A pytree of jax.Array of the same structure.

        Raises:
          UserError: as `restore`, about the weights only.
        """
        wrapped = {_PARAMS: abstract_params}
        wanted = leaves_by_path(wrapped)
        stored = {path: leaf for path, leaf in self._stored(step).items() if path.startswith(f"{_PARAMS}/")}
        self._refuse_mismatch(step, stored, wanted)
        return self._read(step, wanted, wrapped)[_PARAMS]

    def extra(self, step: int) -> dict[str, Any]:
        """Returns the JSON object that was saved beside the state of a step.

        Raises:
          UserError: no such step.
        """
        self._refuse_unknown(step)
        return dict(self._manager.restore(step, args=ocp.args.Composite(**{_EXTRA: ocp.args.JsonRestore()}))[_EXTRA])

    def wait(self) -> None:
        """Returns when the save in flight is complete; raises what went wrong in its thread."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits for the save in flight and ends the threads."""
        self._manager.close()

    def _stored(self, step: int) -> dict[str, Any]:
        """Returns path -> metadata with `.shape` and `.dtype` for each array of a step; reads no array."""
        self._refuse_unknown(step)
        return leaves_by_path(self._manager.item_metadata(step)[_STATE].tree)

    def _read(self, step: int, wanted: dict[str, jax.ShapeDtypeStruct], like: Any) -> Any:
        assert all(leaf.sharding is not None for leaf in wanted.values()), "every leaf says where it goes"
        abstract = nested(wanted)
        items = ocp.args.PyTreeRestore(
            item=abstract,
            restore_args=ocp.checkpoint_utils.construct_restore_args(abstract),
            partial_restore=True,
        )
        found = leaves_by_path(self._manager.restore(step, args=ocp.args.Composite(**{_STATE: items}))[_STATE])
        return jax.tree.unflatten(jax.tree.structure(like), [found[path] for path in wanted])

    def _refuse_unknown(self, step: int) -> None:
        steps = self.steps()
        if step not in steps:
            raise UserError(
                f"{self.directory}: got step {step}; allowed: {', '.join(map(str, steps)) or 'none, it is empty'}"
            )

    def _refuse_mismatch(
        self, step: int, stored: Mapping[str, Any], wanted: Mapping[str, jax.ShapeDtypeStruct]
    ) -> None:
        found = mismatches(stored, wanted)
        if found:
            more = len(found) - _MAX_MISMATCHES
            raise UserError(
                *(f"checkpoint {self.directory / str(step)}: {line}" for line in found[:_MAX_MISMATCHES]),
                *([f"checkpoint {self.directory / str(step)}: {more} more arrays differ"] if more > 0 else []),
                "nearest: the model and optimizer options the checkpoint was written with, or another workdir",
            )


def restore_params(directory: str | Path, abstract_params: Any) -> Any:
    """Reads the weights of another run's newest checkpoint onto this run's shardings.

    Args:
      directory: a workdir, or the directory `checkpoints` inside one.
      abstract_params: pytree of jax.ShapeDtypeStruct with shardings.

    Returns:
      A pytree of jax.Array of the same structure, bitwise the other run's weights.

    Raises:
      UserError: there is no such directory, no complete checkpoint in it, or its weights are others.
    """
    with find(directory) as checkpoints:
        step = checkpoints.latest_step()
        assert step is not None, "find returns only directories with a complete step"
        return checkpoints.restore_params(step, abstract_params)


def find(directory: str | Path) -> Checkpoints:
    """Opens another run's checkpoints for reading.

    Args:
      directory: a workdir, or the directory `checkpoints` inside one.

    Returns:
      Checkpoints with at least one complete step; the caller closes it.

    Raises:
      UserError: there is no such directory, or no complete checkpoint in it; says what is there.
    """
    given = Path(directory).expanduser().absolute()
    if not given.is_dir():
        what = "a file" if given.exists() else "nothing there"
        raise UserError(f"{directory}: got {what}; allowed: a workdir of meshtrain, or its directory '{CHECKPOINTS}'")
    inner = given / CHECKPOINTS
    checkpoints = Checkpoints(inner if inner.is_dir() else given, None)
    if checkpoints.latest_step() is None:
        checkpoints.close()
        names = sorted(entry.name for entry in checkpoints.directory.iterdir())
        listing = f"only {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}" if names else "an empty directory"
        raise UserError(
            f"{checkpoints.directory}: got {listing}; allowed: a workdir with at least one complete checkpoint"
            f"{_nearest_workdir(given)}"
        )
    return checkpoints


def _nearest_workdir(given: Path) -> str:
    """Returns `; nearest: DIR` where a step's directory was given instead of the run's."""
    parent = given.parent
    return f"; nearest: {parent}" if given.name.isdecimal() and (given / _STATE).is_dir() else ""


def _state_handler() -> ocp.PyTreeCheckpointHandler:
    # Replicas that share the writing of an array slice it on the device, one small compilation for each shape, device
    # and slice: seconds before the first save returns, which only several hosts can gain back.
    arrays = ocp.type_handlers.ArrayHandler(
        use_replica_parallel=jax.process_count() > 1, min_slice_bytes_for_replica_parallel=_REPLICA_SLICE_BYTES
    )
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry)


def _is_no_chatter(record: logging.LogRecord) -> bool:
    # Orbax warns on the terminal of what is no mistake, such as a save that waits for the one before it.
    return record.levelno >= logging.ERROR or "orbax" not in Path(record.pathname).parts


def _create(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{directory}: got {error.strerror or error}; allowed: a directory that can be written"
        ) from error
