"""Settings that pyproject.toml does not support: configs/ as a folder of the package, a README without links."""

import pathlib
import re

import setuptools

# A package index does not host the repository, so links into it become plain text, and pictures are removed.
readme = re.sub(r"!\[[^]]*\]\([^)]*\)\n*", "", pathlib.Path("README.md").read_text(encoding="utf-8"))
readme = re.sub(r"\[([^]]*)\]\((?!https?:|#)[^)]*\)", r"\1", readme)

# Folders without an __init__, which `find_packages` skips.
data = ["meshtrain.configs", "meshtrain.examples.digits", "meshtrain.plan.targets"]

setuptools.setup(
    packages=setuptools.find_packages(include=["meshtrain", "meshtrain.*"]) + data,
    package_dir={"meshtrain.configs": "configs"},
    long_description=readme,
    long_description_content_type="text/markdown",
)
