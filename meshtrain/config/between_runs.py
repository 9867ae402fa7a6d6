"""What may differ between a run and its continuation: a run's config.json read back and compared."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from meshtrain.config.config import CONFIG_FILE, Config, built
from meshtrain.words import flags
from meshtrain.words.errors import UserError

# What a run may change when it is started again: where arrays live, in what order stages run, what is computed twice,
# what is shown, measured and saved, and how long it goes on. All else would make it another run.
FREE_ON_RESUME = (
    "mesh", "zero", "offload", "layout", "pipeline", "remat", "num_steps", "log_every", "eval_every",
    "num_eval_batches", "checkpoint", "profile", "observe", "guard", "watchdog_seconds", "data.num_threads",
    "data.num_prefetch_batches",
)  # fmt: skip


def from_json(text: str) -> Config:
    """Returns the configuration of another run, types checked; a field that is newer than the run has its default.

    Raises:
      UserError: not JSON, or a key or a value that no configuration has.
    """
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{CONFIG_FILE}: not JSON ({error}); allowed: what a run wrote; nearest: --config") from error
    config, found = built(given, {})
    if found:
        raise UserError(*(f"{CONFIG_FILE}: {line}" for line in found))
    return config


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Returns `key: was X, now Y` for each difference that makes two configurations two runs.

    Args:
      old: the nested dict of a run that is to be resumed, as `json.loads` reads its config.json.
      new: the nested dict of the configuration at hand. A key that one of them lacks counts with its default.
    """
    defaults = flags.flatten(dataclasses.asdict(Config()))
    before, after = defaults | flags.flatten(old), defaults | flags.flatten(new)
    found = []
    for key in before | after:
        free = any(key == name or key.startswith(f"{name}.") for name in FREE_ON_RESUME)
        was, now = (json.dumps(values[key]) if key in values else "absent" for values in (before, after))
        if was != now and not free:
            found.append(f"{key}: was {was}, now {now}")
    return found
