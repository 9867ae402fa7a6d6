"""Loads exports with the packages transformers and peft, and compares their logits with ours.

Every model of tests/hf/fixtures is imported and exported. Some get adapters in steps of training, and leave with them
merged, and as a folder of peft. A run of our own on bytes leaves with its tokenizer. Logits are float32; the bound is
the one that the tests have. After half of a text both go on greedily, and have to choose the same tokens.

Extras: transformers
"""

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshtrain import main as training
from meshtrain.cli import flags
from meshtrain.errors import run
from meshtrain.hf.config_json import described
from meshtrain.run import hugging_face
from meshtrain.run.weights import assembled, configuration, restored

FIXTURES = Path(__file__).parents[2] / "tests" / "hf" / "fixtures"
ADAPTED = ("gemma3", "gpt2", "llama", "llama-tied-headdim", "phi3", "qwen3")
BOUND = 1e-4
OTHER = "NOT equal"
LENGTH = 24  # tokens of a text
QUIET = (
    "--config.eval_every=0", "--config.sample_tokens=0", "--config.observe.progress=no",
    "--config.observe.tensorboard=no", "--config.precision.policy=float32", "--config.batch_size=2",
    f"--config.sequence_length={LENGTH}", "--config.learning_rate.name=constant", "--config.learning_rate.peak=0.02",
    "--config.learning_rate.warmup_steps=0",
)  # fmt: skip
TEXT = "def f(x):\n\treturn 'é€😀'  # two  blanks, a carriage return\r\n"
HEADER = (
    "| model | exported | largest difference | of logits up to | moved from the base by | greedy text |",
    "|---|---|---|---|---|---|",
)


def ours(workdir: Path, ids: np.ndarray) -> np.ndarray:
    """Returns this program's logits of a run or a folder, float32 [texts, LENGTH, padded vocabulary]."""
    return program(workdir)(ids)


def program(workdir: Path) -> Callable[[np.ndarray], np.ndarray]:
    """Returns what `ours` calls."""
    arguments = flags.arguments([f"--workdir={workdir}", *QUIET])
    config = configuration(arguments, [], reads_data=False)
    assembly = assembled(config, workdir, None)
    params, _ = restored(assembly, workdir, None)
    logits: Any = assembly.logits

    def run(ids: np.ndarray) -> np.ndarray:
        positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), ids.shape)
        ones = np.ones(ids.shape, np.int32)
        batch = {"tokens": ids, "targets": ids, "segment_ids": ones, "positions": positions}
        batch["weights"] = ones.astype(np.float32)
        of_batch = {name: jax.device_put(batch[name], like.sharding) for name, like in assembly.batch.items()}
        return np.asarray(logits(params, of_batch))

    return run


