"""What scripts/train and scripts/test do on machines of many kinds; the interpreter only writes down its calls."""

import ast
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from meshtrain.plan.target import clusters

ROOT = pathlib.Path(__file__).parents[2]
PROGRAMS_OF_PAGES = sorted((ROOT / "scripts" / "benchmarks").glob("*.py"))
BENCHMARKS = {
    path.stem: text for path in PROGRAMS_OF_PAGES if '\nif __name__ == "__main__":' in (text := path.read_text())
}

# Answers for its version, makes "environments" that hold itself, and logs everything else.
PYTHON = """#!/bin/bash
case "$*" in
  *version_info*) printf %s "${FAKE_VERSION:-3.11}" ;;
  *"import ensurepip, venv"*) exit "${FAKE_NO_VENV:-0}" ;;
  "-I -m venv "*) mkdir -p "$4/bin" && cp "$0" "$4/bin/python" && echo "venv $4" >>"$FAKE_LOG" ;;
  *"-m pip install"*" $FAKE_CONSTRAINTS --editable "*) echo "pip ${!#}" >>"$FAKE_LOG"; exit "${FAKE_PIP:-0}" ;;
  *"-m pip install"*) echo "newest ${!#}" >>"$FAKE_LOG"; exit "${FAKE_PIP:-0}" ;;
  *) echo "run $*" >>"$FAKE_LOG" ;;
esac
"""
PROGRAMS = "bash cat cut dirname env find flock grep mkdir cp rm sha256sum sort tail timeout"
PYTHON_3_12 = PYTHON.replace("${FAKE_VERSION:-3.11}", "3.12")
LINT = '#!/bin/bash\necho "lint-imports" >>"$FAKE_LOG"\n'


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
    assert said.count("\n") == 1, said
    assert "into .venv" in said
    assert machine.run("train", "--y") == (0, "", ["run -m meshtrain train --y"])


def test_a_changed_pyproject_is_installed_again_in_place(machine):
    machine.run("train")
    with open(machine.root / "pyproject.toml", "a") as file:
        file.write("# changed\n")
    assert machine.run("train")[2] == [f"pip {machine.root}", "run -m meshtrain train"]
    assert machine.run("train")[2] == ["run -m meshtrain train"]


def test_extras_add_up(machine):
    machine.run("train")
    assert f"pip {machine.root}[dev]" in machine.run("test", "x")[2]
    assert machine.run("train")[2] == ["run -m meshtrain train"]
    assert machine.run("test", "x")[2] == ["run -m pytest x"]


def test_another_python3_makes_the_environment_afresh(machine):
    machine.run("train")
    assert f"venv {machine.root}/.venv" in machine.run("train", FAKE_VERSION="3.13")[2]


def test_a_moved_checkout_makes_the_environment_afresh(machine):
    machine.run("train")
    machine.root = machine.root.rename(machine.root.with_name("moved"))
    assert f"venv {machine.root}/.venv" in machine.run("train")[2]


def test_an_interrupted_installation_is_redone(machine):
    code, said, calls = machine.run("train", FAKE_PIP="1")
    assert code == 2
    assert "the installation failed" in said
    assert not any(call.startswith("run") for call in calls)
    (machine.root / ".venv" / "half").touch()
    assert machine.run("train")[2][0] == f"venv {machine.root}/.venv"
    assert not (machine.root / ".venv" / "half").exists()


def test_an_environment_made_by_hand_is_kept(machine):
    (machine.root / ".venv" / "bin").mkdir(parents=True)
    shutil.copy(machine.bin / "python3", machine.root / ".venv" / "bin" / "python")
    assert machine.run("train")[2] == [f"pip {machine.root}", "run -m meshtrain train"]


@pytest.mark.parametrize("version", ["2.7", "3.10"])
def test_an_older_python_gets_one_line(machine, version):
    code, said, calls = machine.run("train", FAKE_VERSION=version)
    assert (code, calls) == (2, [])
    assert said == f"meshtrain: error: meshtrain needs Python 3.11 or newer; python3 is Python {version}\n"


def test_an_older_python_beside_a_newer_one_names_it(machine):
    machine.program("python3.12", PYTHON_3_12)
    code, said, _ = machine.run("train", FAKE_VERSION="3.9")
    assert code == 2
    assert "PYTHON=python3.12 " in said
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
    machine.program("python3.12", PYTHON_3_12)
    code, _, calls = machine.run("test", PYTHON="python3.12")
    assert code == 0
    assert calls == [
        f"venv {machine.root}/.venv-3.12",
        f"pip {machine.root}[dev]",
        "run -m pytest -n 2 --dist loadgroup",
    ]
    machine.program("python3.11", PYTHON)
    assert f"venv {machine.root}/.venv" in machine.run("test", "x", PYTHON="python3.11")[2]


