"""Orbax's checkpoint manager with our options: it writes and reads checkpoints, and deletes none."""

from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp

from meshtrain.store import chatter

STATE, EXTRA = "state", "extra"  # the two folders of a save
_REPLICA_SLICE_BYTES = 8 << 20


def manager(directory: Path, *, writes: bool) -> ocp.CheckpointManager:
    """Returns the manager of a folder of checkpoints; one that only reads creates, cleans up and deletes nothing."""
    chatter.silence()
    # Orbax deletes nothing. `keeping.prune` runs once a new save is sealed, and `keeping.sweep` deletes half-written
    # saves, because Orbax fails on one that a thread still writes to.
    all_stay = {"preservation_policy": ocp.checkpoint_managers.EveryNSteps(1)}
    options = ocp.CheckpointManagerOptions(create=False, **(all_stay if writes else {}))
    handlers = {STATE: _state_handler(), EXTRA: ocp.JsonCheckpointHandler()}
    return ocp.CheckpointManager(directory, options=options, item_handlers=handlers)


def renamed(directory: Path) -> list[str]:
    """Returns one line if a whole checkpoint's state is of another step than its folder is named after; else no line.

    A state without a step, such as imported weights, may have any name. All processes call it together.
    """
    chatter.silence()
    with ocp.PyTreeCheckpointer() as reader:
        if "step" not in reader.metadata(directory / STATE).item_metadata.tree:
            return []
        as_number = {"step": ocp.RestoreArgs(restore_type=np.ndarray)}
        wanted = ocp.args.PyTreeRestore({"step": 0}, as_number, partial_restore=True)
        step = int(reader.restore(directory / STATE, wanted)["step"])
    return [] if str(step) == directory.name else [f"its state is that of step {step}: renamed, copied or linked"]


def _state_handler() -> ocp.PyTreeCheckpointHandler:
    # Replicas that share the writing of an array slice it on the device: one small compilation for each shape, device
    # and slice. This delays the first save by seconds, and pays off on several hosts only.
    arrays = ocp.type_handlers.ArrayHandler(
        use_replica_parallel=jax.process_count() > 1, min_slice_bytes_for_replica_parallel=_REPLICA_SLICE_BYTES
    )
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
