"""What the pages say about models of one's own is what the code does; and every link leads somewhere."""

import pathlib
import re

import pytest

from meshtrain.layout.rules import LayoutOptions, default_rules
from scripts import memory_by_level, mesh_by_mesh

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGE = (ROOT / "docs" / "own_model.md").read_text(encoding="utf-8")


def axes_of(cell: str) -> tuple[str, ...]:
    return tuple(axis.strip() for axis in cell.split(",") if axis.strip())


def test_table_of_logical_axes_is_that_of_the_rules():
    table = PAGE.partition("| logical axis |")[2].splitlines()
    lines = [line.strip("|").split("|") for line in table if line.startswith("| `")]
    written = {name: (axes_of(c[1]), axes_of(c[2])) for c in lines for name in re.findall(r"`(\w+)`", c[0])}
    rules = {rule.name: (rule.parameters, rule.activations) for rule in default_rules(LayoutOptions()).entries}
    assert written == {name: axes for name, axes in rules.items() if name != "residual_sequence"}


def test_block_with_rules_of_ones_own_runs():
    block = re.search(r"```python\n(from meshtrain\.layout.*?)```", PAGE, re.DOTALL).group(1)
    given = {}
    names = {"train": lambda *_, rules: given.update(rules=rules), "config": None, "directory": None, "make_task": None}
    exec(compile(block, "docs/own_model.md", "exec"), names)
    assert given["rules"].own == ("expert", "rows")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#\s]+)\)", page.read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing, f"{page.name}: {missing}"


@pytest.mark.parametrize("name", memory_by_level.MODELS)
def test_memory_table_is_what_the_script_prints(name):
    assert memory_by_level.row(name, memory_by_level.MODELS[name]) in (ROOT / "README.md").read_text(encoding="utf-8")


def test_mesh_table_has_the_settings_of_the_script_and_keeps_its_promise():
    page = (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8")
    assert "\n".join(mesh_by_mesh.legend()) in page
    rows = [line.split("|")[2:-1] for line in page.splitlines() if line.startswith("| **")]
    assert [len(row) for row in rows] == [len(mesh_by_mesh.SETTINGS)] * len(mesh_by_mesh.SETTINGS)
    differences = [[float(cell.strip().removeprefix("= ")) for cell in row] for row in rows]
    assert max(map(max, differences)) <= mesh_by_mesh.TOLERANCE
