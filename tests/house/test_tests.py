"""Tests stand where a reader looks: a file for each module, or a line in docs/testing.md that says which file."""

import pathlib
import re

ROOT = pathlib.Path(__file__).parents[2]
LINE = re.compile(r"^\| `([\w/]+\.py)` \| (.*) \|$", re.MULTILINE)
LINK = re.compile(r"\[([\w./]+)\]\(\.\./tests/([\w./]+)\)")


def modules() -> list[str]:
    """The modules of the package but for those that only gather names, as docs/testing.md writes them."""
    folder = ROOT / "meshtrain"
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*.py") if path.name != "__init__.py"]


def own_file(module: str) -> pathlib.Path:
    """tests/ROOM/test_ROOM_MODULE.py; what stands at the package's root is tested in tests/run."""
    room, _, name = f"run/{module}".rpartition("/") if "/" not in module else module.rpartition("/")
    return ROOT / "tests" / room / f"test_{room}_{name}"


def lines() -> dict[str, list[str]]:
    """{module: the files that docs/testing.md names for it}."""
    text = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
    return {module: [path for _, path in LINK.findall(cell)] for module, cell in LINE.findall(text)}


def test_each_module_has_its_file_or_a_line():
    elsewhere = lines()
    missing = [module for module in modules() if not own_file(module).exists() and not elsewhere.get(module)]
    assert not missing, f"no tests/ROOM/test_ROOM_MODULE.py and no line in docs/testing.md: {sorted(missing)}"


def test_no_line_is_out_of_date():
    elsewhere, there = lines(), set(modules())
    assert elsewhere
    assert set(elsewhere) <= there, sorted(set(elsewhere) - there)
    needless = [module for module in elsewhere if own_file(module).exists()]
    assert not needless, f"have a file of their own: {needless}"
    gone = [path for paths in elsewhere.values() for path in paths if not (ROOT / "tests" / path).exists()]
    assert not gone, gone


def test_files_are_named_by_their_room():
    odd = [
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tests").rglob("test_*.py")
        if path.parent.name != "house" and not path.name.startswith(f"test_{path.parent.name}_")
    ]
    assert not odd, odd
