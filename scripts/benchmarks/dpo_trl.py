"""Compares the losses, margins and accuracies of preferences with TRL's formulas on the same weights.

A small run on bytes is exported, and adapters are trained on sorted digits on top of it. The package transformers reads
both folders: the merged folder is the policy, the first folder is the reference. The formulas are from `DPOTrainer`
(trl/trainer/dpo_trainer.py, trl 1.16). If trl is installed, its trainer also evaluates the same file.

Extras: transformers
"""

import argparse
import contextlib
import importlib.util
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from meshtrain.cli import flags
from meshtrain.errors import run
from meshtrain.evaluate import evaluate_parts, open_evaluation_data
from meshtrain.examples.preferences import generate_pairs
from meshtrain.run.existing_run import assemble_run, configuration, restore_weights
from scripts.benchmarks.hf_transformers import said, trained

BOUND = 1e-5
NUM_PAIRS, BETA = 24, 0.3
SIZES = {"num_layers": 2, "embed_dim": 32, "mlp_dim": 48, "num_heads": 4, "num_kv_heads": 2, "init_std": 0.3}
SHAPE = ("--config.sequence_length=64", "--config.batch_size=8", "--config.precision.policy=float32")
HEADER = ("| loss | of | meshtrain | theirs | relative difference |", "| --- | --- | --- | --- | --- |")
Values = Mapping[str, float]


def lines() -> list[dict[str, str]]:
    """Returns pairs as lines of a file."""
    found = []
    for pair in itertools.islice(generate_pairs(), NUM_PAIRS):
        (prompt, chosen), (_, rejected) = (line.pair or ("", "") for line in pair.texts)
        found.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    return found


def prepared(work: Path, num_steps: int) -> None:
    """Writes the pairs, the folders of the reference and of the policy, and the workdir of the policy."""
    (work / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines()), encoding="utf-8")
    (work / "config.py").write_text("from meshtrain.config import default as get_config\n", encoding="utf-8")
    sizes = [f"--config.model.{key}={value}" for key, value in SIZES.items()]
    trained(work / "config.py", work / "base", "--config.num_steps=1", *sizes, *SHAPE)
    said("export", f"--workdir={work / 'base'}", f"--to={work / 'reference'}")
    (work / "dpo.py").write_text(
        "from meshtrain.config import default\n\n\ndef get_config():\n    return default('preferences')\n",
        encoding="utf-8",
    )
    data = ("--config.data.source=preferences", f"--config.data.path={work / 'pairs.jsonl'}")
    adapters = ("--config.lora.rank=4", f"--config.init_from={work / 'reference'}", f"--config.model.beta={BETA}")
    dropout = "--config.model.dropout_rate=0"
    trained(work / "dpo.py", work / "run", *sizes, *data, *adapters, dropout, f"--config.num_steps={num_steps}", *SHAPE)
    said("export", f"--workdir={work / 'run'}", f"--to={work / 'policy'}", "--dtype=float32")


def ours(work: Path, loss: str) -> Values:
    """Returns the output of `evaluate` for the file of pairs."""
    words = [f"--workdir={work / 'run'}", f"--config.model.preference_loss={loss}", *SHAPE]
    words += ["--config.data.source=preferences", f"--config.data.path={work / 'pairs.jsonl'}"]
    arguments = flags.arguments(words)
    assembly = assemble_run(configuration(arguments, [], reads_data=True), arguments.workdir, None)
    scored = open_evaluation_data(assembly, arguments.overrides)
    return evaluate_parts(assembly, restore_weights(assembly, arguments.workdir, None)[0], scored)[1]


def log_probabilities(folder: Path) -> tuple[Any, Any]:
    """Returns the answers' log-probabilities by a folder's model, and their numbers of tokens: [pairs, 2] each."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    sums, counts = [], []
    for line in lines():
        start = len(tokenizer(line["prompt"])["input_ids"])
        for answer in (line["chosen"], line["rejected"]):
            ids = torch.tensor([*tokenizer(line["prompt"] + answer)["input_ids"], tokenizer.eos_token_id])
            with torch.no_grad():
                logits = model(ids[None]).logits[0, :-1]
            of_tokens = torch.log_softmax(logits, dim=-1).gather(1, ids[1:, None])[start - 1 :, 0]
            sums.append(of_tokens.sum())
            counts.append(len(of_tokens))
    return torch.stack(sums).reshape(-1, 2), torch.tensor(counts).reshape(-1, 2)


def by_formula(work: Path, loss: str) -> Values:
    """Returns the loss, the reward margin and the accuracy by TRL's formulas, in PyTorch."""
    import torch

    policy, counts = log_probabilities(work / "policy")
    gains = policy - log_probabilities(work / "reference")[0]
    margins, means = gains[:, 0] - gains[:, 1], gains / counts
    if loss == "sigmoid":
        losses = -torch.nn.functional.logsigmoid(BETA * margins)
    else:
        losses = (means[:, 0] - means[:, 1] - 1 / (2 * BETA)) ** 2
    found = {"loss": losses, "reward_margin": BETA * margins, "accuracy": (margins > 0).float()}
    return {name: float(value.mean()) for name, value in found.items()}


def by_trainer(work: Path, loss: str) -> Values:
    """Returns loss, margin and accuracy by TRL's own trainer."""
    import datasets
    import transformers
    import trl

    models = [transformers.AutoModelForCausalLM.from_pretrained(work / name) for name in ("policy", "reference")]
    arguments = trl.DPOConfig(
        output_dir=str(work / "trl"), beta=BETA, loss_type=[loss], per_device_eval_batch_size=8, use_cpu=True,
        bf16=False, report_to=[], disable_tqdm=True,
    )  # fmt: skip
    tokenizer = transformers.AutoTokenizer.from_pretrained(work / "policy")
    data = datasets.Dataset.from_list(lines())
    trainer = trl.DPOTrainer(models[0], models[1], arguments, train_dataset=data, eval_dataset=data,
                             processing_class=tokenizer)  # fmt: skip
    with contextlib.redirect_stdout(sys.stderr):
        found = trainer.evaluate()
    return {
        "loss": found["eval_loss"],
        "reward_margin": found["eval_rewards/margins"],
        "accuracy": found["eval_rewards/accuracies"],
    }


def main(argv: Sequence[str]) -> int:
    """Prints the table; returns 1 if a number differs by more than the bound."""
    parser = argparse.ArgumentParser(prog="scripts/bench dpo_trl", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=10, help="training steps of the adapters")
    arguments = parser.parse_args(argv)
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    jax.config.update("jax_platforms", "cpu")  # accelerators multiply with fewer bits
    ways = {"formula": by_formula} | ({"trl": by_trainer} if importlib.util.find_spec("trl") else {})
    worst = 0.0
    print(*HEADER, sep="\n", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        prepared(work, arguments.steps)
        for loss in ("sigmoid", "ipo"):
            mine = ours(work, loss)
            for way, compute in ways.items():
                for name, value in compute(work, loss).items():
                    difference = abs(mine[name] - value) / max(abs(value), 1e-6)
                    worst = max(worst, difference)
                    print(f"| {loss} | {name}, {way} | {mine[name]:.7f} | {value:.7f} | {difference:.1e} |", flush=True)
    print(f"the largest difference is {worst:.1e}, the bound {BOUND:.0e}")
    return int(worst > BOUND)


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))
