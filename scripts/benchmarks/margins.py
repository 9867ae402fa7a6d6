"""Measures error / bound of each parity test, as compiled for this CPU or for another CPU.

Tests run as in `scripts/test`. Arguments after `--` go to pytest (`-- -m slow`, `-- tests/parity -k gpt`).
"""

import argparse
import collections
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests import quick
from tests.parity import comparison

TESTS = (
    "tests/parity", "tests/examples/test_examples_preferences_parity.py",
    "tests/examples/test_examples_images_parity.py", "tests/examples/test_examples_seq2seq_parity.py",
    "tests/pipeline/test_pipeline_executor.py", "tests/checkpoint/test_checkpoint_checkpoint.py",
)  # fmt: skip
PLANTED = "test_parity_comparison.py"  # compares with errors that it introduces itself


class Margins:
    """A plugin of pytest that records error / bound of each comparison, by test and compared quantity."""

    def __init__(self, optimized: bool) -> None:
        self.optimized = optimized
        self.test = ""
        self.largest: dict[tuple[str, str], tuple[float, str]] = collections.defaultdict(lambda: (0.0, ""))

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self) -> None:
        """Enables LLVM's optimizations if requested."""
        if self.optimized:
            quick.compile_quickly(quickly=False)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> None:
        """Stores the name of the running test."""
        self.test = item.nodeid

    def record(self, what: str, where: str, margin: float) -> None:
        """Stores a quantity's largest margin in the running test, and its place."""
        if PLANTED not in self.test:
            self.largest[self.test, what] = max(self.largest[self.test, what], (margin, where))

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Records the comparisons of `tests/parity/comparison.py` and `np.testing.assert_allclose`."""
        within, assert_allclose = comparison.within, np.testing.assert_allclose

        def within_recorded(what: str, where: str, error: float, limit: float) -> bool:
            self.record(what, where, error / limit if limit else float(error > 0))
            return within(what, where, error, limit)

        def allclose_recorded(got: Any, expected: Any, rtol: float = 1e-7, atol: float = 0.0, **given: Any) -> None:
            limits = atol + rtol * np.abs(np.asarray(expected, np.float64))
            errors = np.abs(np.asarray(got, np.float64) - np.asarray(expected, np.float64))
            margins = errors / np.where(limits, limits, 1.0)
            self.record("assert_allclose", f"rtol {rtol:g}", float(margins.max(initial=0.0)))
            assert_allclose(got, expected, rtol=rtol, atol=atol, **given)

        with (
            _replaced(comparison, "within", within_recorded),
            _replaced(np.testing, "assert_allclose", allclose_recorded),
        ):
            yield


@contextlib.contextmanager
def _replaced(module: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, function)
    try:
        yield
    finally:
        setattr(module, name, before)


def main(arguments: list[str]) -> int:
    """Prints a row for each compared quantity of each test, the largest error / bound first; returns pytest's code."""
    parser = argparse.ArgumentParser(prog="scripts/bench margins", description=__doc__)
    parser.add_argument("--above", type=float, default=0.25, help="print rows with error / bound above this number")
    parser.add_argument("--isa", default="", help="newest instructions that XLA may use: SSE4_2, AVX, AVX2, AVX512")
    parser.add_argument("--optimized", action="store_true", help="with LLVM's optimizations, which tests disable")
    parser.add_argument("pytest", nargs="*", help="arguments of pytest")
    given = parser.parse_args(arguments)
    flags = [*quick.xla_flags(), *([f"--xla_cpu_max_isa={given.isa}"] if given.isa else [])]
    os.environ["XLA_FLAGS"] = " ".join(flags)
    plugin = Margins(given.optimized)
    has_paths = any(argument.startswith("tests") for argument in given.pytest)
    with plugin.recorded():
        code = pytest.main(["-q", *given.pytest, *([] if has_paths else TESTS)], plugins=[plugin])
    print("| error / bound | compared | where | test |\n| --- | --- | --- | --- |")
    for (test, what), (margin, where) in sorted(plugin.largest.items(), key=lambda item: -item[1][0]):
        if margin >= given.above:
            print(f"| {margin:.2f} | {what} | {where} | {test} |")
    return int(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
