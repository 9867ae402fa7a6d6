"""Imports at the start: collected neither during nor after, and the collector is left as it was."""

import gc
import subprocess
import sys

import pytest

from meshtrain.launch.importing import imported


@pytest.fixture
def unfrozen():
    yield
    gc.unfreeze()
    gc.enable()


@pytest.mark.parametrize("is_enabled", [True, False])
def test_the_collector_is_left_as_it_was(unfrozen, is_enabled):
    (gc.enable if is_enabled else gc.disable)()
    sys.modules.pop("email.message", None)
    assert [module.__name__ for module in imported("json", "email.message")] == ["json", "email.message"]
    assert gc.isenabled() is is_enabled
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        imported("json", "no_such_module")
    assert gc.isenabled() is is_enabled


def test_nothing_is_frozen_where_all_were_imported_before(unfrozen):
    before = gc.get_freeze_count()
    assert imported("gc", "sys") == [gc, sys]
    assert gc.get_freeze_count() == before


def test_a_training_run_collects_nothing_while_it_imports_and_starts_without_nnx():
    code = """
import gc, sys
collections = []
gc.callbacks.append(lambda phase, info: collections.append(info["generation"]))
from meshtrain import main
from meshtrain.launch.importing import imported
collections.clear()
imported("meshtrain.config.config", "meshtrain.training")
assert not collections, collections
assert gc.get_freeze_count() > 100_000, gc.get_freeze_count()
assert "jax" in sys.modules and "flax.linen" in sys.modules and "flax.nnx" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
