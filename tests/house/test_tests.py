"""Tests stand where a reader looks: those of a room in the folder of its name."""

import pathlib

ROOT = pathlib.Path(__file__).parents[2]


def test_files_are_named_by_their_room():
    odd = [
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tests").rglob("test_*.py")
        if path.parent.name != "house" and not path.name.startswith(f"test_{path.parent.name}_")
    ]
    assert not odd, odd
