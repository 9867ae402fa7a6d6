"""What scripts/train and scripts/test do on machines of many kinds; the interpreter only writes down its calls."""

import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[2]

# Answers for its version, makes "environments" that hold itself, and logs everything else.
PYTHON = """#!/bin/bash
case "$*" in
  *version_info*) printf %s "${FAKE_VERSION:-3.11}" ;;
  *"import ensurepip, venv"*) exit "${FAKE_NO_VENV:-0}" ;;
  *_base_executable*) printf %s "$FAKE_BASE" ;;
  "-I -m venv "*) mkdir -p "$4/bin" && cp "$0" "$4/bin/python" && echo "venv $4" >>"$FAKE_LOG" ;;
  *"-m pip install"*" $FAKE_CONSTRAINTS --editable "*) echo "pip ${!#}" >>"$FAKE_LOG"; exit "${FAKE_PIP:-0}" ;;
  *"-m pip install"*) echo "newest ${!#}" >>"$FAKE_LOG"; exit "${FAKE_PIP:-0}" ;;
  *) echo "run${JAX_REMAT3:+ with jax_remat3} $*" >>"$FAKE_LOG" ;;
esac
"""
PROGRAMS = "bash cat cut dirname env find flock grep mkdir cp rm sha256sum sort tail timeout"
PYTHON_3_12, PYTHON_3_13 = (PYTHON.replace("${FAKE_VERSION:-3.11}", version) for version in ("3.12", "3.13"))
NOTICE = "meshtrain: Python 3.11: jax 0.10.2, the last for it; 3.12 or newer gets fixes\n"


