"""Imports at the start: collected neither during nor after, and the collector is left as it was."""

import gc
import os
import subprocess
import sys

import pytest

from meshtrain import user_functions
from meshtrain.errors import UserError

pytestmark = pytest.mark.quick


@pytest.fixture
def unfrozen():
    yield
    gc.unfreeze()
    gc.enable()


@pytest.mark.parametrize("is_enabled", [True, False])
def test_the_collector_is_left_as_it_was(unfrozen, is_enabled):
    (gc.enable if is_enabled else gc.disable)()
    sys.modules.pop("email.message", None)
    assert [module.__name__ for module in user_functions.import_modules("json", "email.message")] == [
        "json",
        "email.message",
    ]
    assert gc.isenabled() is is_enabled
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        user_functions.import_modules("json", "no_such_module")
    assert gc.isenabled() is is_enabled


def test_nothing_is_frozen_where_all_were_imported_before(unfrozen):
    before = gc.get_freeze_count()
    assert user_functions.import_modules("gc", "sys") == [gc, sys]
    assert gc.get_freeze_count() == before


def test_a_training_run_collects_nothing_while_it_imports_and_starts_without_nnx():
    code = """
import gc, sys
collections = []
gc.callbacks.append(lambda phase, info: collections.append(info["generation"]))
from meshtrain import main
from meshtrain import user_functions
from meshtrain.errors import UserError
collections.clear()
user_functions.import_modules("meshtrain.config.resolve", "meshtrain.training")
assert not collections, collections
assert gc.get_freeze_count() > 100_000, gc.get_freeze_count()
assert "jax" in sys.modules and "flax.linen" in sys.modules and "flax.nnx" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_variable_that_jax_refuses_is_a_line(monkeypatch, tmp_path):
    (tmp_path / "reads_a_variable.py").write_text('raise ValueError("Invalid value for JAX flag jax_made_up_number")')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("JAX_MADE_UP", "right")
    monkeypatch.setenv("JAX_MADE_UP_NUMBER", "junk")
    with pytest.raises(
        UserError, match=r"^JAX_MADE_UP_NUMBER: got junk; allowed: .*; nearest: leave JAX_MADE_UP_NUMBER out$"
    ):
        user_functions.import_modules("reads_a_variable")


@pytest.mark.parametrize(
    ("text", "uses", "said"),
    [
        ("", "made_up.numpy", "ModuleNotFoundError: No module named 'made_up.numpy'; 'made_up' is not a package"),
        ("", "made_up\nmade_up.Array", "AttributeError: module 'made_up' has no attribute 'Array'"),
        ("def (", "made_up", "SyntaxError: invalid syntax"),
        ("raise RuntimeError('broken')", "made_up", "RuntimeError: broken"),
        ("import no_such_module", "made_up", "ModuleNotFoundError: No module named 'no_such_module'"),
    ],
)
def test_a_package_that_is_broken_or_another_one_is_a_line_with_its_file(text, uses, said, monkeypatch, tmp_path):
    (tmp_path / "made_up.py").write_text(text)
    (tmp_path / "ours.py").write_text(f"import {uses}")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("made_up", "ours"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(UserError) as refusal:
        user_functions.import_modules("ours")
    [line] = refusal.value.problems
    assert line.startswith(f"packages: got {said}")
    assert f", from {tmp_path / 'made_up.py'}; allowed: " in line


@pytest.mark.parametrize("text", ["import no_such_module", "import json\njson.loads('{')", "1 / 0"])
def test_a_bug_of_ours_keeps_its_traceback(text, monkeypatch, tmp_path):
    (tmp_path / "ours.py").write_text(text)
    monkeypatch.setattr(user_functions, "_PACKAGE", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "ours", raising=False)
    with pytest.raises((ModuleNotFoundError, ValueError, ZeroDivisionError)) as bug:
        user_functions.import_modules("ours")
    assert not isinstance(bug.value, UserError)


@pytest.mark.parametrize("command", ["train", "explain"])
def test_a_shadowed_jax_is_one_line_and_no_traceback(tmp_path, command):
    (tmp_path / "jax.py").touch()
    words = [sys.executable, "-m", "meshtrain", command, "--config=configs/tiny.py", f"--workdir={tmp_path / 'run'}"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    [line] = done.stderr.splitlines()
    assert line.startswith("meshtrain: error: packages: got ")
    assert f", from {tmp_path / 'jax.py'}; " in line
