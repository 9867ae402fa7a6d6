"""Creates Orbax's checkpoint manager with our options: it writes and reads checkpoints, and never deletes any.

Also suppresses needless warnings, and log messages about failed saves, because our program prints one line for a failed
save: the error that `CheckpointManager.wait_until_finished` raises. Otherwise users would also see these messages:

- Each of Orbax's threads logs the error with a stack trace.
- TensorStore prints a traceback for each write that ends after the event loop was closed.
- asyncio prints a traceback for each task whose result is never retrieved.
- Python warns about each write that never started.
"""

import functools
import logging
import sys
import threading
import warnings
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp

from meshtrain.store.buckets import Place

STATE, EXTRA = "state", "extra"  # the two folders of a checkpoint
_REPLICA_SLICE_BYTES = 8 << 20
# Coroutines of Orbax that are never awaited if a save fails early.
_NEVER_AWAITED = (
    "async_serialize_from_host", "_async_serialize_shardings", "_create_paths", "_serialize_arrays_batches",
    "cancellable", "JsonCheckpointHandler", "BasePyTreeCheckpointHandler",
)  # fmt: skip


def manager(directory: Place, *, writes: bool) -> ocp.CheckpointManager:
    """Returns Orbax's manager for a folder of checkpoints; with `writes=False` the manager only reads."""
    silence()
    # Orbax must delete nothing: `retention.prune` runs after a new save is sealed, and `retention.sweep` deletes
    # half-written saves, because Orbax fails on a save that a thread is still writing.
    all_stay = {"preservation_policy": ocp.checkpoint_managers.EveryNSteps(1)}
    options = ocp.CheckpointManagerOptions(create=False, lightweight_initialize=True, **(all_stay if writes else {}))
    handlers = {STATE: _state_handler(), EXTRA: ocp.JsonCheckpointHandler()}
    return ocp.CheckpointManager(directory, options=options, item_handlers=handlers)


def start_save(manager: ocp.CheckpointManager, step: int, items: ocp.args.Composite) -> None:
    """Starts to write a checkpoint; returns when the arrays' buffers may be overwritten. Raises Orbax's errors.

    The save starts in a daemon thread, so that Orbax's threads inherit the daemon flag and do not delay the end of the
    program. If the folder of a save cannot be created, Orbax's threads wait for the folder for five minutes after the
    save has failed, and at exit Python waits for all threads except daemons.

    Args:
      manager: Orbax's manager, opened for writing.
      step: number of completed training steps, the name of the checkpoint's folder.
      items: Orbax's save arguments for the folders `STATE` and `EXTRA`.
    """
    errors = list[Exception]()

    def start() -> None:
        try:
            manager.save(step, args=items, force=True)
        except Exception as error:  # noqa: BLE001  it is raised below, in the caller's thread
            errors.append(error)

    thread = threading.Thread(target=start, daemon=True, name="start save")
    thread.start()
    thread.join()
    for error in errors:
        raise error


def renaming_problems(directory: Place) -> list[str]:
    """Returns an error line if the step in a checkpoint's state differs from the folder's name; else an empty list.

    If the state has no step, such as imported weights, the folder may have any name. All processes call this together.
    """
    silence()
    with ocp.PyTreeCheckpointer() as reader:
        if "step" not in reader.metadata(directory / STATE).item_metadata.tree:
            return []
        as_number = {"step": ocp.RestoreArgs(restore_type=np.ndarray)}
        wanted = ocp.args.PyTreeRestore({"step": 0}, as_number, partial_restore=True)
        step = int(reader.restore(directory / STATE, wanted)["step"])
    return (
        []
        if str(step) == directory.name
        else [f"it contains the state of step {step}: the folder was renamed, copied or linked"]
    )


def _state_handler() -> ocp.PyTreeCheckpointHandler:
    # If replicas share the writing of an array, they slice it on the device: one small compilation for each shape,
    # device and slice. This delays the first save by seconds, and is worthwhile only on several hosts.
    arrays = ocp.type_handlers.ArrayHandler(
        use_replica_parallel=jax.process_count() > 1, min_slice_bytes_for_replica_parallel=_REPLICA_SLICE_BYTES
    )
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry)


@functools.cache
def silence() -> None:
    """Suppresses needless warnings, and Orbax's messages about failed saves, from now on in the complete process.

    The module's docstring lists these messages. All other messages are printed as before.
    """
    logging.getLogger("absl").addFilter(_is_worth_a_line)
    logging.getLogger("asyncio").addFilter(_is_task_of_others)
    warnings.filterwarnings("ignore", f"coroutine '({'|'.join(_NEVER_AWAITED)})", RuntimeWarning)
    report = sys.unraisablehook

    def report_others(unraisable: "sys.UnraisableHookArgs") -> None:
        if not _came_too_late(unraisable):
            report(unraisable)

    sys.unraisablehook = report_others


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    is_raised = record.exc_info is not None and record.exc_info[0] is not None
    is_reported = is_raised or "Metadata file: %s" in str(record.msg)  # reported by its checksum
    return (record.levelno >= logging.ERROR and not is_reported) or "orbax" not in Path(record.pathname).parts


def _is_task_of_others(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    return not ("exception was never retrieved" in text and "orbax" in text)


def _came_too_late(unraisable: "sys.UnraisableHookArgs") -> bool:
    """Returns whether the cause of an exception is a write of TensorStore that ended after the event loop was closed.

    TensorStore writes in C++ and calls asyncio directly, so the outermost Python frame of such an exception belongs to
    asyncio.
    """
    error, traceback = unraisable.exc_value, unraisable.exc_traceback
    is_closed = isinstance(error, RuntimeError) and str(error) == "Event loop is closed"
    return is_closed and traceback is not None and traceback.tb_frame.f_code.co_name == "call_soon_threadsafe"
