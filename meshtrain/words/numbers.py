"""Whether a value is a finite number; the nearest divisor and the nearest multiple of a size, for error messages."""

import math
import numbers
from typing import Any


def is_finite(value: Any) -> bool:
    """Returns whether a value is a number that float64 holds: no bool, no infinity, no whole number beyond it."""
    try:
        return not isinstance(value, bool) and isinstance(value, numbers.Real) and math.isfinite(value)
    except OverflowError:
        return False


def divisors(number: int) -> list[int]:
    """Returns every divisor of a positive number, in no order; the root of a square is listed twice."""
    small = [candidate for candidate in range(1, math.isqrt(number) + 1) if number % candidate == 0]
    return small + [number // candidate for candidate in small]


def nearest_divisor(number: int, size: int) -> int:
    """Returns the divisor of `number` that is nearest to `size`; of two the larger.

    >>> nearest_divisor(12, 5)
    6
    """
    return min(divisors(number), key=lambda candidate: (abs(candidate - size), -candidate))


def nearest_multiple(number: int, divisor: int) -> int:
    """Returns the multiple of `divisor` (at least `divisor`) that is nearest to `number`; of two the larger.

    >>> nearest_multiple(510, 4)
    512
    """
    return divisor * max(1, (2 * number + divisor) // (2 * divisor))
