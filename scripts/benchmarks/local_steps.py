"""Compares synchronous training with local steps on configs/tiny.py: loss over tokens and over bytes sent.

docs/results/training.md shows the table and the chart. All runs have the same initial weights, batches, inner optimizer
and validation examples. They run in one process on simulated devices, one for each group. Further arguments change the
configuration, such as `--config.model.num_layers=2`.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

from meshtrain.assembly.assemble import Assembly, assemble
from meshtrain.assembly.compiling import compile_program
from meshtrain.assembly.steps import trace_steps
from meshtrain.config.resolve import parse
from meshtrain.config.schema import Config, LocalStepsOptions
from meshtrain.data.loader import batches
from meshtrain.errors import run
from meshtrain.launch import distributed
from meshtrain.plan.hlo.collectives import collectives
from meshtrain.plan.hlo.parse import read
from meshtrain.run.dataset import open_data
from meshtrain.run.evaluation import evaluate
from meshtrain.sharding.reduction import ReductionOptions
from meshtrain.sharding.rules import AXES, DATA

NUM_GROUPS, NUM_STEPS, SHOWN_EVERY = 4, 300, 20
LATE = "one-step-late"
KINDS = {
    "synchronous": LocalStepsOptions(),
    "local-sgd-10": LocalStepsOptions(period=10, groups=NUM_GROUPS, outer_learning_rate=1.0, outer_momentum=0.0),
    "diloco-10": LocalStepsOptions(period=10, groups=NUM_GROUPS),
    "diloco-20": LocalStepsOptions(period=20, groups=NUM_GROUPS),
    LATE: LocalStepsOptions(),
}
HEADER = (
    "| seed | kind | exchanges | bytes sent per parameter and step | validation loss | change of validation loss |",
    "| --- | --- | --- | --- | --- | --- |",
)


@dataclasses.dataclass(frozen=True)
class Point:
    """The validation loss of a run after some steps.

    Attributes:
      tokens: number of training tokens so far, over all groups.
      sent_bytes: bytes that one device has sent along the data axis so far.
      loss: mean over validation targets, with the weights that an evaluation uses.
    """

    tokens: int
    sent_bytes: float
    loss: float


@dataclasses.dataclass(frozen=True)
class Steps:
    """The compiled programs of a run.

    Attributes:
      train: (state, batch) -> (state, metrics).
      outer: state -> state; None without groups.
      train_bytes: bytes that one device sends along the data axis in a step.
      outer_bytes: the same for an outer step.
    """

    train: object
    outer: object
    train_bytes: float
    outer_bytes: float


def assembled(config: Config, kind: str, devices: Sequence[jax.Device]) -> Assembly:
    """Returns the assembly of a run of this kind, on a data axis with a device for each group."""
    shape = dict.fromkeys(AXES, 1) | {DATA: NUM_GROUPS}
    reduction = ReductionOptions("one_step_late") if kind == LATE else config.reduction
    return assemble(dataclasses.replace(config, local_steps=KINDS[kind], reduction=reduction), shape, devices)


def steps_of(assembly: Assembly) -> Steps:
    """Compiles the programs of a run and counts the bytes that they send."""
    programs = {name: compile_program(name, one) for name, one in trace_steps(assembly.steps, assembly.states).items()}
    train, outer = programs["step"], programs["join"] if "join" in programs else None
    return Steps(train, outer, sent_bytes(assembly, train), sent_bytes(assembly, outer))


def sent_bytes(assembly: Assembly, compiled: object) -> float:
    """Returns the bytes that one device sends along data in a compiled program; 0 for None."""
    if compiled is None:
        return 0.0
    found = collectives(read(compiled.as_text()), dict(assembly.mesh.shape))  # type: ignore[attr-defined]
    return sum(one.count * one.wire_bytes for one in found if DATA in one.axes.split("+"))


def trained(assembly: Assembly, steps: Steps, seed: int, what: str) -> list[Point]:
    """Trains with a seed, and evaluates at regular steps and after the last step.

    Args:
      assembly: the run's assembly, the same for all seeds.
      steps: its compiled programs.
      seed: the seed of weights and data.
      what: the name of the run in progress lines.
    """
    config = dataclasses.replace(assembly.config, seed=seed)
    assembly = dataclasses.replace(assembly, config=config)
    corpus, points, sent = open_data(config, assembly.task), list[Point](), 0.0
    state, period = assembly.steps.init(jax.random.key_data(jax.random.key(seed))), config.local_steps.period
    for step, batch in zip(
        range(1, config.num_steps + 1), batches(corpus.train, batch=assembly.batch, seed=config.seed), strict=False
    ):
        state, _ = steps.train(state, batch)  # type: ignore[operator]
        sent += steps.train_bytes
        if period and step % period == 0:
            state = steps.outer(state)  # type: ignore[operator]
            sent += steps.outer_bytes
        if step % SHOWN_EVERY == 0 or step == config.num_steps:
            points.append(Point(step * assembly.task.num_units, sent, evaluate(assembly, corpus, state)["eval_loss"]))
            print(f"{what}, seed {seed}, step {step}: {points[-1].loss:.4f}", file=sys.stderr, flush=True)
    return points


def line(seed: int, kind: str, assembly: Assembly, last: Point, synchronous: Point) -> str:
    """Returns a run's row.

    Args:
      seed: the run's seed.
      kind: a name in `KINDS`.
      assembly: the run's assembly.
      last: the point after its last step.
      synchronous: the last point of the synchronous run.
    """
    num_steps, period = assembly.config.num_steps, assembly.config.local_steps.period
    num_parameters = sum(leaf.size for leaf in jax.tree.leaves(assembly.state.params))
    each = last.sent_bytes / num_steps / num_parameters
    against = "" if last is synchronous else f"{last.loss / synchronous.loss - 1:+.1%}"
    return f"| {seed} | {kind} | {num_steps // (period or 1)} | {each:.3f} | {last.loss:.4f} | {against} |"


def draw(curves: dict[str, list[Point]], path: Path) -> None:
    """Draws the loss over tokens and over bytes sent, a curve for each kind."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for kind, points in curves.items():
        losses = [point.loss for point in points]
        left.plot([point.tokens for point in points], losses, label=kind)
        right.plot([point.sent_bytes for point in points], losses, label=kind)
    left.set(xlabel="tokens", ylabel="validation loss, nats a token")
    right.set(xlabel="bytes that a device has sent over data", xscale="log")
    left.legend()
    figure.savefig(path, dpi=110, metadata={"Software": None})


