"""Aligned columns and byte counts for people."""

import pytest

from meshtrain.cli.tables import align, format_bytes

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    "n, expected",
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.50 KiB"),
        (1024**2 - 1, "1.00 MiB"),
        (24 * 1024**2, "24 MiB"),
        (int(31.44 * 1024**3), "31.4 GiB"),
        (int(314.4 * 1024**3), "314 GiB"),
        (2 * 1024**4, "2 TiB"),
        (5000 * 1024**5, "5000 PiB"),
    ],
)
def test_bytes_are_short_and_exact_where_they_can_be(n, expected):
    assert format_bytes(n) == expected


def test_columns_are_aligned_without_trailing_blanks():
    text = align([("a", "1", "x"), ("bbb", "22", "")], ("name", "n", "note"), align="<>")
    assert text.split("\n") == ["name   n  note", "----  --  ----", "a      1  x", "bbb   22"]
