"""What `data.path` and `data.validation_path` name: one source, or the sources of a mixture; and validation sets.

A source of a mixture is `FILES:WEIGHT`, a validation set `FILES`, and either may have `NAME=` before it. A text that is
the name of a file, or a glob that matches one, is that and nothing else.
"""

import glob
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple, TypeVar

from meshtrain.data.packing import Examples, Parts
from meshtrain.data.text import find_files
from meshtrain.errors import Problems, UserError

PATH, VALIDATION_PATH = "data.path", "data.validation_path"
MOST_PERIOD = 100_000  # samples after which each source has its whole share
_T = TypeVar("_T")


class Part(NamedTuple):
    """Files that belong together.

    Attributes:
      name: of a source of a mixture or a validation set; `` for the only source.
      files: in order.
      key: the option that names them.
      weight: of a source of a mixture, a whole number.
    """

    name: str = ""
    files: Sequence[Path] = ()
    key: str = PATH
    weight: int = 1


def named_parts(path: str, validation_path: str) -> tuple[list[Part], list[str]]:
    """Returns what the two options name, the sources first, and one line for each problem; no file is read."""
    items = [_weighted(text.strip()) for text in path.split(",") if text.strip()]
    if any(weight is not None for _, weight in items):
        parts, problems = _named([files for files, _ in items], PATH)
        weights, wrong = _whole_weights(items)
        problems += wrong
        if not problems:
            parts = [part._replace(weight=weight) for part, weight in zip(parts, weights, strict=True)]
        if len(items) == 1:  # it is no mixture
            parts = [parts[0]._replace(name="")]
    else:
        files, problems = find_files(path)
        parts = [Part("", files)]
    held, found = _named([text.strip() for text in validation_path.split(",") if text.strip()], VALIDATION_PATH)
    trained = {file for part in parts for file in part.files}
    found += [
        f"{VALIDATION_PATH}: got '{file}', which {PATH} names too; allowed: files that are not trained on; nearest: "
        "leave it out"
        for part in held
        for file in part.files
        if file in trained
    ]
    return parts + held, Problems(problems + found).lines()


def _weighted(text: str) -> tuple[str, str | None]:
    """Returns what stands before and after the last colon; None: there is no weight."""
    files, _, weight = text.rpartition(":")
    return (text, None) if not files or "/" in weight or find_files(text)[0] else (files, weight)


def _named(items: Sequence[str], key: str) -> tuple[list[Part], list[str]]:
    """Returns the part that each item names, and one line for each that has no files or another one's name."""
    parts, problems = dict[str, Part](), list[str]()
    for item in items:
        name, _, paths = item.rpartition("=")
        if not name or "/" in name or find_files(item)[0]:
            # A file's stem, or the folder that a glob is in.
            plain = [place for place in Path(item).parts if not glob.has_magic(place)]
            name, paths = Path(*plain).stem or item, item
        files, found = find_files(paths)
        problems += [line.replace(PATH, key, 1) for line in found]
        if name in parts:
            problems.append(
                f"{key}: got '{name}' twice as a name; allowed: one each; nearest: {name}{len(parts) + 1}={paths}"
            )
        parts[name] = Part(name, files, key)
    return list(parts.values()), problems


def _whole_weights(items: Sequence[tuple[str, str | None]]) -> tuple[list[int], list[str]]:
    """Returns the smallest whole numbers with the ratios of the weights; or one line for each weight that is wrong.

    >>> _whole_weights([("a", "0.7"), ("b", "0.25"), ("c", "0.05")])
    ([14, 5, 1], [])
    """
    weights = [_positive(weight) for _, weight in items]
    if not all(weights):
        return [], [
            f"{PATH}: got weight '{weight or ''}' of '{files}'; allowed: a number above 0 for each source; nearest: "
            f"{files}:1"
            for (files, weight), number in zip(items, weights, strict=True)
            if not number
        ]
    shares = [weight / sum(weights) for weight in weights]
    if (period := math.lcm(*(share.denominator for share in shares))) <= MOST_PERIOD:
        return [int(share * period) for share in shares], []
    rounded = [max(round(float(share), 4), 1e-4) for share in shares]
    fix = ", ".join(f"{files}:{share:g}" for (files, _), share in zip(items, rounded, strict=True))
    return [], [
        f"{PATH}: got weights whose shares are whole after {period:,} samples; allowed: after at most {MOST_PERIOD:,}, "
        f"as shares of four digits are; nearest: {fix}"
    ]


def _positive(text: str | None) -> Fraction:
    """Returns the number that a text says; 0 if it says none, or one that is not above 0 and finite."""
    try:
        return Fraction(text or "") if 0 < float(text or "") < math.inf else Fraction()
    except ValueError:
        return Fraction()


def read_each(parts: Sequence[Part], read: Callable[[Part], _T]) -> list[_T]:
    """Returns what a function returns for each part; the problems of all parts come together, each under its option.

    Raises:
      UserError: the function has raised it, with lines about `data.path`.
    """
    results, problems = list[_T](), dict[str, None]()
    for part in parts:
        try:
            results.append(read(part))
        except UserError as error:
            problems |= dict.fromkeys(line.replace(PATH, part.key, 1) for line in error.problems)
    if problems:
        raise UserError(*Problems(problems).lines())
    return results


def uses(part: Part, validation_fraction: float) -> tuple[str, ...]:
    """Returns what the splits of a part are for: the one that trains and the one held out, if any is."""
    if part.key == VALIDATION_PATH:
        return ("validation",)
    return ("training", "validation") if validation_fraction else ("training",)


def joined(parts: Sequence[Part], examples: Sequence[tuple[Examples, Examples]]) -> tuple[Examples, Examples]:
    """Returns the examples to train on and those for validation.

    Args:
      parts: from `named_parts`.
      examples: of each part those to train on, of a validation set all; and those that a source holds out.
    """
    train, own, held = dict[str, Examples](), dict[str, Examples](), dict[str, Examples]()
    for part, (first, second) in zip(parts, examples, strict=True):
        if part.key == PATH:
            train[part.name], own[part.name] = first, second
        else:
            held[part.name] = first
    held = held or own
    weights = tuple(part.weight for part in parts if part.key == PATH)
    mixed = train[""] if "" in train else Parts(train, weights)
    return mixed, Parts(held) if len(held) > 1 else next(iter(held.values()))
