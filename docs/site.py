"""Extends Sphinx for these pages: their order, the API from docstrings, and source files as pages.

A page links to source files with relative links, as on a code host. In the site, a link leads to a page with that file,
and a function of the API to its line there.
"""

import html
import importlib
import inspect
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

from scripts.benchmarks import reference

ROOT = Path(__file__).resolve().parents[1]
API = "docs/reference/api"
FILES = "files"  # the folder of the site with a page for each file
LANGUAGES = {".py": "python", ".toml": "toml", ".yaml": "yaml", ".jinja": "jinja"}
GENERATED = [f"reference/{name.removesuffix('.md')}" for name in reference.PAGES]

linked: set[Path] = set()  # files and folders that a page of this build links to


class LinksToFiles(SphinxTransform):
    """Changes a relative link to a file or folder of the repository into a link to its page in the site."""

    default_priority = 500

    def apply(self, **_: Any) -> None:
        """Replaces the links of one page; MyST would treat files as downloads and folders as names."""
        page = ROOT / self.env.docname
        for node in list(self.document.findall(nodes.Element)):
            if node.get("reftype") != "myst" or node.get("refdomain") == "doc":
                continue
            path = (page.parent / node["reftarget"]).resolve()
            if path.exists():
                linked.add(path)
                link = nodes.reference("", "", *node.children, refuri=address(path, self.env.docname), internal=True)
                node.replace_self(link)


def address(path: Path, docname: str) -> str:
    """Returns the relative address of a file's page, seen from a page of the site."""
    return os.path.relpath(f"{FILES}/{path.relative_to(ROOT).as_posix()}.html", os.path.dirname(docname) or ".")


def line_of(domain: str, names: dict[str, str]) -> str | None:
    """Returns the address of a name's source line for a page of the API; None if there is no line."""
    thing: Any = importlib.import_module(names["module"])
    for part in names["fullname"].split("."):
        thing = getattr(thing, part, None)
    if domain != "py" or not (inspect.isclass(thing) or inspect.isroutine(thing)):
        return None
    path = Path(inspect.getsourcefile(thing) or "").resolve()
    linked.add(path)
    return f"{address(path, API)}#line-{inspect.getsourcelines(thing)[1]}"


def read(app: Sphinx, docname: str, source: list[str]) -> None:
    """Adds the order of the pages (as in the tables of docs/index.md) to the first page; replaces the API's text."""
    if docname == API:
        source[0] = "\n\n".join(directives())
    if docname == app.config.root_doc:
        index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
        for title, rows in re.findall(r"^\| (\w+) \|.*\n\|[-| ]+\n((?:\|.*\n?)+)", index, re.MULTILINE):
            pages = re.findall(r"\]\(([\w/]+)\.md\)", rows) + (GENERATED if title == "reference" else [])
            lines = [f":caption: {title.capitalize()}", ":hidden:", "", *(f"docs/{page}" for page in pages)]
            source[0] += "\n```{toctree}\n" + "\n".join(lines) + "\n```\n"
        source[0] += "\n```{toctree}\n:hidden:\n\ndocs/index\nCHANGELOG\nCONTRIBUTING\nSECURITY\n```\n"


def directives() -> Iterator[str]:
    """Yields the page of the API for Sphinx: the names of the reference, for which Sphinx reads the docstrings."""
    yield "# API"
    for title, things in reference.API.items():
        yield f"## {title}"
        for thing in things:
            kind = "class" if inspect.isclass(thing) else "method" if "." in thing.__qualname__ else "function"
            name = f"{thing.__module__}.{thing.__qualname__}"
            if not inspect.isclass(thing) and not inspect.isroutine(thing):
                kind = "data"
            yield f"```{{eval-rst}}\n.. auto{kind}:: {name}\n```"


def file_pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yields a page for each linked file, and for each linked folder with its files."""
    waiting, done = sorted(linked), set()
    while waiting:
        path = waiting.pop()
        if path in done:
            continue
        done.add(path)
        name = path.relative_to(ROOT).as_posix()
        if path.is_dir():
            held = sorted(one for one in path.iterdir() if one.suffix in LANGUAGES and one.name != "__init__.py")
            waiting += held
            rows = (f'<li><a href="{path.name}/{one.name}.html">{one.name}</a></li>' for one in held)
            body = f"<ul>{''.join(rows)}</ul>"
        else:
            language = LANGUAGES.get(path.suffix, "bash" if path.parent.name == "scripts" else "text")
            text = path.read_text(encoding="utf-8")
            body = app.builder.highlighter.highlight_block(text, language, linenos="inline", lineanchors="line")
        title = html.escape(name)
        yield f"{FILES}/{name}", {"title": title, "body": f"<h1>{title}</h1>{body}"}, "page.html"


def first_page(app: Sphinx, exception: Exception | None) -> None:
    """Copies the page of README to index.html, which a host shows first."""
    if exception is None:
        shutil.copy(Path(app.outdir) / "README.html", Path(app.outdir) / "index.html")


def setup(app: Sphinx) -> dict[str, bool]:
    """Connects the functions of this file to Sphinx."""
    app.add_transform(LinksToFiles)
    app.connect("source-read", read)
    app.connect("html-collect-pages", file_pages)
    app.connect("build-finished", first_page)
    return {"parallel_read_safe": False, "parallel_write_safe": False}
