"""Compares the loss of configs/experts.py over tokens with a dense model of equal active size.

docs/results/training.md shows the table and the chart. The width of the dense mlp equals the experts of a token
together, so both models compute about as much per token. Both use the same batches. All runs are on one device, which
computes the same numbers as any mesh. Further arguments change the configuration.
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
from meshtrain.config.schema import Config
from meshtrain.data.loader import batches
from meshtrain.errors import run
from meshtrain.launch import distributed
from meshtrain.models.decoder_options import MoeOptions
from meshtrain.run.dataset import open_data
from meshtrain.run.evaluation import evaluate
from meshtrain.sharding.rules import AXES

SHOWN_EVERY = 30
HEADER = (
    "| seed | parameters, active: experts; dense | loss with experts | loss of the dense model | difference |",
    "| --- | --- | --- | --- | --- |",
)
# (tokens trained on so far, mean loss of validation targets).
Curve = list[tuple[int, float]]


def dense(config: Config) -> Config:
    """Returns the configuration with one mlp, as wide as all experts of a token together."""
    model = config.model
    width = (model.moe.experts_per_token + model.moe.shared_experts) * model.moe.expert_dim
    return dataclasses.replace(config, model=dataclasses.replace(model, moe=MoeOptions(num_experts=0), mlp_dim=width))


def trained(assembly: Assembly, step: object, seed: int, what: str) -> Curve:
    """Trains with a seed, and evaluates at regular steps and after the last step.

    Args:
      assembly: the run's assembly, the same for all seeds.
      step: its compiled step.
      seed: the seed of weights and data.
      what: the name of the run in progress lines.
    """
    config = dataclasses.replace(assembly.config, seed=seed)
    assembly = dataclasses.replace(assembly, config=config)
    corpus, curve = open_data(config, assembly.task), Curve()
    state = assembly.steps.init(jax.random.key_data(jax.random.key(seed)))
    for number, batch in zip(
        range(1, config.num_steps + 1), batches(corpus.train, batch=assembly.batch, seed=config.seed), strict=False
    ):
        state, _ = step(state, batch)  # type: ignore[operator]
        if number % SHOWN_EVERY == 0 or number == config.num_steps:
            curve.append((number * assembly.task.num_units, evaluate(assembly, corpus, state)["eval_loss"]))
            print(f"{what}, seed {seed}, step {number}: {curve[-1][1]:.4f}", file=sys.stderr, flush=True)
    return curve


def verdict(pairs: Sequence[tuple[float, float]]) -> str:
    """Returns one line: which model has the lower loss, the mean difference, and the number of seeds.

    Args:
      pairs: (loss of the experts, loss of the dense model) of each seed.
    """
    wins = sum(ours < theirs for ours, theirs in pairs)
    mean = sum(ours / theirs - 1 for ours, theirs in pairs) / len(pairs)
    if 2 * wins <= len(pairs):
        return f"experts do not win: {mean:+.1%} in the mean, lower in {wins} of {len(pairs)} seeds"
    return f"experts win: {mean:+.1%} in the mean, lower in {wins} of {len(pairs)} seeds"


def draw(curves: dict[str, list[Curve]], path: Path) -> None:
    """Draws the loss over tokens, a curve for each kind and seed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for number, (kind, of_seeds) in enumerate(curves.items()):
        for seed, curve in enumerate(of_seeds):
            tokens, losses = zip(*curve, strict=True)
            axes.plot(tokens, losses, color=f"C{number}", alpha=0.7, label="" if seed else kind)
    axes.set(xlabel="tokens", ylabel="validation loss, nats a byte")
    axes.legend()
    figure.savefig(path, dpi=110, metadata={"Software": None})


def main(argv: Sequence[str]) -> int:
    """Prints the table, each row when both runs of a seed end, and the verdict; draws the curves."""
    parser = argparse.ArgumentParser(prog="scripts/bench experts", description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3, help="runs of each kind, with seeds from 0 on")
    parser.add_argument("--out", default="", help="a .png file for the chart")
    given, overrides = parser.parse_known_args(argv)
    devices, _ = distributed.start(1)
    config, _ = parse(["--config=configs/experts.py", "--config.mesh.data=1", "--config.mesh.expert=1", *overrides])
    shape = dict.fromkeys(AXES, 1)
    assemblies = {kind: assemble(one, shape, devices) for kind, one in (("experts", config), ("dense", dense(config)))}
    steps = {
        kind: compile_program("step", trace_steps(assembly.steps, assembly.states)["step"])
        for kind, assembly in assemblies.items()
    }
    sizes = "; ".join(
        f"{task.num_parameters:,}, {task.num_active_parameters or task.num_parameters:,}"
        for task in (assembly.task for assembly in assemblies.values())
    )
    print(*HEADER, sep="\n", flush=True)
    curves, pairs = {kind: list[Curve]() for kind in assemblies}, list[tuple[float, float]]()
    for seed in range(given.seeds):
        for kind, assembly in assemblies.items():
            curves[kind].append(trained(assembly, steps[kind], seed, kind))
        ours, theirs = (of_seeds[-1][-1][1] for of_seeds in curves.values())
        pairs.append((ours, theirs))
        print(f"| {seed} | {sizes} | {ours:.4f} | {theirs:.4f} | {ours / theirs - 1:+.1%} |", flush=True)
    print(f"\n{verdict(pairs)}")
    if given.out:
        draw(curves, Path(given.out))
    return 0


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))
