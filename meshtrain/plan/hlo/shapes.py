"""Parses shapes of compiled programs, such as `f32[4,8]{1,0}` or `(bf16[2], (s32[], f32[3,3]{1,0}))`. Uses no JAX."""

import math
import re

ARRAY = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
BITS_IN_NAME = re.compile(r"^[a-z]+(\d+)")


def dims(shape: str) -> tuple[int, ...]:
    """Returns the sizes of an array's dims; for a tuple, the sizes of its first array."""
    match = ARRAY.search(shape)
    assert match, shape
    return _dims(match[2])


def _dims(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.split(",") if size)


def bits(dtype: str) -> int:
    """Returns the bits of one element: 16 for `bf16`, 8 for `f8e4m3fn` and `pred`, 4 for `s4`, 0 for `token`."""
    if dtype == "pred":
        return 8
    match = BITS_IN_NAME.search(dtype)
    return int(match[1]) if match else 0


def num_bytes(shape: str) -> float:
    """Returns the bytes of an array, or of all arrays of a tuple, without the padding of tiled layouts."""
    return sum(bits(dtype) * math.prod(_dims(sizes)) / 8 for dtype, sizes in ARRAY.findall(shape))


def dtypes(shape: str) -> tuple[str, ...]:
    """Returns the dtype of each array in a shape, such as `bf16`."""
    return tuple(dtype for dtype, _ in ARRAY.findall(shape))


def parts(shape: str) -> list[str]:
    """Returns the shape of each element of a tuple, as text; for an array, a list with only its shape."""
    if not shape.startswith("("):
        return [shape]
    found, depth, start = list[str](), 0, 1
    for at, letter in enumerate(shape):
        if letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth -= 1
        if (letter == "," and depth == 1) or (letter == ")" and depth == 0):
            found.append(re.sub(r"/\*.*?\*/", "", shape[start:at]).strip())
            start = at + 1
    return [part for part in found if part]
