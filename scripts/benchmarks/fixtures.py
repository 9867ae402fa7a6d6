"""Makes the stored runs that later versions must read: tests/run/fixtures/*.tar.xz, one archive a kind of run.

    scripts/bench fixtures FOLDER [NAME ...]

An archive contains a user's files: `run.py` (the configuration), `words.txt` (its text), `run/` (the workdir of a run
that was stopped after half of its steps), and `losses.json`: {step: loss} of the same run without interruption.
Archives are used because a save of Orbax is a dozen small files with repeated metadata; compressed, they take a
quarter.
"""

import contextlib
import io
import json
import lzma
import os
import pathlib
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from meshtrain.__main__ import main as meshtrain
from meshtrain.errors import run
from meshtrain.launch import distributed

NUM_DEVICES, NUM_STEPS, STOPPED_AT = 4, 6, 3
TEXT = "".join(f"def f{i % 7}(x):\n    return x + {i * i % 13}\n" for i in range(100))
COMMON = {
    "num_steps": NUM_STEPS, "checkpoint.every": STOPPED_AT, "batch_size": 8, "log_every": 1, "num_eval_batches": 1,
    "sample_tokens": 0, "observe.tensorboard": False, "observe.progress": False, "data.num_threads": 0,
    "learning_rate.peak": 3e-3, "learning_rate.warmup_steps": 2,
}  # fmt: skip
SMALL = {
    "sequence_length": 16, "model.num_layers": 2, "model.embed_dim": 4, "model.mlp_dim": 8, "model.num_heads": 2,
    "model.vocab_multiple": 8,
}  # fmt: skip
DECODER = COMMON | SMALL | {
    "data.source": "synthetic", "model.vocab_size": 16, "model.num_kv_heads": 2, "model.dropout_rate": 0.1,
    "mesh.data": 2,
}  # fmt: skip
# name -> (task, dotted key -> value): small models, so that all archives together stay below 300 kB.
RUNS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "experts": (
        "decoder",
        DECODER | {"mesh.expert": 2, "model.num_experts": 4, "model.expert_dim": 4, "model.router": "sigmoid",
                   "model.shared_experts": 1},
    ),
    "seq2seq": (
        "seq2seq",
        COMMON | SMALL | {"data.source": "numbers", "data.numbers_below": 100, "model.num_encoder_layers": 1,
                          "mesh.fsdp": 2},
    ),
    "convnet": (
        "convnet",
        COMMON | {"data.source": "digits", "data.validation_fraction": 0.2, "model.filters": 4, "model.hidden": 8,
                  "model.num_groups": 2},
    ),
    # At this rate, losses show whether the error-feedback buffer of int8 was restored.
    "int8": ("decoder", DECODER | {"compression.kind": "int8", "compression.block": 256, "learning_rate.peak": 0.03}),
    "topk": ("decoder", DECODER | {"compression.kind": "topk", "compression.block": 16, "compression.kept": 2}),
    "one_step_late": ("decoder", DECODER | {"local_steps.delay": 1}),
    "local_steps": ("decoder", DECODER | {"local_steps.period": 2, "local_steps.groups": 2}),
    "eight_bits": (
        "decoder",
        DECODER | {"optimizer.moments": "8bit", "optimizer.moment_block": 32, "model.vocab_size": 0,
                   "model.tied_embeddings": True, "data.source": "text", "data.path": "words.txt"},
    ),
    "lora": ("decoder", DECODER | {"lora.rank": 2}),
}  # fmt: skip


def configuration(task: str, values: Mapping[str, Any]) -> str:
    """Returns the text of a configuration file."""
    lines = "".join(f"    config.{key} = {value!r}\n" for key, value in values.items())
    return (
        "from meshtrain.config import default\n\n\n"
        f"def get_config():\n    config = default(task={task!r})\n{lines}    return config\n"
    )


def stopped(workdir: pathlib.Path) -> dict[int, float]:
    """Reduces a finished run to its state when half of its steps were saved; returns the losses of all steps."""
    shutil.rmtree(workdir / "checkpoints" / str(NUM_STEPS))
    (workdir / ".lock").unlink()  # contains the machine's name
    metrics = workdir / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    metrics.write_text("".join(f"{json.dumps(row)}\n" for row in rows if row["step"] <= STOPPED_AT), encoding="utf-8")
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def packed(folder: pathlib.Path) -> bytes:
    """Returns a folder as an archive that depends only on its files: no owner, no time."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for path in sorted(folder.rglob("*")):
            about = tarfile.TarInfo(str(path.relative_to(folder)))
            if path.is_dir():
                about.type, about.mode = tarfile.DIRTYPE, 0o755
                archive.addfile(about)
            else:
                about.size = path.stat().st_size
                with path.open("rb") as file:
                    archive.addfile(about, file)
    return lzma.compress(content.getvalue(), preset=9 | lzma.PRESET_EXTREME)


def made(name: str) -> bytes:
    """Trains one run in the current folder, which is empty, and returns its archive."""
    task, values = RUNS[name]
    pathlib.Path("run.py").write_text(configuration(task, values), encoding="utf-8")
    pathlib.Path("words.txt").write_text(TEXT, encoding="utf-8")
    with contextlib.redirect_stdout(io.StringIO()):
        meshtrain(["train", "--config=run.py", "--workdir=run"])
    losses = stopped(pathlib.Path("run"))
    pathlib.Path("losses.json").write_text(json.dumps(losses), encoding="utf-8")
    return packed(pathlib.Path())


def main(argv: Sequence[str]) -> int:
    """Writes the archives of the named runs, or of all runs, into a folder."""
    folder = pathlib.Path(argv[0]).absolute()
    distributed.start(NUM_DEVICES)
    for name in argv[1:] or RUNS:
        with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
            content = made(name)
        (folder / f"{name}.tar.xz").write_bytes(content)
        print(f"{len(content):8,} bytes  {name}", flush=True)
    return 0


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    run(lambda: main(sys.argv[1:]))
