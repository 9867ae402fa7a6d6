"""Importing any module queries no device, sets nothing, prints nothing; some modules are read without JAX at all."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]

# Other packages do as they like when they are imported: they come first, and only what ours add counts.
OTHERS = """
import flax.linen, grain, matplotlib, ml_collections, optax, orbax.checkpoint, tensorboardX, tokenizers, tqdm
"""
PROBE = """
import importlib, os, pkgutil, sys, threading
import jax
import jax._src.xla_bridge as bridge

def state():
    return {"environment": dict(os.environ), "config": dict(jax.config.values), "threads": threading.active_count(),
            "files": sorted(os.listdir())}

assert not bridge.backends_are_initialized()
before = state()
import PACKAGE
names = [PACKAGE.__name__, *(m.name for m in pkgutil.walk_packages(PACKAGE.__path__, PACKAGE.__name__ + "."))]
for name in names:
    try:
        importlib.import_module(name)
    except BaseException as error:
        sys.exit(f"{name}: {type(error).__name__}: {error}")
    for what, value in state().items():
        if value != before[what]:
            sys.exit(f"{name} changes at import: {what}")
    if bridge.backends_are_initialized():
        sys.exit(f"{name} queries a device at import")
print(len(names))
"""


def probe(package: str, folder: pathlib.Path, first: str = "") -> subprocess.CompletedProcess[str]:
    """Imports all of a package that lies in `folder`, in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-W", "error", "-c", first + PROBE.replace("PACKAGE", package)]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)


def test_nothing_happens_at_import():
    done = probe("meshtrain", ROOT, OTHERS)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 10, "it prints something at import, or there is no package"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("import jax; jax.devices()", "queries a device"),
        ("import os; os.environ['X'] = 'y'", "environment"),
        ("import jax; jax.config.update('jax_enable_x64', True)", "config"),
        ("open('left', 'w').close()", "files"),
        ("raise SystemExit(0)", "SystemExit"),
    ],
)
def test_what_happens_at_import_is_noticed(line, said, tmp_path):
    (tmp_path / "sample").mkdir()
    (tmp_path / "sample" / "__init__.py").touch()
    (tmp_path / "sample" / "part.py").write_text(line + "\n")
    done = probe("sample", tmp_path)
    assert done.returncode == 1
    assert said in done.stderr
    assert "sample.part" in done.stderr


@pytest.mark.parametrize("module", ["launch.hardware", "pipeline.chart", "pipeline.schedules", "words.flags"])
def test_modules_that_need_no_jax_import_none(module):
    code = f"import sys; sys.modules['jax'] = None; import meshtrain.{module}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
