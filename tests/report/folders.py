"""Folders of runs, as a run leaves them, made without one."""

import json
import pathlib
import random
from collections.abc import Mapping, Sequence
from typing import Any

DEVICE = {
    "mesh": {"data": 2, "pipeline": 2, "fsdp": 1, "tensor": 2},
    "device": "cpu",
    "parameters_bytes": 1 << 20,
    "gradients_bytes": 1 << 20,
    "moments_bytes": 1 << 21,
    "on_host_bytes": 0,
    "batch_bytes": 1 << 10,
    "temporary_bytes": 9 << 20,
    "peak_bytes": 15 << 20,
}
CONFIG = {
    "seed": 0,
    "num_steps": 40,
    "accumulation_steps": 2,
    "task": "decoder",
    "mesh": {"data": 2, "pipeline": 2, "fsdp": 1, "tensor": 2},
    "pipeline": {"schedule": "1f1b", "num_microbatches": 3, "num_chunks": 1},
}


NOISY = ("loss", "learning_rate", "grad_norm", "step_seconds", "data_share", "tokens_per_second", "mfu", "goodput")


def metrics(num_rows: int = 4, every: int = 10, unit: str = "tokens", noise: float = 0.0) -> list[dict[str, Any]]:
    """Rows as a run logs them, an evaluation at the end; with noise, MFU and data share are known as well."""
    rows = list[dict[str, Any]]()
    chance = random.Random(0)
    for step in range(every, every * num_rows + 1, every):
        row = {"step": step, "loss": 3 + 1 / step, "learning_rate": 1e-3, "grad_norm": 0.5, "skipped_steps": 0.0}
        row |= {"weight": 4096.0, unit: 4096 * step, "step_seconds": 0.5, f"{unit}_per_second": 8192.0, "mfu": None}
        row |= {"useful_seconds": step / 2, "timed_steps": step, "goodput": 0.8}
        if noise:
            row |= {"mfu": 0.4, "data_share": 0.01}
            row |= {name: row[name] * (1 + noise * chance.random()) for name in NOISY}
        rows.append(row)
    rows.append({"step": every * num_rows, "eval_loss": 3.25})
    return rows


def folder(
    path: pathlib.Path,
    rows: Sequence[Mapping[str, Any]] = (),
    *,
    config: Mapping[str, Any] | None = None,
    device: Mapping[str, Any] | None = DEVICE,
    sample: str = "",
) -> pathlib.Path:
    """Writes a run's folder, and returns it."""
    path.mkdir(parents=True)
    text = "".join(json.dumps(row) + "\n" for row in rows or metrics())
    (path / "metrics.jsonl").write_text(text)
    (path / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    if device is not None:
        (path / "device.json").write_text(json.dumps(device))
    if sample:
        (path / "samples.txt").write_text(sample)
    return path
