"""What strangers install: wheel and sdist, built from what git has, checked, and used outside of any checkout."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest

import meshtrain

ROOT = pathlib.Path(__file__).parents[2]
CONSTRAINTS = ROOT / "constraints.txt"
NAME = f"meshtrain-{meshtrain.__version__}"
# Beside what a build writes: of no use without git.
NOT_IN_SDIST = {".gitignore"}
pytestmark = pytest.mark.release


def ran(*words, cwd, **environment):
    """Returns what a program prints, which has to succeed. No folder of ours is on its way to packages."""
    known = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(
        [str(word) for word in words], cwd=cwd, env=known | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def tracked():
    listed = ran("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    return {name for name in listed.split("\0") if name and (ROOT / name).is_file()}


@pytest.fixture(scope="module")
def dist(tracked, tmp_path_factory):
    """Returns the folder that has both; a copy is built, since a build also takes what lies about."""
    source = tmp_path_factory.mktemp("source")
    for name in tracked:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    ran(sys.executable, "-m", "build", "--no-isolation", source, cwd=source)
    return source / "dist"


@pytest.fixture(scope="module")
def environment(dist, tmp_path_factory):
    """Returns the folder of programs of an environment that has the wheel, and what that needs, alone."""
    folder = tmp_path_factory.mktemp("empty")
    ran(sys.executable, "-I", "-m", "venv", "--without-pip", folder, cwd=folder)
    wheel = dist / f"{NAME}-py3-none-any.whl"
    ran(sys.executable, "-m", "pip", "install", "--constraint", CONSTRAINTS, wheel, cwd=folder, **into(folder / "bin"))
    return folder / "bin"


def into(programs):
    """Variables with which our pip installs into another environment: one of its own would take seconds to install."""
    # Bytecode is written for what is imported only: of all packages it would take half of the installation's time.
    return {"PIP_PYTHON": str(programs / "python"), "PIP_NO_COMPILE": "1", "PIP_QUIET": "2"}


def test_the_sdist_has_all_and_the_wheel_the_package_with_its_configurations(dist, tracked):
    with tarfile.open(dist / f"{NAME}.tar.gz") as sdist:
        held = {file.name.removeprefix(f"{NAME}/") for file in sdist.getmembers() if file.isfile()}
    made = {name for name in held if "egg-info/" in name} | {"PKG-INFO", "setup.cfg"}
    assert held - made == tracked - NOT_IN_SDIST
    with zipfile.ZipFile(dist / f"{NAME}-py3-none-any.whl") as wheel:
        held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    package = {name for name in tracked if name.startswith("meshtrain/")}
    assert held == package | {f"meshtrain/{name}" for name in tracked if name.startswith("configs/")}


def test_they_pass_the_checks_of_an_index(dist):
    files = sorted(dist.iterdir())
    assert len(files) == 2
    ran(sys.executable, "-m", "twine", "check", "--strict", *files, cwd=ROOT)
    assert ran(pathlib.Path(sys.executable).with_name("check-wheel-contents"), files[0], cwd=ROOT).endswith(": OK\n")


def test_the_page_of_an_index_needs_no_repository(dist):
    with zipfile.ZipFile(dist / f"{NAME}-py3-none-any.whl") as wheel:
        text = wheel.read(f"{NAME}.dist-info/METADATA").decode()
    assert f"\nVersion: {meshtrain.__version__}\n" in text
    page = text[text.index("\n# meshtrain\n") :]
    assert "[" not in re.sub(r"```.*?```|`[^`\n]*`|\[[^]]*\]\(https?:[^)]*\)", "", page, flags=re.DOTALL), "links"
    assert "](docs/" not in page
    assert "![" not in page


def test_a_tag_is_the_version():
    tags = ran("git", "tag", "--points-at", "HEAD", "v*", cwd=ROOT).split()
    assert tags in ([], [f"v{meshtrain.__version__}"])


def test_a_stranger_trains_plans_and_generates_in_an_empty_folder(environment, tmp_path):
    small = ("--config.model.num_layers=2", "--config.batch_size=8", "--config.sample_tokens=0")

    def said(*words):
        return ran(environment / "meshtrain", *words, cwd=tmp_path, HOME=str(tmp_path))

    assert said("--version").startswith(f"meshtrain {meshtrain.__version__}\njax ")
    assert said("--help").startswith("usage: meshtrain COMMAND ")
    assert said("config", "--copy=tiny") == "tiny.py: edit it, then run meshtrain train --config=tiny.py\n"
    assert "done: step 3\n" in said("train", "--config=tiny.py", "--config.num_steps=3", *small)
    assert "def " in said("generate", "--config=tiny.py", "--prompt=def ", "--num-tokens=4")
    assert "2 x cpu" in said("plan", "--config=tiny", "--cluster=cpu:2", "--config.mesh.data=2", *small)
    where = ran(environment / "python", "-c", "import meshtrain; print(meshtrain.__file__)", cwd=tmp_path)
    assert pathlib.Path(where).is_relative_to(environment.parent)


def test_the_image_s_line_installs(environment, tmp_path):
    """Into the same environment: another one would take as long again."""
    text = (ROOT / "Dockerfile").read_text()
    for *names, target in (line.split() for line in re.findall(r"^COPY (.*)", text, re.MULTILINE)):
        for name in names:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, tmp_path / target / ("" if copy is shutil.copytree else name))
    [line] = re.findall(r"^RUN (pip .*)", text, re.MULTILINE)
    path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    ran("sh", "-c", line, cwd=tmp_path, PATH=path, DEVICES="cpu", **into(environment))
    ran(sys.executable, "-m", "pip", "check", cwd=tmp_path, **into(environment))
    ran(environment / "python", "-c", "import importlib.metadata as m; m.version('kubernetes')", cwd=tmp_path)
    [entry] = re.findall(r'^ENTRYPOINT \["(.*)"\]', text, re.MULTILINE)
    assert "usage: meshtrain " in ran(environment / entry, "--help", cwd=tmp_path)
