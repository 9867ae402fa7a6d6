"""Measures how long a save blocks training, and how long its files and their checksums take.

The state has the size of `--gigabytes`, in the arrays of a decoder with AdamW (weights and two moments, float32),
sharded over the devices. As in training, steps that change every array run while files are written.

Extras: cuda
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshtrain.checkpoint import integrity
from meshtrain.checkpoint.checkpoint import Checkpoints
from meshtrain.checkpoint.retention import CheckpointOptions
from meshtrain.errors import run
from meshtrain.launch import distributed

WIDTH, NUM_LAYERS = 1024, 8
STEP_SECONDS = 0.5


def example_state(num_bytes: float, devices: Sequence[jax.Device]) -> dict[str, Any]:
    """Returns weights and moments of about `num_bytes`, with stacked layers and rows sharded over the devices."""
    rows = int(num_bytes / 3 / 4 / NUM_LAYERS / WIDTH / 4) // len(devices) * len(devices)
    shape, spec = (NUM_LAYERS, rows, WIDTH), PartitionSpec(None, "fsdp")
    sharding = NamedSharding(Mesh(np.array(devices), ("fsdp",)), spec)
    values = np.random.default_rng(0).standard_normal(shape, np.float32)
    weights = {name: jax.device_put(values, sharding) for name in ("query", "key", "up", "down")}
    return {
        "params": weights,
        "mu": jax.tree.map(lambda leaf: leaf * 2, weights),
        "nu": jax.tree.map(lambda leaf: leaf * leaf, weights),
    }


def measure(state: Any, num_saves: int, directory: Path) -> list[tuple[float, float]]:
    """Returns for each save the seconds that it blocked the caller, and the seconds until it was complete."""
    step = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf * 1.0001, state), donate_argnums=0)
    found = []
    with Checkpoints(directory, CheckpointOptions(keep_last=1)) as checkpoints:
        for number in range(1, num_saves + 1):
            state = jax.block_until_ready(step(state))
            start = time.perf_counter()
            checkpoints.save(number, state, {})
            held = time.perf_counter() - start
            while not integrity.is_sealed(directory / str(number)):
                time.sleep(STEP_SECONDS)  # steps without a pause would leave no core for the writing threads
                state = jax.block_until_ready(step(state))
            found.append((held, time.perf_counter() - start))
    return found


def main(argv: Sequence[str]) -> int:
    """Prints a line for each save."""
    parser = argparse.ArgumentParser(prog="scripts/bench save", description=__doc__.partition("\n")[0])
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the state")
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--saves", type=int, default=6)
    arguments = parser.parse_args(argv)
    devices, _ = distributed.start(arguments.devices)
    state = example_state(arguments.gigabytes * 1e9, devices)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    print(f"jax {jax.__version__}, {len(devices)} x {devices[0].device_kind}, {size / 1e9:.2f} GB of state")
    with tempfile.TemporaryDirectory() as folder:
        found = measure(state, arguments.saves, Path(folder))
    for number, (held, sealed) in enumerate(found, 1):
        print(f"save {number}: training blocked {held:.2f} s, complete after {sealed:.2f} s, ratio {held / sealed:.3f}")
    later = found[1:]
    held, sealed = (statistics.median(one[side] for one in later) for side in (0, 1))
    print(
        f"median after the first: training blocked {held:.2f} s, complete after {sealed:.2f} s, ratio "
        f"{held / sealed:.3f}"
    )
    return 0


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))