PYTEST = "-m pytest -n 2 --dist loadgroup"
PLANS = [
    (f"--cluster={[*clusters.GPUS][-1]}:8", "plan-gpu"),
    (f"--cluster={[*clusters.TPUS][-1]}:2x2", "plan-tpu"),
    ("--config=a.py --cluster H100:8x8", "plan-gpu"),
    ("--cluster=h100:8 --cluster=cpu:8", ""),
    ("--cluster=h10:8", ""),
    ("--help", ""),
]
# Script, its words, the folder of its environment, the extras that come into it, and what it runs.
STARTS = [
    ("test", "x", ".venv", "dev", "-m pytest x"),
    ("test", "--plan -x", ".venv-plan", "dev,plan-gpu,plan-tpu", f"{PYTEST} -m gpu_compiler and not slow -x"),
    ("test", "--release -x", ".venv", "dev,release", "-m pytest -m release tests/release -x"),
    ("test", "--browser -x", ".venv", "dev,browser,docs", "-m pytest -m browser tests/browser -x"),
    ("test", "--faults step", ".venv", "dev", "-m tests.faults step"),
    ("report", "runs/3d '--html=a b.html'", ".venv", "report", "-m meshtrain report runs/3d --html=a b.html"),
    *(("plan", words, ".venv-plan" if extra else ".venv", extra, f"-m meshtrain plan {words}")
      for words, extra in PLANS),
    *(("bench", f"{name} '--only=a b'", f".venv{folder}", extra, f"-m scripts.benchmarks.{name} --only=a b")
      for name, folder, extra in [("step", "", ""), ("memory", "", ""), ("plan", "-plan", "plan-gpu"),
                                  ("hf_transformers", "-transformers", "transformers")]),
]  # fmt: skip


@pytest.mark.parametrize(("script", "words", "folder", "extras", "program"), STARTS)
def test_each_script_runs_in_the_environment_that_it_names(machine, script, words, folder, extras, program):
    code, said, calls = machine.run(script, *shlex.split(words))
    assert (code, said.count("\n")) == (0, 1)
    installed = f"pip {machine.root}[{extras}]" if extras else f"pip {machine.root}"
    assert calls == [f"venv {machine.root}/{folder}", installed, f"run {program}"]


@pytest.mark.parametrize(("words", "folder", "extras"), [("--jax", "newest", "dev"), ("--eval", "eval", "dev,eval")])
def test_the_newest_packages_come_where_the_tested_ones_are_not_wanted(machine, words, folder, extras):
    calls = machine.run("test", words, "-x")[2]
    assert calls[:2] == [f"venv {machine.root}/.venv-{folder}", f"newest {machine.root}[{extras}]"]
    assert calls[2].startswith("run -m pytest -")
    assert calls[2].endswith(" -x")
    assert machine.run("test", words, "-x")[2] == calls[2:]
    changed = machine.root / "constraints.txt"
    changed.write_text(changed.read_text().replace("jax==0.10.2", "jax==0.10.3"))
    assert machine.run("test", words, "-x")[2] == calls[1:]


def test_the_site_is_made_with_the_reference_of_this_version(machine):
    code, _, calls = machine.run("docs", "-j2")
    assert (code, calls[0]) == (0, f"venv {machine.root}/.venv")
    assert calls[1:3] == [f"pip {machine.root}[docs]", "run -m scripts.benchmarks.reference"]
    assert calls[3].startswith("run -m sphinx -q -E -W ")
    assert calls[3].endswith(" -j2 . build/site")


def test_the_compilers_of_accelerators_that_are_not_there_have_a_folder_of_their_own(machine):
    machine.run("test", "--plan")
    assert machine.run("plan", "--cluster=h100:8x8")[2] == ["run -m meshtrain plan --cluster=h100:8x8"]
    assert f"venv {machine.root}/.venv" in machine.run("plan", "--cluster=cpu:8")[2]
    machine.program("python3.12", PYTHON_3_12)
    assert machine.run("test", "--plan", PYTHON="python3.12")[2][0] == f"venv {machine.root}/.venv-plan-3.12"


def test_a_second_compiler_joins_the_first(machine):
    machine.run("plan", "--cluster=v5e:4x4")
    assert machine.run("plan", "--cluster=h100:8")[2][0] == f"pip {machine.root}[plan-tpu,plan-gpu]"
    assert machine.run("plan", "--cluster=v5e:4x4")[2] == ["run -m meshtrain plan --cluster=v5e:4x4"]
    slices = machine.run("plan", "--cluster", "2xv5e:4x4")[2]
    assert slices == ["run -m meshtrain plan --cluster 2xv5e:4x4"], "where that compiler is"


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
    assert f"venv {machine.root}/.venv-3.12" in machine.run("test", "x", PYTHON="python3.12")[2]


