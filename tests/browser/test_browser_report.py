"""The page of runs in a real browser: curves, legend, zoom, hover, buttons; no errors, and nothing is fetched."""

import http.server
import itertools
import threading

import pytest

from meshtrain.report import __main__ as report
from tests.report.folders import CONFIG, folder, metrics

pytestmark = pytest.mark.browser

RISKY = "<img src=x onerror=alert(1)>"
NUM_PANELS = 7  # loss, evaluation loss, learning rate, gradient norm, throughput, goodput, seconds a step
VISIBLE = "[...page.querySelectorAll('.scatterlayer .trace path.js-line')].filter(one => one.getAttribute('d')).length"


def written(path, *runs):
    assert report.main([*map(str, runs), f"--html={path}"]) == 0
    return path


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page of two runs, the second with a name that would be an element."""
    path = tmp_path_factory.mktemp("page")
    slower = [row | {"loss": 5 + row["loss"]} if "loss" in row else row for row in metrics(60, every=20)]
    first = folder(path / "first", metrics(60), sample="def f(x):\n    return x")
    return written(path / "page.html", first, folder(path / RISKY, slower, config=CONFIG | {"seed": 7}))


@pytest.fixture
def opened(browser, page):
    """The browser with that page; after the test, nothing was complained of and nothing fetched."""
    browser.open(page)
    yield browser
    assert browser.errors() == []
    assert browser.requests() == [page.as_uri()]


def test_every_curve_is_drawn(opened):
    assert opened.run(VISIBLE) == 2 * NUM_PANELS
    titles = opened.run("[...page.querySelectorAll('.annotation-text')].map(one => one.textContent)")
    assert titles == [
        "loss",
        "evaluation loss",
        "learning rate",
        "gradient norm",
        "throughput, tokens/s",
        "goodput",
        "seconds a step",
    ]
    boxes = opened.run("[...document.querySelectorAll('svg.still')].map(one => one.getBoundingClientRect().height)")
    assert len(boxes) == 3, "memory, mesh and schedule"
    assert min(boxes) > 50


def test_no_text_lies_over_another(browser, tmp_path):
    """Titles of panels and axes, labels of ticks, legend and buttons, with names and numbers as long as they get."""
    found = {"a_metric_of_ones_own_whose_name_takes_more_than_a_line": 0.5, "expert_load": 1.5, "loss_scale": 65536.0}
    name = "a name of a run that reaches over all three of the panels below it, whose titles " + "stand " * 10
    rows = [row | found | {"throughput": 1e-7 * row["step"]} for row in metrics(60)]
    browser.open(written(tmp_path / "long.html", folder(tmp_path / name, rows), folder(tmp_path / "other")))
    selector = ".annotation-text, [class$=tick] text, [class$=title] text, .legendtext, .updatemenu-button"
    boxes = browser.run(
        "[...page.querySelectorAll(arguments[0])].map(one => { const box = one.getBoundingClientRect();"
        " return [one.textContent, box.left, box.top, box.right, box.bottom] })",
        selector,
    )
    assert {"loss", "65,536", "steps", "other", "time", "largest load of an expert / mean load"} <= {
        text for text, *_ in boxes
    }
    over = [
        (one, other)
        for (one, left, top, right, bottom), (other, other_left, other_top, other_right, other_bottom) in (
            itertools.combinations(boxes, 2)
        )
        if min(right, other_right) - max(left, other_left) > 1 and min(bottom, other_bottom) - max(top, other_top) > 1
    ]
    assert over == []
    width = browser.run("page.getBoundingClientRect().right")
    assert max(right for *_, right, _ in boxes) <= width


def test_words_in_pictures_are_large_enough_to_read(opened):
    heights = opened.run(
        "[...document.querySelectorAll('svg.still text')].map(one => [one.textContent,"
        " one.getScreenCTM().a * parseFloat(getComputedStyle(one).fontSize)])"
    )
    assert {"device 0", "weights", "stage 0", "optimizer"} <= {text for text, _ in heights}
    assert min(pixels for _, pixels in heights) >= 9


def test_a_name_is_text_wherever_it_stands(opened):
    assert opened.run("document.querySelectorAll('img').length") == 0
    names = opened.run("[...page.querySelectorAll('.legendtext')].map(one => one.textContent)")
    assert names == ["first", RISKY]
    assert opened.run("document.querySelector('h1').textContent") == f"first, {RISKY}"


def test_the_legend_shows_and_hides_a_run_in_all_panels(opened, click):
    click("#curves .legendtoggle", 0)
    opened.wait(f"{VISIBLE} === {NUM_PANELS}")
    shown = opened.run("page.data.filter(one => one.visible !== 'legendonly').map(one => one.legendgroup)")
    assert set(shown) == {RISKY}
    click("#curves .legendtoggle", 0)
    opened.wait(f"{VISIBLE} === {2 * NUM_PANELS}")


def test_panels_zoom_together_and_back(opened, hover):
    before = opened.run("page.layout.xaxis.range")
    hover(0.25, 0.5).click_and_hold().perform()
    hover(0.5, 0.5).release().perform()
    opened.wait("page.layout.xaxis.range[0] > 100")
    zoomed = opened.run("page.layout.xaxis.range")
    assert before[0] < zoomed[0] < zoomed[1] < before[1]
    assert opened.run("page.layout.xaxis7.range") == zoomed
    hover(0.5, 0.5).double_click().perform()
    opened.wait("page.layout.xaxis.range[0] < 100")


def test_hovering_shows_the_values_of_all_runs(opened, hover):
    hover(0.52, 0.5).perform()
    opened.wait("page.querySelectorAll('.hoverlayer .legendtext').length >= 2")
    lines = opened.run("[...page.querySelectorAll('.hoverlayer .legendtext')].map(one => one.textContent)")
    assert any(line.startswith("first : 3.00") for line in lines), lines
    assert any(line.startswith(f"{RISKY} : 8.00") for line in lines), lines


def test_curves_go_over_tokens_and_over_time(opened, click):
    for index, (last, text) in enumerate([(600, "steps"), (600 * 4096, "tokens"), (375, "seconds since the start")]):
        click("#curves .updatemenu-button", index)
        opened.wait("page.data[0].x.at(-1) === arguments[0]", last)
        opened.wait("page.layout.xaxis7.title.text === arguments[0]", text)
        assert opened.run("page.layout.xaxis.range[1]") >= last


def test_losses_have_a_logarithmic_scale(opened, click):
    click("#curves .updatemenu-button", 4)
    opened.wait("page.layout.yaxis.type === 'log' && page.layout.yaxis2.type === 'log'")
    assert opened.run("page.layout.yaxis3.type") == "linear", "the learning rate stays as it is"


def test_the_page_may_not_fetch_anything(browser, page):
    """Not even if a script in it asked for something."""
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser.open(page)
        fetch = "const done = arguments[1]; fetch(arguments[0]).then(() => done('fetched'), () => done('refused'))"
        said = browser.driver.execute_async_script(fetch, f"http://127.0.0.1:{server.server_port}/x")
        server.shutdown()
    assert (said, asked) == ("refused", [])
    assert any("Content Security Policy" in line for line in browser.errors())


def test_a_page_of_100_000_steps_opens_with_its_spikes(browser, tmp_path, hover):
    rows = metrics(100_000, every=1, noise=0.2)
    rows[54_321]["loss"] = 77.5
    page = written(tmp_path / "long.html", folder(tmp_path / "long", rows))
    assert 5_500_000 < page.stat().st_size <= 8_000_000
    browser.open(page)
    assert browser.run(VISIBLE) == NUM_PANELS + 2, "MFU and data share, too"
    assert browser.run("Math.max(...page.data[0].y)") == 77.5
    assert browser.run("page.data[0].x[page.data[0].y.indexOf(77.5)]") == 54_322
    hover(0.5, 0.2).perform()
    browser.wait("page.querySelectorAll('.hoverlayer .legendtext').length >= 1")
    assert browser.errors() == []
    assert browser.requests() == [page.as_uri()]
