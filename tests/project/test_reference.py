"""The pages that are made from the program have each command, field, exit code and name of the API."""

import re

import pytest

from meshtrain import errors
from meshtrain.__main__ import COMMANDS
from meshtrain.cli import flags
from meshtrain.config import data_sources, tasks
from meshtrain.config.schema import Config
from meshtrain.options import add_user_options
from meshtrain.sharding.reduction import NAMES, ReductionOptions
from scripts.benchmarks import reference

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Returns the name of each page -> its text."""
    folder = tmp_path_factory.mktemp("reference")
    assert not reference.main([str(folder)])
    return {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()}


def test_each_command_is_there_with_its_help(pages):
    assert re.findall(r"^## (.+)$", pages["commands.md"], re.MULTILINE) == list(COMMANDS)
    assert pages["commands.md"].count("usage: ") == len(COMMANDS)
    assert "--restarts" in pages["commands.md"]


def test_each_field_is_there_for_each_task_source_and_reduction(pages):
    rows = re.findall(r"^\| `([\w.]+)` \|", pages["fields.md"], re.MULTILINE)
    assert rows[: len(flags.schema(Config()))] == list(flags.schema(Config()))
    kinds = [("model", tasks.find(name).options) for name in tasks.names()]
    kinds += [("data", data_sources.find(name).options) for name in data_sources.names()]
    kinds += [("reduction", type(add_user_options(ReductionOptions(), "reduction", name))) for name in NAMES]
    for group, kind in kinds:
        assert {f"{group}.{name}" for name in flags.schema(kind())} <= set(rows), kind


def test_each_exit_code_is_there(pages):
    codes = {value for name, value in vars(errors).items() if re.fullmatch("EXIT_[A-Z_]+", name) and type(value) is int}
    assert {int(code) for code in re.findall(r"^\| (\d+) \| \S", pages["exit_codes.md"], re.MULTILINE)} == codes


def test_each_name_of_the_api_is_there_with_its_docstring(pages):
    wanted = [thing.__qualname__ for things in reference.API.values() for thing in things]
    assert re.findall(r"^### (.+)$", pages["api.md"], re.MULTILINE) == wanted
    assert "\nNone\n" not in pages["api.md"]
