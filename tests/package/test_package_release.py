"""What a release says of itself: one version everywhere, and tested versions of all that it needs."""

import pathlib
import re
import tomllib

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import meshtrain

pytestmark = pytest.mark.quick

ROOT = pathlib.Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = ("browser", "dev", "docs", "kubernetes", "release", "report")  # of those that constraints.txt is for


def test_all_say_the_same_version():
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest[1] == meshtrain.__version__
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == meshtrain.__version__
    assert "version" in PROJECT["dynamic"], "it stands in the package"


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_each_package_has_one_tested_version_within_its_bounds(python):
    pins = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        pin = None if not line or line.startswith("#") else Requirement(line)
        if pin and (pin.marker is None or pin.marker.evaluate({"python_version": python})):
            assert canonicalize_name(pin.name) not in pins, line
            [one] = pin.specifier
            assert one.operator == "==", line
            pins[canonicalize_name(pin.name)] = one.version
    wanted = PROJECT["dependencies"] + [line for extra in EXTRAS for line in PROJECT["optional-dependencies"][extra]]
    for need in map(Requirement, wanted):
        assert pins[canonicalize_name(need.name)] in need.specifier, need
    assert pins["jax"] == pins["jaxlib"]
