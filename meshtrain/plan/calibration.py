"""The seconds of a measured step, for calibration: from a run's metrics.jsonl, or given as a number."""

import statistics
from pathlib import Path

from meshtrain.words.errors import UserError
from meshtrain.words.paths import expanded, what_is_at
from meshtrain.words.read_json import read_json

ALLOWED = "metrics.jsonl of a run, or seconds a step such as 1.25; nearest: --calibrate=1.25"


def measured_seconds(given: str) -> float | None:
    """Returns the seconds of a measured step, the median over a run's log; None for an empty text.

    Args:
      given: the path of a metrics.jsonl, or a number.

    Raises:
      UserError: neither, or a log without step times.
    """
    if not given:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = _from_log(expanded(given))
    if not 0 < seconds < float("inf"):
        raise UserError(f"--calibrate: got {given}; allowed: {ALLOWED}")
    return seconds


def _from_log(path: Path) -> float:
    if (what := what_is_at(path)) != "a file":
        raise UserError(f"--calibrate: '{path}' is not a file but {what}; allowed: {ALLOWED}")
    try:
        rows = [read_json(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        times = [float(row["step_seconds"]) for row in rows if isinstance(row, dict) and row.keys() >= {"step_seconds"}]
    except (ValueError, TypeError, OSError) as error:
        raise UserError(f"--calibrate: '{path}' is no log of a run ({error}); allowed: {ALLOWED}") from error
    if not times:
        raise UserError(f"--calibrate: '{path}' has no step_seconds; allowed: {ALLOWED}")
    return statistics.median(times)
