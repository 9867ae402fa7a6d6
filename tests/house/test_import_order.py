"""Who may import whom: the contracts in pyproject.toml hold, and an import that breaks one is noticed."""

import pathlib
import shutil
import subprocess
import sys
import tomllib

import pytest

ROOT = pathlib.Path(__file__).parents[2]
WITHOUT_JAX = {
    "meshtrain.launch.hardware",
    "meshtrain.launch.local",
    "meshtrain.pipeline.schedules",
    "meshtrain.plan.hlo",
    "meshtrain.words",
}
WITHOUT_MESH = {"meshtrain.loop", "meshtrain.models"}


def lint(root: pathlib.Path) -> subprocess.CompletedProcess[str]:
    program = pathlib.Path(sys.executable).with_name("lint-imports")
    return subprocess.run([program, "--no-cache", "--no-logo"], cwd=root, capture_output=True, text=True)


@pytest.fixture
def copy(tmp_path: pathlib.Path) -> pathlib.Path:
    shutil.copytree(ROOT / "meshtrain", tmp_path / "meshtrain", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_the_contracts_hold():
    done = lint(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("models/task.py", "import meshtrain.pipeline", "Each room imports only from what stands before it"),
        ("data/sources.py", "from meshtrain.models import task", "Each room imports only from what stands before it"),
        ("nook.py", "", "Each room imports only from what stands before it"),  # a room that nobody placed
        ("layout/axes.py", "from meshtrain.layout import mesh", "No cycles, inside the rooms either"),
        ("pipeline/schedules.py", "import jax", "Tables and text need no JAX"),
        ("models/layers.py", "from meshtrain.layout import mesh", "Models and the loop never see a mesh"),
    ],
)
def test_an_import_out_of_order_is_noticed(copy, module, line, contract):
    with open(copy / "meshtrain" / module, "a") as file:
        file.write(f"\n{line}\n")
    done = lint(copy)
    assert done.returncode == 1
    assert f"{contract} BROKEN" in done.stdout


def test_the_contracts_name_the_modules_they_are_meant_for():
    """import-linter refuses a contract on a module that is not there, so each joins when its file comes."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    sources = {contract["id"]: set(contract.get("source_modules", ())) for contract in contracts}

    def present(modules: set[str]) -> set[str]:
        paths = {module: ROOT.joinpath(*module.split(".")) for module in modules}
        return {module for module, path in paths.items() if path.is_dir() or path.with_suffix(".py").exists()}

    assert present(WITHOUT_JAX) <= sources["no-jax"]
    assert present(WITHOUT_MESH) <= sources["no-mesh"]