def test_linters_run_before_the_tests(machine):
    machine.run("test", "x")
    lint = machine.root / ".venv" / "bin" / "lint-imports"
    lint.write_text(LINT)
    lint.chmod(0o755)
    assert machine.run("test")[2] == [
        "run -m ruff check .",
        "run -m ruff format --check .",
        "run -m mypy",
        "lint-imports",
        "run -m pytest -n 2 --dist loadgroup",
    ]
    slow = machine.run("test", "--slow", "-x")[2]
    assert slow == [
        f"pip {machine.root}[dev,wandb]",
        "run -m pytest -n 2 --dist loadgroup -m slow and not gpu_compiler -x",
    ]


def test_what_depends_on_jax_is_there(machine):
    """pytest refuses a test that is not there: in an hour of CI that would be late."""
    [call] = [call for call in machine.run("test", "--jax", "-x")[2] if call.startswith("run")]
    assert call.startswith("run -m pytest -n 2 --dist loadgroup tests/parity/")
    assert call.endswith(" -x")
    for name in (word for word in call.split() if word.startswith("tests/")):
        path, _, function = name.partition("[")[0].partition("::")
        assert (ROOT / path).exists(), path
        assert not function or f"def {function}(" in (ROOT / path).read_text(), name


@pytest.mark.parametrize("words", [[], ["bench_step"], ["plain_decoder"]])
def test_a_benchmark_that_is_not_there_is_one_line_with_those_that_are(machine, words):
    code, said, calls = machine.run("bench", *words)
    assert (code, calls, said.count("\n")) == (2, [], 1)
    assert f"got '{''.join(words)}'; allowed: {', '.join(BENCHMARKS)}; nearest: scripts/bench step\n" in said
    assert machine.run("bench", "step")[0] == 0


def test_each_benchmark_is_listed_with_what_it_does():
    listed = subprocess.run([ROOT / "scripts" / "bench", "--help"], capture_output=True, text=True, check=True).stdout
    first = [ast.get_docstring(ast.parse(text)).splitlines()[0] for text in BENCHMARKS.values()]
    assert listed.splitlines() == [f"{name:<20} {line}" for name, line in zip(BENCHMARKS, first, strict=True)]


