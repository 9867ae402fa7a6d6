"""How the package is cut: folders one can survey, no file that only one other file reads."""

import ast
import collections
import pathlib

import pytest

from meshtrain.user_functions import FLAGS

pytestmark = pytest.mark.quick

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = sorted((ROOT / "meshtrain").rglob("*.py"))
MOST_MODULES = 16  # of a folder
SMALL = 60  # lines
NAMES_OF_EVERY_PACKAGE = {"__init__", "__main__", "options", "task"}
# Commands, and modules that a flag of the core loads: no module needs to import them.
DOORS = {"meshtrain.main", "meshtrain.verify", *FLAGS.values()}


def dotted(path: pathlib.Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def imported(path: pathlib.Path) -> set[str]:
    """Modules that a file may import: by a statement, or by a name in a string such as 'package.module:function'."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value.partition(":")[0])
    return names


def test_a_folder_has_at_most_sixteen_modules():
    held = collections.Counter(path.parent for path in PACKAGE if path.stem != "__init__")
    crowded = {folder.relative_to(ROOT).as_posix(): number for folder, number in held.items() if number > MOST_MODULES}
    assert not crowded, crowded


def test_a_small_file_serves_more_than_one():
    readers = collections.Counter(name for path in PACKAGE for name in imported(path) - {dotted(path)})
    lonely = [
        dotted(path)
        for path in PACKAGE
        if path.stem not in NAMES_OF_EVERY_PACKAGE
        and dotted(path) not in DOORS
        and len(path.read_text(encoding="utf-8").splitlines()) < SMALL
        and readers[dotted(path)] < 2
    ]
    assert not lonely, lonely
