"""Keys of former versions, and what takes their place wherever a configuration is read."""

import dataclasses
import json
from collections.abc import Mapping

from meshtrain.cli import flags
from meshtrain.errors import Problem, UserError, unknown
from meshtrain.options import Value, Values


@dataclasses.dataclass(frozen=True)
class Gone:
    """A key that no longer exists.

    Attributes:
      default: its last default, which is what the program does now; this value is dropped without a word.
      why: what takes the place of other values, or why there are none, as the end of "the only value now, ...".
    """

    default: Value
    why: str


@dataclasses.dataclass(frozen=True)
class Choice:
    """A key whose values are names of another key today.

    Attributes:
      now: today's key.
      values: former value as a text -> today's. The first is the default, which chooses nothing.
    """

    now: str
    values: Mapping[str, str]


_NAME = "reduction.name"
# Whose options are under `reduction.`; with other names these have no effect, and are dropped.
_PACKED = ("int8", "topk")
_NUMBERS = "as data.source=numbers, which reads it, is not here"
# Former key -> today's key, or why it is gone. A row has no effect where the options have a key of that name.
FORMER: Mapping[str, str | Gone | Choice] = {
    "compression.kind": Choice(_NAME, {"none": "sum", "int8": "int8", "topk": "topk"}),
    "local_steps.delay": Choice(_NAME, {"0": "sum", "1": "one_step_late"}),
    "compression.block": "reduction.block",
    "compression.kept": "reduction.kept",
    "compression.feedback": "reduction.feedback",
    "pipeline.table": Gone("", "as pipeline.schedule=package.module:function takes the place of tables in files"),
    # All sources had these; where the one that has them now is there, no row has an effect.
    "data.numbers_below": Gone(1000, _NUMBERS),
    "data.num_held_out": Gone(0, _NUMBERS),
    "data.spelling": Gone("digits", _NUMBERS),
    "model.expert_room": Gone(0.0, "as a device computes all choices of its experts, beyond an even load in parts"),
    "guard.allow_left_out": Gone(False, "as experts leave no tokens out"),
    "model.expert_exchange": Gone("gather", "as the devices of an expert axis always gather tokens"),
}
# Key -> its value in a run whose config.json lacks it, because the default changed what the program did before.
IN_FORMER_RUNS: Mapping[str, Value] = {"data.begin_token": "none"}
GROUPS = ("compression",)  # of former keys, which are no groups today


def rename(values: Values, texts: dict[str, str], defaults: Mapping[str, Value]) -> dict[str, Problem]:
    """Puts values of renamed keys under today's keys and takes those of gone keys out, both in place.

    Args:
      values: dotted key -> value, from Python or JSON.
      texts: dotted key -> text of a command line; takes precedence over `values`.
      defaults: dotted key -> default, of every key of today.

    Returns:
      Former key -> a problem, for each value that nothing stands for today.
    """
    renamed = dict[str, Problem]()
    for key, now in FORMER.items():
        if key in defaults:
            continue  # the task's own option
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
    """Returns a problem for a value of a key that is gone; None for the default that it had."""
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
    """Puts what a value chooses under today's key; returns a problem for other values, or if that is chosen otherwise.

    The default takes back what this key itself could have chosen in the values `before`, and nothing else.
    """
    if value not in row.values:
        near = list(row.values)[-1 if value.isdigit() else 0]  # a number that is no value is above all of them
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
    """Puts a value under today's key; returns a problem if that has been chosen with another value.

    What a file has under today's key may be `unchosen`, the default that it began with.
    """
    # A comparison with an array, or with an object of the user's, may raise.
    are_plain = now in among and all(isinstance(each, int | float | str) for each in (value, among[now]))
    if are_plain and among[now] not in (value, unchosen):
        return _chosen_twice(key, json.dumps(value), now, json.dumps(among[now]))
    among[now] = value
    return None


def _chosen_twice(key: str, value: str, now: str, taken: Value) -> Problem:
    """Returns the problem of a former key beside today's key, which has another value."""
    got = f"{value}, and {now} is {taken}"
    return Problem(key, got=got, allowed=f"{now} alone, its name today", nearest=f"leave {key} out")
