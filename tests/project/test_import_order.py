"""Who may import whom: the contracts in pyproject.toml hold, and an import that breaks one is noticed."""

import pathlib
import shutil
import subprocess
import sys
import tomllib

import pytest

pytestmark = pytest.mark.quick

ROOT = pathlib.Path(__file__).parents[2]
WITHOUT_JAX = {
    "meshtrain.hardware",
    "meshtrain.launch.local_processes",
    "meshtrain.pipeline.schedules",
    "meshtrain.plan.hlo.parse",
    "meshtrain.cli",
    "meshtrain.errors",
    "meshtrain.files",
    "meshtrain.options",
    "meshtrain.user_functions",
}
WITHOUT_MESH = {"meshtrain.loop", "meshtrain.models"}
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]


def lint(root: pathlib.Path) -> subprocess.CompletedProcess[str]:
    program = pathlib.Path(sys.executable).with_name("lint-imports")
    return subprocess.run([program, "--no-cache", "--no-logo"], cwd=root, capture_output=True, text=True)


FAULTS = [
    ("models/task.py", "import meshtrain.pipeline", "- meshtrain.models.task -> meshtrain.pipeline (l."),
    ("data/sources.py", "from meshtrain.models import task", "- meshtrain.data.sources -> meshtrain.models.task (l."),
    ("explain.py", "from meshtrain.report import sections", "- meshtrain.explain -> meshtrain.report.sections (l."),
    ("models/layers.py", "from meshtrain.launch import peers", "meshtrain.models.layers -> meshtrain.launch.peers (l."),
    ("models/lora.py", "from meshtrain.optim import moments", "- meshtrain.models.lora -> meshtrain.optim.moments (l."),
    ("__main__.py", "import meshtrain.probe", "- meshtrain.__main__ -> meshtrain.probe (l."),
    ("nook.py", "", "- meshtrain.nook\n"),  # a package in no layer
    ("sharding/rules.py", "from meshtrain.sharding import mesh", "- .rules -> .mesh (1 import)"),
    ("step/state.py", "from flax import nnx", "meshtrain.step.state -> flax (l."),
    ("pipeline/schedules.py", "import jax", "meshtrain.pipeline.schedules -> jax (l."),
    (
        "plan/findings.py",
        "from meshtrain.models.decoder_options import DecoderOptions",
        "meshtrain.plan.findings -> meshtrain.models.decoder_options (l.",
    ),
    (
        "models/layers.py",
        "from meshtrain.sharding import mesh",
        "meshtrain.models.layers -> meshtrain.sharding.mesh (l.",
    ),
]


def test_the_contracts_hold():
    done = lint(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_imports_out_of_order_are_noticed(tmp_path):
    """All faults in one copy: each contract is broken, and each import is named."""
    shutil.copytree(ROOT / "meshtrain", tmp_path / "meshtrain", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for module, line, _ in FAULTS:
        with open(tmp_path / "meshtrain" / module, "a") as file:
            file.write(f"\n{line}\n")
    done = lint(tmp_path)
    assert done.returncode == 1
    unnoticed = [contract["name"] for contract in CONTRACTS if f"{contract['name']} BROKEN" not in done.stdout]
    assert not unnoticed, done.stdout
    assert [said for _, _, said in FAULTS if said not in done.stdout] == [], done.stdout


def test_the_contracts_name_the_modules_they_are_meant_for():
    """import-linter refuses a contract on a module that is not there, so each joins when its file comes."""
    sources = {contract["id"]: set(contract.get("source_modules", ())) for contract in CONTRACTS}

    def present(modules: set[str]) -> set[str]:
        paths = {module: ROOT.joinpath(*module.split(".")) for module in modules}
        return {module for module, path in paths.items() if path.is_dir() or path.with_suffix(".py").exists()}

    files = {path for path in (ROOT / "meshtrain").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    modules = {f"meshtrain.{path.stem}" for path in files} - {"meshtrain.__init__"}
    differ = sources["flax-in-models"] ^ (modules - {"meshtrain.models", "meshtrain.examples"})
    assert not differ, f"pyproject.toml: source_modules of the contract flax-in-models lack or need not list {differ}"
    assert present(WITHOUT_JAX) <= sources["no-jax"]
    assert present(WITHOUT_MESH) <= sources["no-mesh"]
