"""The planted faults of scripts/mutants can still be planted, and the tests that have to notice them are there."""

import ast
import collections
import functools
import pathlib
import subprocess
import sys

import pytest

from scripts.mutants_run import MUTANTS, ROOMS, planted, table

ROOT = pathlib.Path(__file__).parents[2]
LEAST, LEAST_A_ROOM, MOST_TESTS = 40, 3, 2


@functools.cache
def functions(file):
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    return {"", *(node.name for node in tree.body if isinstance(node, ast.FunctionDef))}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_fault_can_be_planted_and_its_tests_are_there(mutant):
    text = (ROOT / "meshtrain" / mutant.path).read_text(encoding="utf-8")
    wrong = planted(mutant, text)
    assert wrong != text
    ast.parse(wrong)
    assert 1 <= len(mutant.tests) <= MOST_TESTS
    for test in mutant.tests:
        file, _, name = test.partition("::")
        assert name.partition("[")[0] in functions(file), test


def test_cases_that_faults_name_by_their_parameters_are_collected():
    cases = sorted({f"tests/{test}" for mutant in MUTANTS for test in mutant.tests if "[" in test})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:xdist", *cases]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_there_are_many_in_each_room_and_each_is_its_own():
    assert len(MUTANTS) >= LEAST
    counts = collections.Counter(mutant.room for mutant in MUTANTS)
    assert set(counts) == set(ROOMS)
    assert min(counts.values()) >= LEAST_A_ROOM, counts
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert len({(mutant.path, mutant.before, mutant.after) for mutant in MUTANTS}) == len(MUTANTS)


def test_the_page_of_the_tests_lists_them():
    assert table() in (ROOT / "docs" / "testing.md").read_text(encoding="utf-8"), "scripts/mutants --table prints it"


def test_a_text_that_is_not_there_or_not_alone_is_refused():
    mutant = MUTANTS[0]
    for text in ("", mutant.before * 2):
        with pytest.raises(ValueError, match="wanted: one"):
            planted(mutant, text)
