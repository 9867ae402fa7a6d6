"""A small run of the custom model: its configuration and its data."""

import pathlib

import pytest

from meshtrain.config.build import default
from meshtrain.config.resolve import resolve
from meshtrain.config.tasks import abstract_task
from meshtrain.run.dataset import open_data

ROOT = pathlib.Path(__file__).parents[2]
SMALL = {"batch_size": "8", "sequence_length": "16", "data.source": "synthetic"}


@pytest.fixture(autouse=True)
def from_the_root(monkeypatch):
    """Starts each test in the repository's root, where the task's module is found."""
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="session")
def configured():
    """A function mistake -> the configuration of the custom model with this mistake."""
    return lambda mistake: resolve(default(task=f"tests.agree.mistakes:{mistake}"), SMALL)


@pytest.fixture(scope="session")
def dataset(configured):
    """The data, which all mistakes share."""
    config = configured("right")
    return open_data(config, abstract_task(config))


@pytest.fixture
def words():
    """A function mistake -> the words of a command line that select the custom model with this mistake."""
    return lambda mistake: [
        f"--config.task=tests.agree.mistakes:{mistake}",
        *(f"--config.{key}={value}" for key, value in SMALL.items()),
    ]
