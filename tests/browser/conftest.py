"""Chromium without a window, driven by Selenium, for the tests marked `browser`."""

import json
import pathlib
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
DRIVER = ("chromedriver",)
FLAGS = (
    "--headless",
    "--no-sandbox",  # it opens our own files only; in a container, and as root, there is no sandbox
    "--disable-dev-shm-usage",  # containers have little of it
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--window-size=1200,1000",
)
PATIENCE_SECONDS = 60  # for one change of the page; a loaded machine must not fail a test


def program(*names: str) -> str:
    """Returns the path of the first program that is there; fails the test, rather than skip it, where none is."""
    found = [path for name in names if (path := shutil.which(name))]
    if not found:
        pytest.fail(f"{names[0]}: not found; scripts/install_browser installs Chromium and its driver", pytrace=False)
    return found[0]


class Browser:
    """One page at a time, and what happened while it was open."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, path: pathlib.Path) -> None:
        """Opens a file, and waits until its curves are drawn."""
        self.errors()  # what an earlier page has left
        self.requests()
        self.driver.get(path.as_uri())
        self.wait("document.querySelectorAll('#curves .scatterlayer .trace').length > 0")

    def run(self, script: str, *given: Any) -> Any:
        """Returns the value of a JavaScript expression; `arguments` are those given."""
        return self.driver.execute_script(f"const page = document.getElementById('curves'); return {script}", *given)

    def wait(self, condition: str, *given: Any) -> None:
        """Waits until a JavaScript expression is true."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self.run(condition, *given):
            assert time.monotonic() < deadline, f"not within {PATIENCE_SECONDS} s: {condition}"
            time.sleep(0.1)

    def errors(self) -> list[str]:
        """Returns the lines of the console since the last call: warnings, errors, refused requests."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """Returns the addresses that were asked for since the last call."""
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        return [one["params"]["request"]["url"] for one in messages if one["method"] == "Network.requestWillBeSent"]


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """The browser of all tests."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = program(*CHROMIUM)
    for flag in FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    # Named, so that Selenium looks for no driver to download.
    service = webdriver.ChromeService(executable_path=program(*DRIVER))
    with webdriver.Chrome(options=options, service=service) as driver:  # quits at its end
        yield Browser(driver)


@pytest.fixture
def hover(browser: Browser) -> Callable[[float, float], Any]:
    """A function (right, up) -> chain of actions that has moved the mouse there, as shares of the first panel."""
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.by import By

    def at(right: float, up: float) -> Any:
        panel = browser.driver.find_element(By.CSS_SELECTOR, "#curves .draglayer .xy .nsewdrag")
        size = panel.size  # offsets count from the middle
        x, y = size["width"] * (right - 0.5), size["height"] * (0.5 - up)
        return ActionChains(browser.driver).move_to_element_with_offset(panel, int(x), int(y))

    return at


@pytest.fixture
def click(browser: Browser) -> Callable[[str, int], None]:
    """A function (selector, index) that clicks on an element of the page."""
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.by import By

    def on(selector: str, index: int) -> None:
        element = browser.driver.find_elements(By.CSS_SELECTOR, selector)[index]
        ActionChains(browser.driver).move_to_element(element).click().perform()

    return on