def greedy(run: Callable[[np.ndarray], np.ndarray], ids: np.ndarray) -> np.ndarray:
    """Returns the texts with their second halves chosen by this program."""
    found = ids.copy()
    for place in range(LENGTH // 2, LENGTH):
        found[:, place] = run(found)[:, place - 1].argmax(axis=-1)
    return found


def greedy_theirs(folder: Path, ids: np.ndarray) -> np.ndarray:
    """Returns the texts with their second halves chosen by transformers, with its cache."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None  # no text ends early
    given = torch.from_numpy(ids[:, : LENGTH // 2]).long()
    settings = transformers.GenerationConfig(do_sample=False, max_new_tokens=LENGTH // 2, pad_token_id=0)
    found: np.ndarray = model.eval().generate(given, generation_config=settings).numpy()
    return found


def theirs(folder: Path, ids: np.ndarray, adapters: Path | None = None) -> np.ndarray:
    """Returns the logits of transformers, float32 [texts, LENGTH, vocabulary], with adapters read by peft."""
    import peft
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if adapters is not None:
        model = peft.PeftModel.from_pretrained(model, adapters)
    with torch.no_grad():
        found: np.ndarray = model.eval()(torch.from_numpy(ids).long()).logits.numpy()
    return found


def said(*words: str | Path) -> None:
    """Runs `hf` with these words; what it prints goes to standard error."""
    with contextlib.redirect_stdout(sys.stderr):
        hugging_face.main([str(word) for word in words])


def trained(config: Path, workdir: Path, *changes: str) -> None:
    """Trains with a configuration file."""
    with contextlib.redirect_stdout(sys.stderr):
        training.main([f"--config={config}", f"--workdir={workdir}", *QUIET, *changes])


def row(
    name: str, what: str, got: np.ndarray, wanted: np.ndarray, base: np.ndarray | None = None, text: str = ""
) -> bool:
    """Prints a line of the table; returns whether the logits agree, and those of a base do not."""
    wanted = wanted[..., : got.shape[-1]]
    difference, largest = np.abs(got - wanted).max(), np.abs(wanted).max()
    moved = np.inf if base is None else np.abs(base[..., : got.shape[-1]] - wanted).max()
    shown = "" if base is None else f"{moved:.1f}"
    print(f"| {name} | {what} | {difference:.1e} | {largest:.0f} | {shown} | {text} |", flush=True)
    return bool(text != OTHER and difference <= BOUND and moved > 1000 * BOUND)


def imported(name: str, work: Path) -> bool:
    """Compares a fixture after `hf import` and `hf export`."""
    ids = np.load(FIXTURES / name / "expected.npz")["input_ids"]
    said("import", FIXTURES / name, f"--to={work / 'run'}")
    said("export", f"--workdir={work / 'run'}", f"--to={work / 'out'}")
    dtype, run = described(work / "out").dtype, program(work / "run")
    is_equal = (greedy(run, ids) == greedy_theirs(work / "out", ids)).all()
    return row(name, f"an import, {dtype}", theirs(work / "out", ids), run(ids), text="equal" if is_equal else OTHER)


def adapted(name: str, work: Path, num_steps: int) -> bool:
    """Compares a fixture with adapters after training, merged and read by peft."""
    ids = np.load(FIXTURES / name / "expected.npz")["input_ids"]
    with (work / "config.py").open("w") as file, contextlib.redirect_stdout(file):
        hugging_face.main(["config", str(FIXTURES / name)])
    trained(work / "config.py", work / "run", "--config.lora.rank=4", f"--config.num_steps={num_steps}")
    said("export", f"--workdir={work / 'run'}", f"--to={work / 'merged'}", "--dtype=float32")
    said("export", f"--workdir={work / 'run'}", f"--to={work / 'peft'}", "--adapters")
    wanted, base = ours(work / "run", ids), ours(FIXTURES / name, ids)
    of_merged, of_peft = theirs(work / "merged", ids), theirs(FIXTURES / name, ids, work / "peft")
    right = [
        row(name, "adapters merged", of_merged, wanted, base),
        row(name, "adapters of peft", of_peft, wanted, base),
    ]
    return all(right)


def of_bytes(work: Path, num_steps: int) -> bool:
    """Compares a run of our own, its tokenizer too."""
    import transformers

    (work / "text.txt").write_text(TEXT * 100, encoding="utf-8")
    sizes = {"num_layers": 2, "embed_dim": 32, "mlp_dim": 48, "num_heads": 4, "num_kv_heads": 2, "init_std": 0.3}
    changes = [f"--config.model.{key}={value}" for key, value in sizes.items()]
    changes += ["--config.data.source=text", f"--config.data.path={work / 'text.txt'}"]
    (work / "config.py").write_text("from meshtrain.config import default as get_config\n", encoding="utf-8")
    trained(work / "config.py", work / "run", f"--config.num_steps={num_steps}", *changes)
    said("export", f"--workdir={work / 'run'}", f"--to={work / 'out'}")
    tokenizer = transformers.AutoTokenizer.from_pretrained(work / "out")
    ids, wanted = tokenizer(TEXT)["input_ids"], list(TEXT.encode())
    is_equal = ids == wanted and tokenizer.decode(ids) == TEXT and tokenizer.eos_token_id == 256
    batch = np.asarray([ids[:LENGTH], ids[-LENGTH:]], np.int32)
    is_right = row("a run on bytes", "float32", theirs(work / "out", batch), ours(work / "run", batch))
    print(f"\ntokenizer of bytes: ids, text and the end's id are {'equal' if is_equal else 'NOT equal'}", flush=True)
    return is_right and is_equal


def main(argv: Sequence[str]) -> int:
    """Prints the table; returns 1 if logits differ by more than the bound."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench hf_transformers", description="Compares exports with our logits."
    )
    parser.add_argument("--only", default="", help="names of models with this in them")
    parser.add_argument("--steps", type=int, default=10, help="of training with adapters")
    arguments = parser.parse_args(argv)
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    jax.config.update("jax_platforms", "cpu")  # accelerators multiply in fewer bits
    names = sorted(path.parent.name for path in FIXTURES.glob("*/expected.npz") if arguments.only in path.parent.name)
    right = []
    print(*HEADER, sep="\n", flush=True)
    for name in names:
        with tempfile.TemporaryDirectory() as work:
            right.append(imported(name, Path(work)))
    for name in (name for name in names if name in ADAPTED):
        with tempfile.TemporaryDirectory() as work:
            right.append(adapted(name, Path(work), arguments.steps))
    if not arguments.only:
        with tempfile.TemporaryDirectory() as work:
            right.append(of_bytes(Path(work), arguments.steps))
    print(f"{sum(right)} of {len(right)} models agree to {BOUND:.0e}")
    return int(not all(right))


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))
