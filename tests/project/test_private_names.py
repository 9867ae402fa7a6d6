"""Private names of JAX, XLA, Flax and Orbax: the table in docs/design lists each with a reason and a test."""

import ast
import collections
import pathlib
import re

import pytest

pytestmark = pytest.mark.quick

ROOT = pathlib.Path(__file__).parents[2]
PAGE = "docs/design/private_names.md"
# Modules without a promise of stability, and names that start with `_`.
PRIVATE = re.compile(r"^(jax\.(_src|extend|interpreters|experimental)|jaxlib|orbax)\b|(^|\.)_(?!_)")
FLAG = re.compile(r"(?<![\w./])_?xla_(?!client\b|cuda|rocm|bridge\b)\w+")
ORBAX = "ocp"  # the name under which Orbax is imported


def used_names(source: str) -> set[str]:
    """Returns the private names that a module imports, and the attributes of Orbax and flags of XLA that it names."""
    names, flags = set(), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names if node.module != "__future__"}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute) and (text := ast.unparse(node)).startswith(f"{ORBAX}."):
            names.add(text)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            flags |= set(FLAG.findall(node.value))
    orbax = {name for name in names if name.startswith(f"{ORBAX}.")}
    # `ocp.args` is part of `ocp.args.Composite`.
    orbax -= {name for name in orbax if any(other.startswith(f"{name}.") for other in orbax)}
    return {name for name in names if PRIVATE.search(name) and not name.startswith("meshtrain")} | flags | orbax


def rows(page: str) -> list[list[tuple[tuple[str, ...], str]]]:
    """Returns the tables of the page: (names, test) of each row."""
    tables = []
    for table in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE):
        cells = [line.strip().strip("|").split(" | ") for line in table.splitlines()[2:]]
        tables.append([(tuple(re.findall(r"`([^`]+)`", row[0])), row[-1].strip(" `")) for row in cells])
    return tables


def differences(used: dict[str, set[str]], page: str) -> list[str]:
    """Returns a line for each difference between the code and the first table, and for each test that does not exist.

    `used`: private name -> the files that use it.
    """
    tables = rows(page)
    listed = {name for names, _ in tables[0] for name in names}
    lines = [
        f"{PAGE} lacks `{name}`, used in {', '.join(sorted(used[name]))}: add the row "
        f"| `{name}` | what it is used for | `tests/FOLDER/FILE.py::TEST`, which fails if the name disappears |"
        for name in sorted(used.keys() - listed)
    ]
    lines += [
        f"{PAGE} lists `{name}`, which meshtrain/ does not use: remove it" for name in sorted(listed - used.keys())
    ]
    for names, test in [row for table in tables for row in table]:
        path, _, function = test.partition("::")
        text = (ROOT / path).read_text(encoding="utf-8") if function and (ROOT / path).is_file() else ""
        if not re.search(rf"^def {re.escape(function)}\(", text, re.MULTILINE):
            lines.append(f"{PAGE} names the test {test} for `{names[0]}`, which does not exist")
    return lines


def test_each_private_name_has_a_reason_and_a_test():
    used = collections.defaultdict(set)
    for path in (ROOT / "meshtrain").rglob("*.py"):
        for name in used_names(path.read_text(encoding="utf-8")):
            used[name].add(path.relative_to(ROOT).as_posix())
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    lines = differences(dict(used), page)
    assert not lines, "\n".join(lines)
    code = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "meshtrain").rglob("*.py"))
    read = [name for names, _ in rows(page)[1] for name in names]
    assert [name for name in read if name.rpartition(".")[2] not in code] == []


def test_a_name_without_a_row_and_a_row_without_a_use_or_a_test_are_noticed():
    source = """
import orbax.checkpoint as ocp
from jax._src import core
from jax.numpy import array
from meshtrain.errors import _private
options = [ocp.args.JsonSave(f"xla_gpu_enable_{array}"), "jax_plugins.xla_cuda12"]
"""
    assert used_names(source) == {"orbax.checkpoint", "jax._src.core", "ocp.args.JsonSave", "xla_gpu_enable_"}
    exists = f"tests/project/test_private_names.py::{test_each_private_name_has_a_reason_and_a_test.__name__}"
    page = f"| name | reason | test |\n| --- | --- | --- |\n| `a`, `b` | r | `{exists}` |\n| `c` | r | `{exists}s` |\n"
    first, second, third = differences({"a": {"x.py"}, "jax._src.core": {"y.py"}, "c": {"x.py"}}, page)
    assert first.startswith(f"{PAGE} lacks `jax._src.core`, used in y.py: add the row | `jax._src.core` | ")
    assert second == f"{PAGE} lists `b`, which meshtrain/ does not use: remove it"
    assert third == f"{PAGE} names the test {exists}s for `c`, which does not exist"
