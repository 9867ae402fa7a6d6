"""The site of the pages: no dead link, nothing wider than the window, a search that finds, and nothing fetched."""

import html.parser
import pathlib
import shlex
import subprocess
import sys
import urllib.parse

import pytest

from scripts.benchmarks import reference

pytestmark = pytest.mark.browser

ROOT = pathlib.Path(__file__).parents[2]
WIDTHS = (1280, 390)  # of a laptop and of a telephone
FILE = "files/meshtrain/training.py.html"
# What is cut off on the right, besides what stands in a box that scrolls, and columns that wait beside the page.
WIDE = """return [...document.querySelectorAll("article *, .content *")].filter(one => {
  if (one.getBoundingClientRect().right <= innerWidth + 1) return false;
  for (let box = one; box; box = box.parentElement) {
    const style = getComputedStyle(box);
    if (["auto", "scroll"].includes(style.overflowX) || style.position === "fixed") return false;
  }
  return !one.closest(".toc-drawer");
}).map(one => one.outerHTML.slice(0, 200))"""


class Page(html.parser.HTMLParser):
    """The names of a page, and what it asks for."""

    def __init__(self, path):
        super().__init__()
        self.names, self.wanted = {""}, []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.names |= {given[key] for key in ("id", "name") if key in given}
        self.wanted += [given[key] for key in ("href", "src") if key in given]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site, made by the last line of scripts/docs, which ends where there is a warning."""
    folder = tmp_path_factory.mktemp("site")
    reference.main([str(ROOT / "docs" / "reference")])
    line = (ROOT / "scripts" / "docs").read_text().splitlines()[-1]
    places = {"build/site": str(folder / "html"), "build/doctrees": str(folder / "doctrees")}
    words = [places.get(word, word) for word in shlex.split(line)[2:] if word != "$@"]
    subprocess.run([sys.executable, *words], cwd=ROOT, check=True)
    return folder / "html"


def pages_of(site):
    """Returns the pages that are written by hand, or by the program for the reference; `files/` has the rest."""
    return sorted(path for path in site.rglob("*.html") if path.relative_to(site).parts[0] != "files")


def test_no_link_is_dead(site):
    pages = {path: Page(path) for path in site.rglob("*.html")}
    assert len(pages) > 100
    dead = []
    for path, page in pages.items():
        for wanted in page.wanted:
            place, _, name = wanted.partition("#")
            place = urllib.parse.unquote(place.partition("?")[0])
            target = (path.parent / place).resolve() if place else path
            if urllib.parse.urlparse(wanted).scheme in ("https", "data"):
                continue
            known = pages[target].names if target in pages else {name}
            if site not in target.parents or not target.is_file() or urllib.parse.unquote(name) not in known:
                dead.append(f"{path.relative_to(site)}: {wanted}")
    assert not dead, dead[:20]


def test_each_page_is_there_and_leads_to_every_other(site):
    written = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    names = {path.relative_to(ROOT).with_suffix(".html") for path in written}
    assert {path.relative_to(site) for path in pages_of(site)} >= names
    listed = {(site / place.partition("#")[0]).resolve() for place in Page(site / "index.html").wanted}
    assert not {site / name for name in names} - listed - {site / "README.html"}


def test_a_name_of_the_api_leads_to_its_line(site):
    wanted = next(one for one in Page(site / "docs/reference/api.html").wanted if one.startswith(f"../../{FILE}#"))
    number = int(wanted.partition("#line-")[2])
    source = (ROOT / "meshtrain" / "training.py").read_text().splitlines()
    assert source[number - 1].startswith("def train(")


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_wider_than_the_window(browser, site, width):
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.errors(), browser.requests()
    wide = {}
    for path in [*pages_of(site), site / FILE]:
        browser.driver.get(path.as_uri())
        found = browser.driver.execute_script(WIDE)
        if found or browser.driver.execute_script("return document.documentElement.scrollWidth > innerWidth"):
            wide[path.relative_to(site).as_posix()] = found
    browser.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert not wide
    assert browser.errors() == []
    assert [one for one in browser.requests() if not one.startswith((site.as_uri(), "data:"))] == []


def test_the_search_finds_a_page(browser, site):
    browser.driver.get(f"{(site / 'search.html').as_uri()}?q=interleaved")
    browser.wait("document.querySelector('#search-results a') !== null")
    found = browser.driver.execute_script("return [...document.querySelectorAll('#search-results a')].map(a => a.href)")
    assert any(address.partition("?")[0].endswith("docs/guide/schedules.html") for address in found)