def main(argv: Sequence[str]) -> int:
    """Prints the table, each row when its run ends, and draws the curves of the first seed."""
    parser = argparse.ArgumentParser(prog="scripts/bench local_steps", description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=1, help="runs of each kind, with seeds from 0 on")
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help="steps of each run")
    parser.add_argument("--out", default="", help="a .png file for the chart")
    parser.add_argument(
        "--kinds", default=",".join(KINDS), help="kinds to run, 'synchronous' first, separated by commas"
    )
    given, overrides = parser.parse_known_args(argv)
    devices, _ = distributed.start(NUM_GROUPS)
    config, _ = parse(["--config=configs/tiny.py", f"--config.num_steps={given.steps}", *overrides])
    assemblies = {kind: assembled(config, kind, devices) for kind in given.kinds.split(",")}
    programs = {kind: steps_of(assembly) for kind, assembly in assemblies.items()}
    print(*HEADER, sep="\n", flush=True)
    for seed in range(given.seeds):
        curves = dict[str, list[Point]]()
        for kind, assembly in assemblies.items():
            curves[kind] = trained(assembly, programs[kind], seed, kind)
            print(line(seed, kind, assembly, curves[kind][-1], curves["synchronous"][-1]), flush=True)
        if given.out and seed == 0:
            draw(curves, Path(given.out))
    return 0


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))
