"""Where what is a user's own is found: the examples of the docs, and modules of the tests."""

import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts each test in the repository's root."""
    monkeypatch.chdir(ROOT)
