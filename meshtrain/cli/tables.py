"""Formats byte counts and aligned tables as text."""

from collections.abc import Sequence


def format_bytes(n: int) -> str:
    """Returns a number of bytes as short text: three significant digits, or a whole number if it is exact.

    >>> [format_bytes(n) for n in (512, 1536, 25_165_824, 33_715_493_273)]
    ['512 B', '1.50 KiB', '24 MiB', '31.4 GiB']
    """
    units = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
    power = 0
    # Switches half a unit earlier: 1023.9 KiB would be printed as 1024 KiB.
    while power + 1 < len(units) and abs(n) >= 1024 ** (power + 1) - 1024**power // 2:
        power += 1
    unit = 1024**power
    if n % unit == 0:
        return f"{n // unit} {units[power]}"
    value = n / unit
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:.{digits}f} {units[power]}"


def align(rows: Sequence[Sequence[str]], header: Sequence[str], align: str = "") -> str:
    """Returns a text table: header, rule, and one line per row; columns are separated by two blanks.

    Args:
      rows: the cells of each row; each row has the length of the header.
      header: the column titles.
      align: `<` or `>` for each column; missing columns are left-aligned.
    """
    assert all(len(row) == len(header) for row in rows), "a row and the header differ in length"
    sides = align.ljust(len(header), "<")
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    rule = tuple("-" * width for width in widths)
    return "\n".join(
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)).rstrip()
        for row in (header, rule, *rows)
    )
