"""Importing any module queries no device, sets nothing, prints nothing; some modules are read without JAX at all."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.quick

ROOT = pathlib.Path(__file__).parents[2]

# Other packages do as they like when they are imported: they come first, and only what ours add counts.
OTHERS = """
import flax.linen, grain, matplotlib, ml_collections, optax, orbax.checkpoint, tensorboardX, tokenizers, tqdm
"""
PROBE = """
import importlib, json, os, pkgutil, sys, threading
import jax
import jax._src.xla_bridge as bridge

def state():
    return {"environment": dict(os.environ), "config": dict(jax.config.values), "threads": threading.active_count(),
            "files": sorted(os.listdir()), "devices": bridge.backends_are_initialized()}

found, count = [], 0
for package in sys.argv[1:]:
    paths = importlib.import_module(package).__path__
    for name in [package, *(m.name for m in pkgutil.walk_packages(paths, package + "."))]:
        count, before = count + 1, state()
        try:
            importlib.import_module(name)
        except BaseException as error:
            found.append(f"{name}: {type(error).__name__}: {error}")
        for what, value in state().items():
            if value != before[what]:
                found.append(f"{name} changes at import: {what}")
print(json.dumps({"count": count, "found": found}))
"""
# What a module must not do, and what is said of it; in alphabetical order, in which they are imported.
BAD = {
    "environment": ("import os; os.environ['X'] = 'y'", "changes at import: environment"),
    "config": ("import jax; jax.config.update('jax_enable_x64', True)", "changes at import: config"),
    "files": ("open('left', 'w').close()", "changes at import: files"),
    "leaves": ("raise SystemExit(0)", "SystemExit: 0"),
    "thread": (
        "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
        "changes at import: threads",
    ),
    "query": ("import jax; jax.devices()", "changes at import: devices"),
}
WITHOUT_JAX = (
    "hardware.accelerators",
    "launch.local_processes",
    "pipeline.chart",
    "pipeline.schedules",
    "plan.hlo.parse",
    "cli.flags",
)


def run(code: str, folder: pathlib.Path, *words: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join((str(folder), str(ROOT)))
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-W", "error", "-c", code, *words]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)


def test_nothing_happens_at_import_and_what_does_is_noticed(tmp_path):
    """One process for our package and then for one that does everything wrong."""
    (tmp_path / "sample").mkdir()
    (tmp_path / "sample" / "__init__.py").touch()
    for name, (line, _) in BAD.items():
        (tmp_path / "sample" / f"{name}.py").write_text(line + "\n")
    done = run(OTHERS + PROBE, tmp_path, "meshtrain", "sample")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)  # nothing else is printed at import
    assert answer["count"] > 100
    ours = [line for line in answer["found"] if line.startswith("meshtrain")]
    assert not ours, ours
    for name, (_, said) in BAD.items():
        assert any(line.startswith(f"sample.{name}") and line.endswith(said) for line in answer["found"]), name


def test_modules_that_need_no_jax_import_none():
    modules = ", ".join(f"meshtrain.{module}" for module in WITHOUT_JAX)
    done = run(f"import sys; sys.modules['jax'] = None; import {modules}", ROOT)
    assert done.returncode == 0, done.stderr
