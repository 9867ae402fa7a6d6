"""Trains a small model, exports it, reads it back as a Hugging Face folder, and fine-tunes it with adapters.

docs/guide/finetuning.md shows the output. Each step is a command that a user could type, in a separate process. Seconds
are the CPU time of all threads divided by two: the time on two cores, independent of other programs. Start and
compilation are included.
"""

import argparse
import os
import resource
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from meshtrain.errors import UserError, run
from meshtrain.files import what_is_at

ROOT = Path(__file__).parents[2]
FOLDER = "runs/example"
NUM_CORES = 2
PROMPTS = ("is_closing(self)", "count_lines(self, s)", "import_module(name, package=None)")  # of files held out


def commands(folder: str, base_changes: Sequence[str] = (), tuned_changes: Sequence[str] = ()) -> list[list[str]]:
    """Returns the arguments of each command after `python -m`; if they end with `>` and a file, output is redirected.

    Args:
      folder: the folder for all files.
      base_changes: further arguments of the first training run.
      tuned_changes: further arguments of the fine-tuning.
    """
    held_out, model, tuned, finished = (f"{folder}/{name}" for name in ("held_out.jsonl", "model", "tuned", "finished"))
    asked = ["--chat", "--temperature=0.5", *(f"--prompt={prompt}" for prompt in PROMPTS)]
    base = ["--config=configs/data.py", "--config.mesh.data=1", "--config.batch_size=16", "--config.num_steps=250"]
    adapters = ["--config.lora.rank=16", "--config.lora.alpha=32"]
    steps = ["--config.num_steps=500", "--config.learning_rate.peak=1e-2", "--config.learning_rate.warmup_steps=100"]
    questions = ["--config.data.source=chat", f"--config.data.path={folder}/questions.jsonl"]
    written = ["--config.data.source=chat", f"--config.data.path={held_out}"]
    return [
        ["scripts.benchmarks.docstring_questions", folder],
        ["meshtrain", "train", *base, f"--workdir={folder}/base", *base_changes],
        ["meshtrain", "hf", "export", f"--workdir={folder}/base", f"--to={model}",
         "--config.data.chat_template=docs/guide/questions.jinja"],
        ["meshtrain", "evaluate", f"--workdir={model}", *written],
        ["meshtrain", "generate", f"--workdir={model}", *asked],
        ["meshtrain", "hf", "config", model, ">", f"{folder}/tune.py"],
        ["meshtrain", "train", f"--config={folder}/tune.py", f"--workdir={tuned}", *questions, *adapters, *steps,
         *tuned_changes],
        ["meshtrain", "evaluate", f"--workdir={tuned}", *written],
        ["meshtrain", "generate", f"--workdir={tuned}", *asked],
        ["meshtrain", "hf", "export", f"--workdir={tuned}", f"--to={finished}"],
        ["meshtrain", "evaluate", f"--workdir={finished}", *written],
    ]  # fmt: skip


def performed(words: Sequence[str]) -> str:
    """Runs a command, and returns its output.

    Raises:
      RuntimeError: it failed; the message is the end of its output.
    """
    target = Path(words[-1]) if ">" in words else None
    done = subprocess.run(
        [sys.executable, "-m", *(words[: words.index(">")] if target else words)],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=None if target else subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{shlex.join(words)} ended with {done.returncode}:\n{done.stdout[-5000:]}")
    if target is None:
        return done.stdout
    target.write_text(done.stdout, encoding="utf-8")
    return ""


def shown(words: Sequence[str]) -> str:
    """Returns a command as a user types it."""
    return f"$ python -m {' '.join(word if word == '>' else shlex.quote(word) for word in words)}"


def cpu_seconds() -> float:
    """Returns the CPU seconds of the commands so far, divided by the cores."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (used.ru_utime + used.ru_stime) / NUM_CORES


def main(argv: Sequence[str]) -> int:
    """Prints each command, its output, and its seconds."""
    parser = argparse.ArgumentParser(prog="scripts/bench finetune", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--to", default=FOLDER, help=f"a new folder for everything (default: {FOLDER})")
    parser.add_argument("--num-steps", type=int, default=0, help="steps of each run; 0: as in the example")
    given = parser.parse_args(argv)
    os.chdir(ROOT)
    if (what := what_is_at(given.to)) != "nothing there":
        raise UserError(f"--to: got '{given.to}', {what}; allowed: a new folder; nearest: --to={given.to}-again")
    Path(given.to).mkdir(parents=True)
    changes = [f"--config.num_steps={given.num_steps}"] if given.num_steps else []
    before = cpu_seconds()
    for words in commands(given.to, changes, changes):
        began = cpu_seconds()
        print(shown(words), flush=True)
        print(performed(words), end="", flush=True)
        print(f"# {cpu_seconds() - began:.0f} s\n", flush=True)
    print(f"{cpu_seconds() - before:.0f} seconds in all (CPU seconds over {NUM_CORES})")
    return 0


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))
