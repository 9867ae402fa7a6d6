"""The planted faults of tests/faults can still be planted, and the tests that have to notice them are there."""

import ast
import functools
import pathlib

import pytest

from tests.faults.__main__ import FAULTS, main
from tests.faults.fault import Fault

pytestmark = pytest.mark.quick

ROOT = pathlib.Path(__file__).parents[2]
ALL = [fault for faults in FAULTS.values() for fault in faults]
MOST = 50


@functools.cache
def functions(file):
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("fault", ALL, ids=lambda fault: fault.wrong)
def test_a_fault_can_be_planted_and_its_tests_are_there(fault):
    fault.planted((ROOT / "meshtrain" / fault.path).read_text(encoding="utf-8"))
    assert fault.tests
    for test in fault.tests:
        file, _, name = test.partition("::")
        assert not name or name.partition("[")[0] in functions(file), test


def test_they_are_few_and_each_is_in_the_table_of_its_package():
    assert len({(fault.path, fault.before, fault.after) for fault in ALL}) == len(ALL) <= MOST
    for table, faults in FAULTS.items():
        packages = {fault.path.partition("/")[0] for fault in faults}
        assert packages == {table} if table != "promises" else packages.isdisjoint(FAULTS)


@pytest.mark.parametrize(
    ("text", "after", "wanted"),
    [("a = b", "1", "0 places"), ("x = x", "1", "2 places"), ("x = 1", "(x)", "changes nothing")],
)
def test_a_text_that_is_not_there_or_not_alone_is_refused(text, after, wanted):
    with pytest.raises(ValueError, match=wanted):
        Fault("a.py", "x", after, "x is wrong").planted(text)


def test_a_table_that_is_not_there_is_one_line(capsys):
    assert main(["sharding", "layout"]) == 2
    assert capsys.readouterr().err.startswith("meshtrain: error: TABLE: got 'layout'; allowed: models, sharding, ")
