"""What pyproject.toml cannot say: configs/ becomes a folder of the package, and the README of an index has no files."""

import pathlib
import re

import setuptools

# Beside an index's page there is no repository: of a link into it the text stays, of a picture nothing.
readme = re.sub(r"!\[[^]]*\]\([^)]*\)\n*", "", pathlib.Path("README.md").read_text(encoding="utf-8"))
readme = re.sub(r"\[([^]]*)\]\((?!https?:|#)[^)]*\)", r"\1", readme)

# Folders without an __init__, which `find_packages` leaves out.
data = ["meshtrain.configs", "meshtrain.examples.digits", "meshtrain.plan.targets"]

setuptools.setup(
    packages=setuptools.find_packages(include=["meshtrain", "meshtrain.*"]) + data,
    package_dir={"meshtrain.configs": "configs"},
    long_description=readme,
    long_description_content_type="text/markdown",
)
