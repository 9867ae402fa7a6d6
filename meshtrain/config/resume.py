"""Compares a run's config.json with the configuration that resumes the run; lists the options that may change."""

import json
from collections.abc import Mapping

from meshtrain.cli import flags, foreign
from meshtrain.config import tasks, version_0_2
from meshtrain.config.build import build, defaults_of
from meshtrain.config.records import VERSION, without_version
from meshtrain.config.schema import CONFIG_FILE, Config
from meshtrain.config.unused_options import without_effect
from meshtrain.errors import Problem, UserError, refuse
from meshtrain.files import Json, read_json
from meshtrain.options import Value, Values
from meshtrain.sharding.rules import AXES, DATA

# Options that may change when a run resumes, and why. The longest matching name counts: `model.attention` before
# `model`.
FREE_ON_RESUME: Mapping[str, tuple[str, ...]] = {
    "the placement of arrays and the order of stages: sums are the same on every mesh": (
        "mesh", "zero", "offload", "layout", "pipeline",
    ),
    "the saved activations and the kernels: the function is the same": (
        "remat", "model.attention", "model.loss_chunk",
    ),
    "the rounding of sums on GPUs: the function is the same": ("precision.deterministic",),
    # Dropout is keyed by a sequence's index in the global batch, and the loss scale applies to the mean loss: neither
    # depends on the number of parts. Only the order of a sum changes, as with another mesh or number of microbatches.
    # An auxiliary loss that is not a sum over sequences depends on both.
    "the number of parts of a batch: their gradients add up to the same sum": ("accumulation_steps",),
    "the source of the data and the reading speed: the fingerprint of token ids and split is compared instead": (
        "data.source", "data.path", "data.validation_path", "data.text_field", "data.tokenizer", "data.end_token",
        "data.begin_token", "data.special_tokens",
        "data.chat_template", "data.validation_fraction", "data.num_threads", "data.num_prefetch_batches",
    ),
    "logs, measurements and saves": (
        "log_every", "eval_every", "num_eval_batches", "eval_prompts", "eval_tokens", "sample_tokens",
        "checkpoint", "profile", "observe",
    ),
    # These options change the learning rates after the resumed step; `run.workdir` warns of a jump.
    "the length of the run, and the decay of its learning rate": (
        "num_steps", "num_epochs", "learning_rate.decay_steps",
    ),
    "averages of the weights: they do not change the weights": ("optimizer.average",),
    # A spike rule determines which later steps are skipped; users change it on resume to skip other steps.
    "the conditions for an early stop": ("guard", "early_stop", "watchdog_seconds"),
}  # fmt: skip
FIXED_ON_RESUME: Mapping[str, tuple[str, ...]] = {
    "another model, or another shape of its arrays": ("task", "model", "lora"),
    "other sequences in a step": ("seed", "batch_size", "sequence_length", "data.packing", "data.loss_on"),
    "other gradients": ("precision", "loss_scale", "reduction"),
    "other updates": ("optimizer", "learning_rate", "local_steps"),
    "the origin of the weights, which config.json records": ("init_from", "init_base", "init_ignore"),
    "another directory of checkpoints, with which the run would start from the beginning": ("checkpoint.directory",),
}


def from_json(text: str, overrides: Mapping[str, str] | None = None) -> Config:
    """Returns the configuration in the config.json of another run, with types checked.

    Missing fields get their defaults. A file of version 0.2 is converted (`version_0_2.today`). If the option `task`
    names a function, it is imported.

    Args:
      text: the content of config.json.
      overrides: dotted key -> text, as on the command line; takes precedence over config.json.

    Raises:
      UserError: the text is not JSON, or has an unknown key or a value of a wrong type.
    """
    try:
        given = read_json(text)
    except ValueError as error:
        raise UserError(
            Problem(CONFIG_FILE, fault=f"not JSON ({error})", allowed="the file that a run wrote", nearest="--config")
        ) from error
    if isinstance(given, dict) and VERSION not in given:
        given = version_0_2.today(given)
    config, problems = build(given, dict(overrides or {}))
    refuse(problem.at(CONFIG_FILE) for problem in problems)
    return config


def difference(old: Mapping[str, Json], new: Mapping[str, Json]) -> list[Problem]:
    """Returns a problem `key: was X, now Y` for each option that differs although it may not change when a run resumes.

    Options without effect (such as options of another optimizer) are not compared.

    Args:
      old: the nested dict of the run to resume, as `json.loads` reads its config.json.
      new: the nested dict of the new configuration. A key that `old` or `new` lacks has its default.
    """
    then, after = (flags.flatten(without_version(values)) for values in (old, new))
    defaults = _defaults(new)
    before, after = defaults | then, defaults | after
    alike = {key: before[key] == after[key] for key in ("task", "reduction.name")}
    # A function that only the old run names is not imported; the configurations differ anyway.
    named = foreign.outside(dict(old), CONFIG_FILE, ())
    is_built = all(alike.values()) and all(after.get(key) == name for key, name in named.items())
    idle = _idle(new) | (_idle(then) if is_built else set())
    if not alike["reduction.name"]:  # the name already reports it: reductions have different options
        idle |= {key for key in before | after if key.startswith("reduction.") and key != "reduction.name"}
    result = list[Problem]()
    for key in before | after:
        was, now = (json.dumps(values[key]) if key in values else "absent" for values in (before, after))
        # The table names the decoder's options. A user's option of the same name is a different option, and may not
        # change.
        is_own = key.startswith("model.") and after["task"] not in tasks.names()
        if was != now and key not in idle and (is_own or not is_free(key)):
            result.append(Problem(key, fault=f"was {was}, now {now}"))
    return result


def _idle(values: Mapping[str, Value]) -> set[str]:
    """Returns the dotted keys of the options without effect in a configuration; an empty set if it is invalid.

    Args:
      values: dotted key -> value, or a nested dict.
    """
    try:
        config, problems = build(values, {})
    except UserError:
        return set()
    # The sizes of axes do not matter here: options whose effect depends on them may change on resume anyway. The
    # exceptions are options of a reduction, which have an effect if data is larger than 1.
    return set() if problems else set(without_effect(config, dict.fromkeys(AXES, 1) | {DATA: 2}))


def _defaults(values: Mapping[str, Value]) -> Values:
    """Returns dotted key -> default of all options of a configuration, given as a nested dict.

    The dict names the task, the data source and functions, whose options are included. The options of `model` are left
    out if the task cannot be used.
    """
    config, problems = build(values, {})
    defaults = flags.flatten(defaults_of(config))
    has_task = not any(problem.key == "task" for problem in problems)
    return {key: value for key, value in defaults.items() if has_task or not key.startswith("model.")}


def is_free(key: str) -> bool:
    """Returns whether the option with this dotted key may change on resume.

    The longest matching name in the tables FREE_ON_RESUME and FIXED_ON_RESUME decides. An option in neither table may
    not change.
    """
    free, fixed = (_longest_match(key, table) for table in (FREE_ON_RESUME, FIXED_ON_RESUME))
    return free > fixed


def _longest_match(key: str, table: Mapping[str, tuple[str, ...]]) -> int:
    """Returns the length of the longest name in a table that equals the key or a group of it; 0: no such name.

    For example, the names `model.rope.base`, `model.rope` and `model` match the key `model.rope.base`.
    """
    names = [name for names in table.values() for name in names if key == name or key.startswith(f"{name}.")]
    return max(map(len, names), default=0)
