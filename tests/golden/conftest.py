"""The option that writes the golden texts anew; there where this folder stands on pytest's command line."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write tests/golden/ anew instead of comparing")
