"""Configuration of Sphinx: `scripts/docs` makes one site of README, CONTRIBUTING and docs/.

The source folder is the repository's root, so that links work as on a code host.
"""

from docs import site

project = "meshtrain"
author = "the authors of meshtrain"
copyright = "the authors of meshtrain, Apache-2.0"
root_doc = "README"
include_patterns = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "docs/**"]
exclude_patterns = [".*", "build", "runs", "configs", "meshtrain", "scripts", "tests", "**/__pycache__"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.linkcode", "docs.site"]
myst_heading_anchors = 4
linkcode_resolve = site.line_of
python_maximum_signature_line_length = 100
default_role = "literal"
smartquotes_action = "D"  # the dash after the name of an argument; quotes stay unchanged

html_theme = "furo"
html_title = "meshtrain"
html_copy_source = False
html_show_sourcelink = False
html_static_path = ["site.css"]
html_css_files = ["site.css"]
