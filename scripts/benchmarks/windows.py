"""Compares the loss of a model in long and short windows of text (docs/results/training.md).

configs/long.py trains on its mesh. The weights then read the same bytes of validation text twice: in windows of the
training length, and in shorter windows. Seconds are CPU seconds divided by two: the time on two cores, independent of
other programs. Compilation is included. Further arguments change the configuration, such as `--config.num_steps=3`.
"""

import argparse
import dataclasses
import itertools
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from meshtrain.assembly.assemble import Assembly, assemble
from meshtrain.config.resolve import parse
from meshtrain.config.schema import Config
from meshtrain.data.loader import Examples, batches
from meshtrain.errors import run
from meshtrain.launch import distributed
from meshtrain.models.task import Params
from meshtrain.run.dataset import open_data
from meshtrain.run.likelihoods import token_scores
from meshtrain.sharding.mesh import describe, mesh_shape, num_needed

NUM_CORES = 2
SHOWN_EVERY = 10
SHORT, NUM_WINDOWS = 256, 64
FIRST_RANGE = 32  # bytes; each later range is as long as all preceding ranges together
HEADER = (
    "| bytes before the target | targets | loss, window of {long:,} | loss, window of {short:,} | gain |",
    "| --- | --- | --- | --- | --- |",
)


@dataclasses.dataclass(frozen=True)
class Bytes:
    """The losses of two readings of the same targets, all arrays [N].

    Attributes:
      before: number of bytes of its document before a target in its long window.
      near: the same number in its short window.
      long: the loss of each target in the long window, in nats.
      short: the same loss in the short window.
    """

    before: np.ndarray
    near: np.ndarray
    long: np.ndarray
    short: np.ndarray


def seconds() -> float:
    """Returns this process's CPU time so far divided by two, the seconds on two cores."""
    return time.process_time() / NUM_CORES


def trained(assembly: Assembly) -> Params:
    """Trains for the configured steps and returns the weights."""
    config = assembly.config
    corpus = open_data(config, assembly.task)
    state, losses = assembly.steps.init(jax.random.key_data(jax.random.key(config.seed))), list[float]()
    for _, batch in zip(
        range(config.num_steps), batches(corpus.train, batch=assembly.batch, seed=config.seed), strict=False
    ):
        state, metrics = assembly.steps.train(state, batch)
        losses.append(float(metrics["loss"]))
        if len(losses) % SHOWN_EVERY == 0:
            mean = sum(losses[-SHOWN_EVERY:]) / SHOWN_EVERY
            print(f"step {len(losses)}: {mean:.4f}, {seconds():.0f} seconds", file=sys.stderr, flush=True)
    return state.params


def with_window(config: Config, window: int) -> Config:
    """Returns the configuration for windows of this length, with the same number of tokens in a batch."""
    num_windows = config.batch_size * config.sequence_length // window
    return dataclasses.replace(config, sequence_length=window, batch_size=num_windows)


def losses(assembly: Assembly, params: Params, examples: Examples) -> np.ndarray:
    """Returns the loss of each target, float32 [examples, T].

    Args:
      assembly: assembly for the window's length.
      params: weights of the same model and mesh, from any of the assemblies.
      examples: one example for each window.
    """
    logits = assembly.steps.logits
    assert logits is not None

    @jax.jit
    def score(params: Params, batch: dict[str, jax.Array]) -> jax.Array:
        return -token_scores(logits(params, batch), batch["targets"])[0]

    stream = batches(examples, batch=assembly.batch, seed=0, shuffle=False, num_epochs=1, num_threads=0)
    return np.concatenate([np.asarray(score(params, batch)) for batch in stream])[: len(examples)]


