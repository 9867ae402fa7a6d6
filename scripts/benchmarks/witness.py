"""For `mesh`: trains several runs in turn, and records their arrays and batches in WORKDIR/seen.<process>.json.

    python -m meshtrain launch --processes=2 -- -m scripts.benchmarks.witness --workdir=DIR --workdir=DIR --config=...

The program runs unchanged, except for wrappers that record restored arrays, saved arrays, and each batch:

    {"restored": {step: arrays}, "saved": {step: arrays}, "rows": {step: {row of the global batch: [hash, ...]}}}
    arrays = {path: {"dtype": ..., "shape": [...], "pieces": [[[[start, stop] for each dim], hash], ...]}}

A piece is the shard of an array on one device; equal shards are listed once. A hash is SHA-256.
"""

import contextlib
import functools
import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax._src import cache_key

from meshtrain.checkpoint.checkpoint import leaves_by_path
from meshtrain.errors import run
from meshtrain.main import main as train
from meshtrain.run import dataset, initial_state, saving

WORKDIR = "--workdir="

Seen = dict[str, dict[int, Any]]


def hashed(array: np.ndarray) -> str:
    """Returns the hash of an array's bytes."""
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def bounds(index: Sequence[slice], shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Returns (start, stop) of each dim of a piece."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def pieces(array: jax.Array) -> dict[str, Any]:
    """Returns the shards of an array on this process's devices; equal shards are listed once."""
    held = {(bounds(shard.index, array.shape), hashed(np.asarray(shard.data))) for shard in array.addressable_shards}
    return {"dtype": array.dtype.name, "shape": list(array.shape), "pieces": sorted(held)}


def arrays(state: Any) -> dict[str, Any]:
    """Returns path -> `pieces` for each array of a state."""
    return {path: pieces(leaf) for path, leaf in leaves_by_path(state).items()}


def rows(batch: Mapping[str, jax.Array]) -> dict[int, list[str]]:
    """Returns {row: hashes over all entries of a batch} for the rows [B, T] on this process's devices.

    A row has several hashes if devices hold different values of it.
    """
    found = dict[int, set[str]]()
    shards = [batch[name].addressable_shards for name in sorted(batch)]
    for parts in zip(*shards, strict=True):
        ((first, stop), _) = bounds(parts[0].index, next(iter(batch.values())).shape)
        for row in range(first, stop):
            together = b"".join(np.asarray(part.data)[row - first].tobytes() for part in parts)
            found.setdefault(row, set()).add(hashlib.sha256(together).hexdigest())
    return {row: sorted(hashes) for row, hashes in found.items()}


@contextlib.contextmanager
def watching() -> Iterator[Seen]:
    """Records the runs inside the block in the yielded dict."""
    seen: Seen = {"restored": {}, "saved": {}, "rows": {}}

    def restore_or_initialize(original: Callable[..., Any], *given: Any) -> Any:
        state, step, values = original(*given)
        if step:
            seen["restored"][step] = arrays(state)
        return state, step, values

    def save(original: Callable[..., Any], *given: Any) -> Any:
        *_, step, state = given
        seen["saved"][step] = arrays(state)
        return original(*given)

    def batches(original: Callable[..., Any], examples: Any, *, start_step: int, **named: Any) -> Iterator[Any]:
        for step, batch in enumerate(original(examples, start_step=start_step, **named), start_step + 1):
            seen["rows"][step] = rows(batch)
            yield batch

    watched = (
        (initial_state, "restore_or_initialize", restore_or_initialize),
        (saving, "save", save),
        (dataset, "batches", batches),
    )
    with contextlib.ExitStack() as patches:
        for module, name, eye in watched:
            patches.enter_context(mock.patch.object(module, name, functools.partial(eye, getattr(module, name))))
        yield seen


@contextlib.contextmanager
def sharing_compilations() -> Iterator[None]:
    """Makes process 0 compile for all processes during the block, so that each program is compiled only once.

    JAX can share a compiled program, but not on CPUs: there the key of each program contains the process's own devices.
    """
    name = "jax_share_binary_between_hosts"
    before = getattr(jax.config, name)
    jax.config.update(name, True)
    try:
        with mock.patch.object(cache_key, "_hash_accelerator_config", cache_key._hash_devices):
            yield
    finally:
        jax.config.update(name, before)


def main(argv: Sequence[str]) -> int:
    """Trains in each workdir, in this order, and writes the record of this process there.

    Args:
      argv: `--workdir=DIR` for each run; all other arguments go to `meshtrain train` unchanged.
    """
    workdirs = [Path(word.removeprefix(WORKDIR)) for word in argv if word.startswith(WORKDIR)]
    others = [word for word in argv if not word.startswith(WORKDIR)]
    for workdir in workdirs:
        with sharing_compilations(), watching() as seen:
            train([*others, f"{WORKDIR}{workdir}"])
        (workdir / f"seen.{jax.process_index()}.json").write_text(json.dumps(seen), encoding="utf-8")
    return 0


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))
