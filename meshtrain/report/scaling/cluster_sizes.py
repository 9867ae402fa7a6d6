"""Parses the numbers of devices of `--scaling`, and names clusters of these sizes."""

import itertools
import math
import re

from meshtrain.errors import Problem, UserError
from meshtrain.plan.arguments import SCALING_EXAMPLE
from meshtrain.plan.cluster.clusters import GPUS, parse

ALLOWED = "2 to 16 ascending numbers of devices, or a progression such as 8,16,...,4096"
MOST_SIZES = 16
DOTS = "..."
PRIME_FACTORS_OF_TORUS = (2, 3, 5, 7)


def read_sizes(text: str) -> list[int]:
    """Returns the numbers of devices in the text of `--scaling`.

    `a,b,...,z` is a progression with the factor b / a up to z.

    >>> read_sizes("8,16,...,128")
    [8, 16, 32, 64, 128]

    Raises:
      UserError: the text is malformed, not ascending, or has too few or too many numbers.
    """
    words = [word.strip() for word in text.split(",")]
    sizes: list[int] = []
    for at, word in enumerate(words):
        if word == DOTS and at >= 2 and at + 2 == len(words) and re.fullmatch(r"\d{1,9}", words[-1]):
            sizes += _between(sizes, int(words[-1]))
        elif re.fullmatch(r"\d{1,9}", word):
            sizes.append(int(word))
        else:
            raise _size_error(text)
    is_ascending = all(one < other for one, other in itertools.pairwise(sizes))
    if not (2 <= len(sizes) <= MOST_SIZES and sizes[0] >= 1 and is_ascending):
        raise _size_error(text)
    return sizes


def _between(sizes: list[int], last: int) -> list[int]:
    """Returns the numbers that the dots replace; [0], an invalid size, if the progression misses the last number.

    Args:
      sizes: the numbers before the dots; at least two.
      last: the number after the dots.
    """
    first, second = sizes[-2:]
    if not 0 < first < second or second % first:
        return [0]
    result, at = list[int](), second * second // first
    while at < last and len(result) <= MOST_SIZES:
        result.append(at)
        at = at * second // first
    return result if at == last else [0]


def _size_error(text: str) -> UserError:
    return UserError(Problem("--scaling", got=f"'{text}'", allowed=ALLOWED, nearest=SCALING_EXAMPLE))


def resize(cluster: str, num_devices: int) -> str:
    """Returns the name of a cluster with the same kind of hosts and another number of devices.

    >>> [resize("h100:8x8", 32), resize("h100:8x8", 4), resize("v5e:16x16", 32), resize("v5p:2x2x2", 128)]
    ['h100:4x8', 'h100:1x4', 'v5e:4x8', 'v5p:4x4x8']
    >>> [resize("2xv5e:4x4", 64), resize("2xv5e:4x4", 8)]
    ['4xv5e:4x4', 'v5e:2x4']

    Args:
      cluster: the name of the cluster to resize.
      num_devices: the new number of devices.

    Raises:
      UserError: hosts or slices would not be full, or no torus has this size.
    """
    name, sizes, num_slices = parse(cluster)
    each, what = (sizes[1], "hosts") if name in GPUS else (math.prod(sizes), "slices")
    if (name in GPUS or num_slices > 1) and num_devices > each:
        if num_devices % each:
            fix = num_devices // each * each
            raise UserError(
                Problem(
                    "--scaling",
                    got=f"{num_devices} devices on {what} of {each}",
                    allowed=f"complete {what}, or a part of one",
                    nearest=f"{fix} or {fix + each}",
                )
            )
        if name not in GPUS:
            return f"{num_devices // each}x{name}:{'x'.join(map(str, sizes))}"
    if name in GPUS:
        return f"{name}:{max(1, num_devices // each)}x{min(each, num_devices)}"
    dims = [1] * len(sizes)
    left = num_devices
    for factor in reversed(PRIME_FACTORS_OF_TORUS):
        while left % factor == 0:
            left //= factor
            dims[dims.index(min(dims))] *= factor
    if math.prod(dims) != num_devices:
        raise UserError(
            Problem(
                "--scaling",
                got=f"{num_devices} devices on a torus",
                allowed="products of 2, 3, 5 and 7",
                nearest=2 ** round(math.log2(num_devices)),
            )
        )
    return f"{name}:{'x'.join(map(str, sorted(dims)))}"