def test_each_benchmark_prints_what_a_page_shows():
    pages = "".join(path.read_text(encoding="utf-8") for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
    assert {*re.findall(r"scripts(?:/bench |\.benchmarks\.)([a-z_]+)", pages)} == {*BENCHMARKS} - {"witness"}


def test_scripts_are_few():
    assert len([path for path in (ROOT / "scripts").iterdir() if path.is_file()]) <= 14


# Logs its calls; `install` makes the two programs, unless there are none for this machine.
APT_GET = """#!/bin/bash
echo "apt-get $1" >>"$FAKE_LOG"
[[ $1 == "${FAKE_FAILS-none}" ]] && exit 100
[[ $1 == install && -z ${FAKE_EMPTY-} ]] && cp "$0" "${0%/*}/chromium" && cp "$0" "${0%/*}/chromedriver"
exit 0
"""
SUDO = '#!/bin/bash\necho sudo >>"$FAKE_LOG"\nshift\nexec "$@"\n'


ASKED = ["apt-get update", "apt-get install"]
NEEDS_ROOT = (2, [], "takes root, or sudo without a password")
WITH_SUDO = (0, ["sudo", "sudo", "apt-get update", "sudo", "apt-get install"], "")


@pytest.mark.parametrize(
    ("user", "programs", "environment", "ends"),
    [
        pytest.param(0, {"chromium": "", "chromedriver": ""}, {}, (0, [], ""), id="there"),
        pytest.param(0, {"apt-get": APT_GET}, {}, (0, ASKED, ""), id="root"),
        pytest.param(7, {"apt-get": APT_GET, "sudo": SUDO, "true": ""}, {}, WITH_SUDO, id="sudo"),
        pytest.param(0, {}, {}, (2, [], "no apt-get on this machine"), id="no apt-get"),
        pytest.param(7, {"apt-get": APT_GET}, {}, NEEDS_ROOT, id="no sudo"),
        pytest.param(7, {"apt-get": APT_GET, "sudo": "#!/bin/bash\nexit 1"}, {}, NEEDS_ROOT, id="password"),
        pytest.param(
            0, {"apt-get": APT_GET}, {"FAKE_FAILS": "update"}, (2, ASKED[:1], "apt-get update failed"), id="network"
        ),
        pytest.param(0, {"apt-get": APT_GET}, {"FAKE_FAILS": "install"}, (2, ASKED, "apt-get install"), id="space"),
        pytest.param(0, {"apt-get": APT_GET}, {"FAKE_EMPTY": "1"}, (2, ASKED, "are not there"), id="no programs"),
    ],
)
def test_the_browser_is_installed_or_a_line_says_why_not(machine, user, programs, environment, ends):
    for name, text in ({"id": f"#!/bin/bash\necho {user}"} | programs).items():
        machine.program(name, text)
    code, said, calls = machine.run("install_browser", **environment)
    assert (code, calls) == ends[:2]
    assert said.count("\n") == (code != 0)
    assert ends[2] in said


# Logs what it is asked to run, and ends as the environment says.
STAGE = """#!/bin/bash
words=$*
[[ $0 == */test ]] || words=${0##*/}
echo "${PYTHON:-python3} $words" >>"$FAKE_LOG"
[[ "$words" == "${FAKE_SLEEPS-none}" ]] && sleep 60
[[ "$words" == "${FAKE_FAILS-none}" ]] && exit 7
exit 0
"""
STAGES = [
    "python3 ",
    "python3.12 --jax",
    "python3 --slow",
    "python3 --release",
    "python3 --eval",
    "python3 install_browser",
    "python3 --browser",
    "python3 --plan -m gpu_compiler",
    "python3.12 --plan tests/launch",
]


@pytest.fixture
def ci(tmp_path):
    """A function (seconds, environment) -> exit code, output and stages of .ci/run; the scripts are fakes."""
    for folder in (".ci", "scripts"):
        (tmp_path / folder).mkdir()
    for name in ("test", "install_browser"):
        (tmp_path / "scripts" / name).write_text(STAGE)
        (tmp_path / "scripts" / name).chmod(0o755)
    text = (ROOT / ".ci" / "run").read_text()

    def run(seconds=60, **environment):
        assert "limit_seconds=$((85 * 60))" in text
        (tmp_path / ".ci" / "run").write_text(text.replace("limit_seconds=$((85 * 60))", f"limit_seconds={seconds}"))
        environment = {"PATH": os.environ["PATH"], "FAKE_LOG": str(tmp_path / "log"), **environment}
        (tmp_path / "log").unlink(missing_ok=True)
        command = ["bash", tmp_path / ".ci" / "run"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout, (tmp_path / "log").read_text().splitlines()

    return run


def test_continuous_integration_runs_every_stage(ci):
    code, said, stages = ci()
    assert (code, stages) == (0, STAGES)
    assert said.endswith("ci: all stages have run and passed\n")


@pytest.mark.parametrize("stage", ["", "install_browser", "--plan -m gpu_compiler"])
def test_a_stage_that_fails_stops_no_other_and_fails_all(ci, stage):
    code, said, stages = ci(FAKE_FAILS=stage)
    assert (code, stages) == (1, STAGES)
    assert "ci: FAILED: exit code 7: " in said


def test_stages_for_which_there_is_no_time_fail(ci):
    code, said, stages = ci(seconds=2, FAKE_SLEEPS="--slow")
    assert (code, stages) == (1, STAGES[:3])
    assert "ci: FAILED: did not end within 2 seconds of all stages: scripts/test --slow" in said
    assert said.count("ci: FAILED: did not run") == 6


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


def test_a_driver_that_does_not_answer_leaves_the_cpu(machine):
    machine.program("nvidia-smi", "#!/bin/bash\necho 'NVIDIA-SMI has failed'\nexit 9\n")
    code, said, calls = machine.run("train")
    assert code == 0
    assert f"pip {machine.root}" in calls
    assert "nvidia" not in said


@pytest.mark.slow
def test_a_fresh_checkout_installs_for_real(tmp_path):
    """No CUDA comes with it, and the program answers from any folder."""
    for name in ("scripts", "meshtrain", "configs"):
        shutil.copytree(ROOT / name, tmp_path / "new" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "constraints.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / "new")
    script = tmp_path / "new" / "scripts" / "train"
    environment = {**os.environ, "PYTHON": sys.executable}
    first = subprocess.run([script, "--help"], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert first.returncode == 0, first.stderr
    assert "--config" in first.stdout
    (found,) = (tmp_path / "new").glob(".venv*")
    packages = subprocess.run([found / "bin/python", "-m", "pip", "freeze"], capture_output=True, text=True, check=True)
    assert "jaxlib" in packages.stdout
    assert "nvidia" not in packages.stdout
    assert "cuda" not in packages.stdout
