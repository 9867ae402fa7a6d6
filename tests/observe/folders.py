"""Folders of runs, as a run leaves them, made without one."""

import json
import pathlib
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
    "pipeline": {"schedule": "1f1b", "num_microbatches": 3, "num_chunks": 1, "table": ""},
}


def metrics(num_rows: int = 4, every: int = 10, unit: str = "tokens") -> list[dict[str, Any]]:
    """Rows as a run logs them, an evaluation at the end."""
    rows = list[dict[str, Any]]()
    for step in range(every, every * num_rows + 1, every):
        rows.append(
            {"step": step, "loss": 3 + 1 / step, "learning_rate": 1e-3, "grad_norm": 0.5, "skipped_steps": 0.0}
            | {"weight": 4096.0, unit: 4096 * step, "step_seconds": 0.5, f"{unit}_per_second": 8192.0, "mfu": None}
            | {"useful_seconds": step / 2, "timed_steps": step, "goodput": 0.8}
        )
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