def read(assembly: Assembly, params: Params, short: int, num_windows: int) -> Bytes:
    """Reads evenly spaced windows of the validation text, each completely and split into short windows.

    Args:
      assembly: assembly of the training run, whose sequences are the long windows.
      params: the weights.
      short: bytes of a short window, a divisor of the long window.
      num_windows: number of long windows to read, or all if there are fewer.
    """
    config, devices = assembly.config, assembly.mesh.devices.flat
    of_short = assemble(with_window(config, short), assembly.mesh.shape, list(devices))
    longs, shorts = (open_data(one.config, one.task).validation for one in (assembly, of_short))
    num_parts = config.sequence_length // short
    places = np.unique(np.linspace(0, len(longs) - 1, num_windows).astype(int))
    whole = [longs[int(place)] for place in places]
    parts = [shorts[int(place) * num_parts + part] for place in places for part in range(num_parts)]
    before, near = (np.concatenate([one["positions"] for one in windows]) + 1 for windows in (whole, parts))
    weights, of_parts = (np.concatenate([one["weights"] for one in windows]) for windows in (whole, parts))
    assert np.array_equal(weights, of_parts), "other bytes are read"
    counted = weights > 0
    found = [losses(*given).reshape(-1)[counted] for given in ((assembly, params, whole), (of_short, params, parts))]
    return Bytes(before[counted], near[counted], *found)


def ranges(window: int) -> list[tuple[int, int]]:
    """Returns the ranges of a table, (first, last) number of bytes before a target.

    >>> ranges(256)
    [(1, 32), (33, 64), (65, 128), (129, 256)]
    """
    lasts = [0, min(FIRST_RANGE, window)]
    while lasts[-1] < window:
        lasts.append(min(2 * lasts[-1], window))
    return [(before + 1, last) for before, last in itertools.pairwise(lasts)]


def lines(found: Bytes, long: int, short: int) -> list[str]:
    """Returns the table of losses, a row for each range that has targets.

    The second last row excludes the loss at the start of a short window: its targets have at least half of the short
    window before them.
    """
    rows = [line.format(long=long, short=short) for line in HEADER]
    named = [(f"{first:,} to {last:,}", _between(found.before, first, last)) for first, last in ranges(long)]
    far = (found.before > short) & (found.near > short // 2)
    named += [(f"over {short:,}, over {short // 2:,} of them in the short window", far), ("all", found.before > 0)]
    for name, here in named:
        if here.any():
            in_long, in_short = (float(np.mean(losses[here])) for losses in (found.long, found.short))
            cells = (name, f"{np.count_nonzero(here):,}", f"{in_long:.3f}", f"{in_short:.3f}")
            rows.append(f"| {' | '.join(cells)} | {in_short - in_long:+.3f} |")
    return rows


def _between(values: np.ndarray, first: int, last: int) -> np.ndarray:
    return (values >= first) & (values <= last)


def draw(found: Bytes, long: int, short: int, path: Path) -> None:
    """Draws the loss over the number of bytes before a target, a curve for each window."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for window, losses in ((short, found.short), (long, found.long)):
        points = []
        for first, last in ranges(long):
            here = _between(found.before, first, last)
            if here.any():
                points.append(((first + last) / 2, float(np.mean(losses[here]))))
        axes.plot(*zip(*points, strict=True), "o-", markersize=3, label=f"window of {window:,} bytes")
    axes.axvline(short, color="#8a94a0", linewidth=0.9, linestyle="--")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set(xlabel=f"bytes of its document before it, in the window of {long:,}", ylabel="loss, nats a byte")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "meshtrain"}):
        figure.savefig(path, metadata={"Date": None})


def main(argv: Sequence[str]) -> int:
    """Trains, reads, and prints the table."""
    parser = argparse.ArgumentParser(prog="scripts/bench windows", description=__doc__.partition("\n")[0])
    parser.add_argument("--short", type=int, default=SHORT, help="bytes of the short window")
    parser.add_argument("--windows", type=int, default=NUM_WINDOWS, help="number of long windows of validation text")
    parser.add_argument("--out", default="", help="a .svg file for the chart")
    given, overrides = parser.parse_known_args(argv)
    config, _ = parse(["--config=configs/long.py", *overrides])
    devices, _ = distributed.start(num_needed(config.mesh))
    assembly = assemble(config, mesh_shape(config.mesh, len(devices), simulated=True), devices)
    long = config.sequence_length
    params = trained(assembly)
    took = seconds()
    found = read(assembly, params, given.short, given.windows)
    print(*lines(found, long, given.short), sep="\n")
    print(
        f"\n{describe(assembly.mesh, 1)}: {config.num_steps} steps on sequences of {long:,} bytes, {took:.0f} seconds"
    )
    if given.out:
        draw(found, long, given.short, Path(given.out))
    return 0


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))
