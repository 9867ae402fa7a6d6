"""Optional algorithms stay outside the core: its names, the sizes of its records, and the story of a run."""

import ast
import dataclasses
import inspect
import pathlib
import re

import pytest

from meshtrain import training
from meshtrain.assembly.assemble import Assembly
from meshtrain.step.extension import Extension
from meshtrain.user_functions import EXTENSION_POINTS

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = ROOT / "meshtrain"
OPTIONAL = ("agree", "examples", "lab", "probe", "report")
TRAINS = ("assembly", "step", "sharding", "run", "loop.py", "training.py")
OF_ALGORITHMS = re.compile(r"RESIDUAL|GROUPS|REPLICAS|late_\w+|outer_\w+|Apart")
MENTION = re.compile(r"extension|[Pp]eriodic|\bcosts\.|EXTRA|state\.extra|reductions\b")
COMMENTS = ("process", "mesh", "position in the data", "its part", "donates")


def files(*places):
    """The Python files of packages and modules of the core."""
    paths = [PACKAGE / place for place in places]
    return [file for path in paths for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]


def core():
    """All Python files without those of optional packages."""
    return [file for file in files(".") if file.relative_to(PACKAGE).parts[0] not in OPTIONAL]


def names(tree):
    """Each name, attribute, argument and definition of a syntax tree, with its line."""
    for node in ast.walk(tree):
        for field in ("id", "attr", "name", "arg", "asname"):
            if isinstance(name := getattr(node, field, None), str):
                yield name, getattr(node, "lineno", 0)


def names_of_algorithms(text):
    return [name for name, _ in names(ast.parse(text)) if OF_ALGORITHMS.fullmatch(name)]


def wide_functions(text):
    """The functions that take more than six positional parameters."""
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    return [one.name for one in functions if len(one.args.posonlyargs + one.args.args) > 6]


def names_of_lab(text):
    """Names of classes in lab, and texts that are a name or a place of a function there."""
    classes = {
        one.name for file in files("lab") for one in ast.parse(file.read_text()).body if isinstance(one, ast.ClassDef)
    }
    built_in = {
        name for point in EXTENSION_POINTS.values() for name, place in point.optional_names.items() if ".lab." in place
    }
    tree = ast.parse(text)
    found = [name for name, _ in names(tree) if name in classes | {"lab"}]
    texts = [one.value for one in ast.walk(tree) if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    return found + [one for one in texts if one in built_in or one.startswith("meshtrain.lab")]


@pytest.mark.parametrize("find", [names_of_algorithms, wide_functions], ids=lambda find: find.__name__)
def test_what_trains_names_no_algorithm_and_no_function_is_wide(find):
    places = TRAINS if find is names_of_algorithms else ("assembly", "run", "training.py")
    assert {file.name: found for file in files(*places) if (found := find(file.read_text()))} == {}


def test_the_core_names_lab_in_the_table_of_extension_points_only():
    """A configuration has the group `local_steps`; former keys name what they have become."""
    allowed = {"user_functions.py", "config/schema.py", "config/resume.py"}
    found = {str(file.relative_to(PACKAGE)): names_of_lab(file.read_text()) for file in core()}
    assert {file: what for file, what in found.items() if what and file not in allowed} == {}
    assert found["user_functions.py"]


@pytest.mark.parametrize(
    ("find", "text"),
    [
        (names_of_algorithms, "def f(state):\n    return state.late_metrics"),
        (names_of_algorithms, "from meshtrain.step.step import Apart"),
        (wide_functions, "def f(a, b, c, d, e, f, g): pass"),
        (names_of_lab, "REDUCTION = 'topk'"),
        (names_of_lab, "def f(options: CompressionOptions): pass"),
    ],
)
def test_a_fault_is_noticed(find, text):
    assert find(text)


def test_records_are_small():
    assert len(dataclasses.fields(Assembly)) <= 5
    assert len(dataclasses.fields(Extension)) <= 11


def test_few_lines_of_the_planner_mention_an_extension():
    lines = [line for file in files("plan") for line in file.read_text().splitlines() if MENTION.search(line)]
    assert 0 < len(lines) <= 30, "\n".join(lines)


def test_the_story_of_a_run_is_short_and_explains_jax():
    source = inspect.getsource(training.train_resolved)
    [function] = ast.parse(source).body
    lines = source.splitlines()
    body = [line.strip() for line in lines[function.body[1].lineno - 1 :] if line.strip()]
    comments = [line for line in body if line.startswith("#")]
    assert len(body) - len(comments) <= 20
    assert all(any(word in comment for comment in comments) for word in COMMENTS)
