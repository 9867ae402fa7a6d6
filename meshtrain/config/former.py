"""Option keys of former versions, and the keys that replace them when a configuration is read."""

import dataclasses
import json
from collections.abc import Mapping

from meshtrain.cli import flags
from meshtrain.errors import Problem, UserError, unknown
from meshtrain.options import Value, Values


@dataclasses.dataclass(frozen=True)
class Gone:
    """A removed key.

    Attributes:
      default: its last default, which describes the program's behavior today. This value is ignored silently.
      why: the replacement of other values, or why there is none: the end of the error "the only value now, ...".
    """

    default: Value
    why: str


@dataclasses.dataclass(frozen=True)
class Choice:
    """A former key whose values became names under another key.

    Attributes:
      now: today's key.
      values: former value as text -> today's value. The first row is the default, which chooses nothing.
    """

    now: str
    values: Mapping[str, str]


_NAME = "reduction.name"
# The reductions that use the renamed options under `reduction.`. With another reduction these options are ignored.
_PACKED = ("int8", "topk")
_NUMBERS = "as data.source=numbers, which reads it, is not here"
# Former key -> today's key, or why the key was removed. A row has no effect if today's options have a key of that name.
FORMER: Mapping[str, str | Gone | Choice] = {
    "compression.kind": Choice(_NAME, {"none": "sum", "int8": "int8", "topk": "topk"}),
    "local_steps.delay": Choice(_NAME, {"0": "sum", "1": "one_step_late"}),
    "compression.block": "reduction.block",
    "compression.kept": "reduction.kept",
    "compression.feedback": "reduction.feedback",
    "pipeline.table": Gone("", "as pipeline.schedule=package.module:function takes the place of tables in files"),
    # Formerly every data source had these keys; today only the source `numbers` of the examples has them.
    "data.numbers_below": Gone(1000, _NUMBERS),
    "data.num_held_out": Gone(0, _NUMBERS),
    "data.spelling": Gone("digits", _NUMBERS),
    "model.expert_room": Gone(0.0, "as a device computes all choices of its experts, beyond an even load in parts"),
    "guard.allow_left_out": Gone(False, "as experts leave no tokens out"),
    "model.expert_exchange": Gone("gather", "as the devices of an expert axis always gather tokens"),
}
# Key -> the value to use for a run whose config.json lacks the key. Its default today differs from the old behavior.
IN_FORMER_RUNS: Mapping[str, Value] = {"data.begin_token": "none"}
GROUPS = ("compression",)  # groups of former keys that no longer exist


def rename(values: Values, texts: dict[str, str], defaults: Mapping[str, Value]) -> dict[str, Problem]:
    """Moves the values of renamed keys to today's keys and deletes the values of removed keys, both in place.

    Args:
      values: dotted key -> value, from Python or JSON.
      texts: dotted key -> text from the command line; takes precedence over `values`.
      defaults: dotted key -> default, for every key that exists today.

    Returns:
      Former key -> a problem, for each value that has no equivalent today.
    """
    renamed = dict[str, Problem]()
    for key, now in FORMER.items():
        if key in defaults:
            continue  # an option of the task that has the same name
        found = [(given.pop(key), given) for given in (values, texts) if key in given]
        for value, given in found[-1:] if isinstance(now, Gone) else found:
            is_text, problem = given is texts, None
            if isinstance(now, Gone):
                problem = _refused(key, value, now, is_text=is_text)
            elif isinstance(now, Choice):
                problem = _chosen(key, now, str(value), given, values if is_text else {})
            elif not now.startswith("reduction.") or (texts.get(_NAME) or values.get(_NAME)) in _PACKED:
                problem = _moved(key, now, value, given, None if is_text else defaults.get(now))
            if problem:
                renamed[key] = problem
                break
    return renamed


def _refused(key: str, value: Value, gone: Gone, *, is_text: bool) -> Problem | None:
    """Returns a problem for a value of a removed key; None if the value is the key's last default."""
    default = json.dumps(gone.default)
    try:
        read = flags.convert(value, type(gone.default), is_text=is_text)
        if read == gone.default:
            return None
        got = json.dumps(read)
    except UserError as error:
        got = error.problems[0].got
    return Problem(key, got=got, allowed=f"{default}, the only value now, {gone.why}", nearest=f"{key}={default}")


def _chosen(key: str, row: Choice, value: str, among: Values, before: Mapping[str, Value]) -> Problem | None:
    """Sets today's key to the name that a former value chooses.

    If the former key has its default, it only replaces names that this former key could have chosen in `before`.

    Returns:
      A problem if the value is unknown, or if today's key already has a different name; else None.
    """
    if value not in row.values:
        near = list(row.values)[-1 if value.isdigit() else 0]  # an unknown number is larger than every known number
        return unknown(key, value, list(row.values), near)
    default = next(iter(row.values.values()))
    name, taken = row.values[value], among.get(row.now)
    if name == default and (taken or before.get(row.now) not in row.values.values()):
        return None
    if taken not in (None, name, default):
        return _chosen_twice(key, value, row.now, taken)
    among[row.now] = name
    return None


def _moved(key: str, now: str, value: Value, among: Values, unchosen: Value) -> Problem | None:
    """Moves a value to today's key; returns a problem if today's key already has another value.

    `unchosen` is the default of today's key, which a file may contain without a choice of the user. It is overwritten.
    """
    # Comparing an array, or an object of a user's class, may raise an error.
    are_plain = now in among and all(isinstance(each, int | float | str) for each in (value, among[now]))
    if are_plain and among[now] not in (value, unchosen):
        return _chosen_twice(key, json.dumps(value), now, json.dumps(among[now]))
    among[now] = value
    return None


def _chosen_twice(key: str, value: str, now: str, taken: Value) -> Problem:
    """Returns the problem of a former key and today's key that have different values."""
    got = f"{value}, and {now} is {taken}"
    return Problem(key, got=got, allowed=f"{now} alone, its name today", nearest=f"leave {key} out")
