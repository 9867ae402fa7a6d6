"""Parses `data.path` (a single source, or the sources of a mixture) and `data.validation_path` (validation sets).

A source of a mixture is written as `FILES:WEIGHT`, a validation set as `FILES`; both may start with `NAME=`. If the
complete text is the path of an existing file, or a glob that matches a file, it is not split into these pieces.
"""

import glob
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from meshtrain.data.text import find_files
from meshtrain.errors import Problem, short_number
from meshtrain.files import identities
from meshtrain.store.buckets import Place

PATH, VALIDATION_PATH = "data.path", "data.validation_path"
MOST_PERIOD = 100_000  # maximum of the sum of a mixture's integer weights


class Part(NamedTuple):
    """A source of training data, or a validation set.

    Attributes:
      name: the name in metrics, such as eval_loss/NAME; '' for a single source without weights.
      paths: the files or globs as the user wrote them, comma separated.
      files: the files that `paths` matches, in order, in a bucket or on a disk.
      key: the option with these paths, `data.path` or `data.validation_path`.
      weight: for a source of a mixture, the number of its samples in a period of the mixture; else 1.
    """

    name: str
    paths: str
    files: Sequence[Place]
    key: str = PATH
    weight: int = 1


def named_parts(path: str, validation_path: str) -> tuple[list[Part], list[Problem]]:
    """Parses `data.path` and `data.validation_path`; returns the sources, then the validation sets, and error lines.

    No file is read.

    Args:
      path: the value of `data.path`.
      validation_path: the value of `data.validation_path`.
    """
    items = [_split_weight(text) for text in _texts(path)]
    if any(weight is not None for _, weight in items):
        parts, problems = _parse_parts([paths for paths, _ in items], PATH)
        weights, wrong = _integer_weights(items)
        problems += wrong
        parts = [part._replace(weight=weight) for part, weight in zip(parts, weights, strict=False)] or parts
        if len(items) == 1:  # a single source is no mixture
            parts = [parts[0]._replace(name="")]
    else:
        files, problems = find_files(path)
        parts = [Part("", path, list(files))]
    held, found = _parse_parts(_texts(validation_path), VALIDATION_PATH)
    parts += held
    return parts, problems + found + shared_files(parts, identities)


def shared_files(
    parts: Sequence[Part], identities_of: Callable[[Place], Iterable[Hashable]], why: str = "which {} also lists"
) -> list[Problem]:
    """Returns an error line for each file of a source or validation set that an earlier source or set also contains.

    Args:
      parts: the sources and the validation sets.
      identities_of: a function that returns the identities of a file. Two files are the same if they have an identity
        in common.
      why: the reason in the error line; `{}` is replaced by the option or name of the earlier source or set.
    """
    if len(parts) == 1:
        return []
    problems, owners = list[Problem](), dict[Hashable, tuple[Part, Place]]()
    for part in parts:
        for file in part.files:
            known = set(identities_of(file))
            owner, path = next((owners[one] for one in known if one in owners), (part, file))
            owners |= dict.fromkeys(known - owners.keys(), (part, file))
            if owner is part:
                continue
            other = owner.key if owner.key != part.key or not owner.name else f"'{owner.name}'"
            alias = "" if str(path) == str(file) else f" as '{path}'"
            allowed = "files that are not in the training data" if owner.key != part.key else "each file once"
            problems.append(
                Problem(part.key, got=f"'{file}', {why.format(other)}{alias}", allowed=allowed, nearest="leave it out")
            )
    return problems


def _texts(paths: str) -> list[str]:
    return [text.strip() for text in paths.split(",") if text.strip()]


def _split_weight(text: str) -> tuple[str, str | None]:
    """Splits `path:weight`; the weight is None if absent."""
    paths, _, weight = text.rpartition(":")
    return (text, None) if not paths or "/" in weight or find_files(text)[0] else (paths, weight)


def _parse_parts(items: Sequence[str], key: str) -> tuple[list[Part], list[Problem]]:
    """Parses items such as `NAME=FILES`, without weights, to parts.

    Args:
      items: the comma-separated items of an option. Without `NAME=`, the name is the file's stem or the glob's folder.
      key: the option, `data.path` or `data.validation_path`.

    Returns:
      One part for each item, and an error line for each item that matches no files or repeats a name.
    """
    parts, problems = list[Part](), list[Problem]()
    for item in items:
        name, _, paths = item.rpartition("=")
        if not name or "/" in name or find_files(item)[0]:
            # A file's stem, or the folder that a glob is in.
            plain = [place for place in Path(item).parts if not glob.has_magic(place)]
            name, paths = Path(*plain).stem or item, item
        files, found = find_files(paths)
        problems += [problem.with_parts(key=problem.key.replace(PATH, key, 1)) for problem in found]
        if name in (part.name for part in parts):
            problems.append(
                Problem(
                    key,
                    got=f"'{name}' as the name of two sets",
                    allowed="a different name for each",
                    nearest=f"{name}{len(parts) + 1}={paths}",
                )
            )
        parts.append(Part(name, paths, list(files), key))
    return parts, problems


def _integer_weights(items: Sequence[tuple[str, str | None]]) -> tuple[list[int], list[Problem]]:
    """Returns the smallest integers with the same ratios as the weights, or an error line for each invalid weight.

    Args:
      items: (files, weight as text, None if it is missing) of each source.

    >>> _integer_weights([("a", "0.7"), ("b", "0.25"), ("c", "0.05")])
    ([14, 5, 1], [])
    """
    weights = [_positive(weight) for _, weight in items]
    if not all(weights):
        return [], [
            Problem(
                PATH,
                got=f"weight '{weight or ''}' of '{paths}'",
                allowed="a number above 0 for each source",
                nearest=f"{paths}:1",
            )
            for (paths, weight), number in zip(items, weights, strict=True)
            if not number
        ]
    shares = [weight / sum(weights) for weight in weights]
    if (period := math.lcm(*(share.denominator for share in shares))) <= MOST_PERIOD:
        return [int(share * period) for share in shares], []
    rounded = [max(round(float(share), 4), 1e-4) for share in shares]
    fix = ", ".join(f"{paths}:{share:g}" for (paths, _), share in zip(items, rounded, strict=True))
    return [], [
        Problem(
            PATH,
            got=f"weights whose shares have the common denominator {short_number(period)}",
            allowed=f"a common denominator of at most {MOST_PERIOD:,}, as for shares with four digits",
            nearest=fix,
        )
    ]


def _positive(text: str | None) -> Fraction:
    """Parses a positive, finite number as a fraction; returns 0 for any other text, and for None."""
    try:
        return Fraction(text or "") if 0 < float(text or "") < math.inf else Fraction()
    except ValueError:
        return Fraction()
