"""Parses `data.path` and `data.validation_path`: a single source, or the sources of a mixture; and validation sets.

A source of a mixture is `FILES:WEIGHT`, a validation set is `FILES`; both may start with `NAME=`. A text that is the
name of an existing file, or a glob that matches one, is always read as files.
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
MOST_PERIOD = 100_000  # samples after which each source has its exact share


class Part(NamedTuple):
    """A source of a mixture, or a validation set.

    Attributes:
      name: '' for the only source.
      paths: its files or globs, comma separated.
      files: the resolved files in order, in a bucket or on a disk.
      key: the option that names them.
      weight: of a source of a mixture, a positive integer.
    """

    name: str
    paths: str
    files: Sequence[Place]
    key: str = PATH
    weight: int = 1


def named_parts(path: str, validation_path: str) -> tuple[list[Part], list[Problem]]:
    """Returns the parts that the two options name, sources first, and an error line for each problem; reads no file."""
    items = [_split_weight(text) for text in _texts(path)]
    if any(weight is not None for _, weight in items):
        parts, problems = _parse_parts([paths for paths, _ in items], PATH)
        weights, wrong = _integer_weights(items)
        problems += wrong
        parts = [part._replace(weight=weight) for part, weight in zip(parts, weights, strict=False)] or parts
        if len(items) == 1:  # it is no mixture
            parts = [parts[0]._replace(name="")]
    else:
        files, problems = find_files(path)
        parts = [Part("", path, list(files))]
    held, found = _parse_parts(_texts(validation_path), VALIDATION_PATH)
    parts += held
    return parts, problems + found + shared_files(parts, identities)


def shared_files(
    parts: Sequence[Part], identities_of: Callable[[Place], Iterable[Hashable]], why: str = "which {} names too"
) -> list[Problem]:
    """Returns an error line for each file of a source or validation set that an earlier source or set also has.

    Args:
      parts: the sources and the validation sets.
      identities_of: a file -> its identities; two files are the same if they have an identity in common.
      why: the reason in the error line, with a placeholder for the option or the name of the other part.
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
            allowed = "files that are not trained on" if owner.key != part.key else "each file once"
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
    """Returns the part for each item, and an error line for each item that has no files or repeats a name."""
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
                    got=f"'{name}' twice as a name",
                    allowed="one each",
                    nearest=f"{name}{len(parts) + 1}={paths}",
                )
            )
        parts.append(Part(name, paths, list(files), key))
    return parts, problems


def _integer_weights(items: Sequence[tuple[str, str | None]]) -> tuple[list[int], list[Problem]]:
    """Returns the smallest integers with the ratios of the weights, or an error line for each invalid weight.

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
            got=f"weights whose shares are whole after {short_number(period)} samples",
            allowed=f"after at most {MOST_PERIOD:,}, as shares of four digits are",
            nearest=fix,
        )
    ]


def _positive(text: str | None) -> Fraction:
    """Returns the number in a text; 0 if the text is no number, or the number is not positive and finite."""
    try:
        return Fraction(text or "") if 0 < float(text or "") < math.inf else Fraction()
    except ValueError:
        return Fraction()