class Machine:
    """A copy of the scripts on a machine that has these programs and no other Python."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.root = folder / "a checkout"
        self.bin = folder / "bin"
        self.log = folder / "log"
        self.bin.mkdir()
        shutil.copytree(ROOT / "scripts", self.root / "scripts")
        for name in ("constraints.txt", "pyproject.toml"):
            shutil.copy(ROOT / name, self.root)
        for name in PROGRAMS.split():
            (self.bin / name).symlink_to(shutil.which(name))
        self.program("python3", PYTHON)

    def program(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def run(self, script: str, *words: str, **environment: str) -> tuple[int, str, list[str]]:
        """Returns the exit code, standard error, and the calls that the interpreters logged."""
        self.log.write_text("")
        done = subprocess.run(
            [self.root / "scripts" / script, *words],
            env={
                "PATH": str(self.bin),
                "FAKE_LOG": str(self.log),
                "FAKE_BASE": str(self.bin / "python3"),
                "FAKE_CONSTRAINTS": str(self.root / "constraints.txt"),
                **environment,
            },
            cwd=self.bin.parent,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stderr, self.log.read_text().splitlines()


@pytest.fixture
def machine(tmp_path: pathlib.Path) -> Machine:
    return Machine(tmp_path)


def test_the_first_start_installs_and_the_second_only_runs(machine):
    code, said, calls = machine.run("train", "--config=a b.py", "--x")
    assert code == 0
    assert calls == [
        f"venv {machine.root}/.venv",
        f"pip {machine.root}",
        "run -m meshtrain train --config=a b.py --x",
    ]
    first, notice = said.splitlines(keepends=True)
    assert "for Python 3.11 into .venv (" in first
    assert notice == NOTICE
    assert 'jax==0.10.2 ; python_version < "3.12"\n' in (ROOT / "constraints.txt").read_text()
    assert machine.run("train", "--y") == (0, "", ["run -m meshtrain train --y"])


def test_an_environment_keeps_its_python(machine):
    machine.run("train")
    machine.program("python3.12", PYTHON_3_12)
    assert machine.run("train") == (0, "", ["run -m meshtrain train"])
    code, said, calls = machine.run("report", "runs/a")  # one more package, into the same environment
    assert (code, calls[0], NOTICE in said) == (0, f"pip {machine.root}[report]", True)
    (machine.root / ".venv" / "bin" / "python").unlink()
    assert machine.run("train")[2][0] == f"venv {machine.root}/.venv"
    assert "python3.12 " in (machine.root / ".venv" / "meshtrain-installed").read_text()


@pytest.mark.parametrize(
    ("programs", "version"),
    [
        ({"python3.12": PYTHON_3_12, "python3.13": PYTHON_3_13}, "3.12"),
        ({"python3.12": "#!/bin/bash\nexit 127\n", "python3.13": PYTHON_3_13}, "3.13"),
        ({"python3.12": PYTHON_3_12.replace("${FAKE_NO_VENV:-0}", "1")}, "3.11"),
        ({"python3.14": PYTHON.replace("${FAKE_VERSION:-3.11}", "3.14")}, "3.11"),
    ],
)
def test_python_3_12_is_used_before_others(machine, programs, version):
    for name, text in programs.items():
        machine.program(name, text)
    _, said, calls = machine.run("train")
    assert calls[0] == f"venv {machine.root}/.venv"
    assert f"for Python {version} into .venv (" in said
    assert (NOTICE in said) == (version == "3.11")


def test_plans_for_gpus_need_python_3_12(machine):
    code, said, calls = machine.run("plan", "--cluster=h100:8x8")
    assert (code, calls) == (2, [])
    assert said == "meshtrain: error: a plan for GPUs needs Python 3.12 or newer; python3 is Python 3.11\n"
    assert machine.run("plan", "--cluster=v5e:4x4")[0] == 0  # into .venv-plan
    for name, text in {"python3.11": PYTHON, "python3.12": PYTHON_3_12}.items():
        machine.program(name, text)
    code, said, calls = machine.run("plan", "--cluster=h100:8x8", PYTHON="python3.11")
    assert (code, calls, said.count("\n")) == (2, [], 1)
    assert "python3.11 is Python 3.11; this machine has one: PYTHON=python3.12 " in said
    assert machine.run("plan", "--cluster=h100:8x8")[2][:2] == [
        f"venv {machine.root}/.venv-plan",
        f"pip {machine.root}[plan-gpu]",
    ]


def test_pytorch_comes_with_python_3_11(machine):
    machine.program("python3.11", PYTHON)
    machine.program("python3.12", PYTHON_3_12)
    _, said, calls = machine.run("test", "--eval")
    assert calls[:2] == [f"venv {machine.root}/.venv-eval", f"newest {machine.root}[dev,eval]"]
    assert said.splitlines()[1:] == [
        "meshtrain: Python 3.11: jax 0.10.2, the last for it; PyTorch has a package without CUDA for it"
    ]
    assert f"venv {machine.root}/.venv-eval-3.12" in machine.run("test", "--eval", PYTHON="python3.12")[2]


@pytest.mark.parametrize("version", ["2.7", "3.10"])
def test_an_older_python_gets_one_line(machine, version):
    code, said, calls = machine.run("train", FAKE_VERSION=version)
    assert (code, calls) == (2, [])
    assert said == f"meshtrain: error: meshtrain needs Python 3.11 or newer; python3 is Python {version}\n"


def test_an_older_python_beside_a_newer_one_names_it(machine):
    machine.program("python3.11", PYTHON.replace("${FAKE_VERSION:-3.11}", "3.11"))
    code, said, _ = machine.run("train", FAKE_VERSION="3.9")
    assert code == 2
    assert "PYTHON=python3.11 " in said
    assert said.count("\n") == 1


def test_no_python_and_no_venv_module_get_one_line_each(machine):
    code, said, calls = machine.run("train", FAKE_NO_VENV="1")
    assert (code, calls, said.count("\n")) == (2, [], 1)
    assert "python3-venv" in said
    (machine.bin / "python3").unlink()
    code, said, calls = machine.run("train")
    assert (code, calls, said.count("\n")) == (2, [], 1)
    assert "python3 does not run" in said


def test_another_python_has_a_folder_of_its_own_and_runs_no_linters(machine):
    machine.program("python3.13", PYTHON_3_13)
    machine.program("python3.12", PYTHON_3_12)
    code, _, calls = machine.run("test", PYTHON="python3.13")
    assert code == 0
    assert calls == [
        f"venv {machine.root}/.venv-3.13",
        f"pip {machine.root}[dev]",
        "run -m pytest -n 2 --dist loadgroup",
    ]
    assert f"venv {machine.root}/.venv" in machine.run("test", "x", PYTHON="python3.12")[2]


def test_a_python_that_only_pyenv_knows_is_found(machine):
    versions = machine.bin.parent / "pyenv" / "versions"
    for version in ("3.12.1", "3.12.10", "3.12.9"):
        (versions / version / "bin").mkdir(parents=True)
    program = versions / "3.12.10" / "bin" / "python3.12"
    machine.program("python3.12", "#!/bin/bash\necho 'pyenv: python3.12: command not found' >&2; exit 127\n")
    machine.program("pyenv", f"#!/bin/bash\necho '{versions.parent}'\n")
    code, said, calls = machine.run("test", "x", PYTHON="python3.12")
    assert (code, calls) == (2, [])
    assert "python3.12 does not run" in said
    for path, version in {
        program: "3.12",
        versions / "3.12.9/bin/python3.12": "3.1",
        program.with_name("z"): "3.2",
    }.items():
        path.write_text(PYTHON.replace("${FAKE_VERSION:-3.11}", version))
        path.chmod(0o755)
    _, said, calls = machine.run("train")
    assert calls[0] == f"venv {machine.root}/.venv"
    assert "for Python 3.12 " in said
    machine.program("python3.13", PYTHON_3_13)
    assert f"venv {machine.root}/.venv-3.13" in machine.run("test", "x", PYTHON="python3.13")[2]


def test_what_depends_on_jax_is_there(machine):
    """pytest refuses a test that is not there: in an hour of CI that would be late."""
    first, again = [call for call in machine.run("test", "--jax", "-x")[2] if call.startswith("run")]
    assert first.startswith("run -m pytest -n 2 --dist loadgroup tests/parity/")
    assert again.startswith("run with jax_remat3 -m pytest -n 2 --dist loadgroup tests/sharding/")
    assert first.endswith(" -x")
    assert again.endswith(" -x")
    assert machine.run("test", "--newest", "-x")[2] == [
        f"venv {machine.root}/.venv-newest",
        f"newest {machine.root}[dev]",
        first,
        again,
    ]
    for name in (word for word in f"{first} {again}".split() if word.startswith("tests/")):
        path, _, function = name.partition("[")[0].partition("::")
        assert (ROOT / path).exists(), path
        assert not function or f"def {function}(" in (ROOT / path).read_text(), name


@pytest.mark.parametrize(
    ("answer", "extra"),
    [
        ("580.65.06, 9.0\\n580.65.06, 9.0", "[cuda13]"),
        ("580.65.06, 7.0", "[cuda12]"),  # Volta
        ("525.60.13, 8.0", "[cuda12]"),
        ("470.82.01, 8.0", ""),
        ("No devices were found", ""),
    ],
)
def test_the_extra_fits_the_driver(machine, answer, extra):
    machine.program("nvidia-smi", f"#!/bin/bash\necho nvidia-smi >>\"$FAKE_LOG\"\nprintf '{answer}\\n'\n")
    _, said, calls = machine.run("train")
    assert f"pip {machine.root}{extra}" in calls
    assert (f"the extra {extra[1:-1]}\n" in said) == bool(extra)
    again = machine.run("train")[2]
    assert again == ([] if extra else ["nvidia-smi"]) + ["run -m meshtrain train"]
