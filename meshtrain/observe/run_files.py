"""A row of `metrics.jsonl`: how a line is read, and what the names in it begin with.

Names of the files in a run's folder that are read back, besides `metrics.jsonl`.
"""

import re
from collections.abc import Mapping

from meshtrain.errors import is_finite
from meshtrain.files import Json, JsonObject, read_json

EVALUATED = "eval_"  # what the names of an evaluation's metrics begin with
LOSS_OF = "eval_loss/"  # the loss of one validation set: its name follows
EPOCHS = "epochs/"  # how often a source of a mixture was drawn: its name follows, as it does behind `tokens/`
OF_EACH = re.compile(r"(.+)_each/(\d{1,9})")  # the load of one expert: the name of the metric, and the expert
# Of one layer, or of other parameters: the name of the metric, and the layer or the first key of the parameters.
OF_LAYER = re.compile(r"(grad_norm|weight_norm|update_norm|largest_activation)_of/(.+)")
# Entries that others of a row imply: neither the line of the terminal nor a page has them besides.
IMPLIED = ("weight", "useful_seconds", "timed_steps", "data_seconds", "host_seconds", "device_wait_seconds")


def is_of_one(name: str) -> bool:
    """Returns whether a metric is of one of many: of an expert, a layer, or a source of a mixture."""
    return name.startswith(EPOCHS) or bool(OF_EACH.fullmatch(name) or OF_LAYER.fullmatch(name))


def row_of(line: bytes) -> JsonObject | None:
    """Returns the row that a line of `metrics.jsonl` holds, None if it holds none."""
    # Without its newline a line may be a number cut short, which still parses.
    if not line.endswith(b"\n"):
        return None
    try:
        row = read_json(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def has_goodput(row: Mapping[str, Json]) -> bool:
    """Returns whether a row says how long the run has taken: its useful seconds, and their share."""
    wanted = ("useful_seconds", "timed_steps", "goodput")
    return all(is_finite(row.get(name)) for name in wanted) and row["goodput"] > 0


def passed_seconds(row: Mapping[str, Json]) -> float:
    """Returns the seconds from the run's first start to a row with goodput."""
    return row["useful_seconds"] / row["goodput"]


CONFIG_FILE = "config.json"  # the resolved configuration
DEVICE_FILE = "device.json"  # the mesh, and the bytes that one device holds
PROMPTED_FILE = "samples.jsonl"  # the text that evaluations drew: step, prompt, text
SAMPLES_FILE = "samples.txt"  # the text that the run drew at its end
