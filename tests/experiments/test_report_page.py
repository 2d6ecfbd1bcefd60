"""The page in a real browser: quiet, alone, figures drawn, tables sorted, fit for a phone."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from airmoe.experiments.report import write_report
from tests.experiments.report_toys import write_drawn_suite

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
PLAYWRIGHT = importlib.util.find_spec("playwright") is not None
SORTED = [60.25, 62.0, 64.5]  # perplexities of the main table

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not PLAYWRIGHT, reason="playwright is missing: make test-browser"),
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt install chromium"),
]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    write_drawn_suite(folder / "main")
    write_report([folder], folder / "out")
    return folder / "out" / "report.html"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Visit:
    """The page as it opens, with everything it said and asked for."""

    def __init__(self, browser: Any, file: Path, width: int) -> None:
        self.messages: list[str] = []
        self.requests: list[str] = []
        self.page = browser.new_page(viewport={"width": width, "height": 900})
        self.page.on("console", lambda message: self.messages.append(message.text))
        self.page.on("pageerror", lambda error: self.messages.append(str(error)))
        self.page.route("**/*", lambda route: self._answer(route, file.as_uri()))
        self.page.goto(file.as_uri())

    def _answer(self, route: Any, allowed: str) -> None:
        if route.request.url == allowed:
            route.continue_()
        else:
            self.requests.append(route.request.url)
            route.abort()

    def column(self, index: int) -> list[float]:
        """Values of a column of the first table, top to bottom."""
        script = (
            "index => [...document.querySelector('table').tBodies[0].rows]"
            ".map(row => Number(row.cells[index].dataset.value))"
        )
        return self.page.evaluate(script, index)


@pytest.fixture(scope="module")
def desktop(browser: Any, file: Path) -> Visit:
    return Visit(browser, file, 1280)


@pytest.fixture(scope="module")
def phone(browser: Any, file: Path) -> Visit:
    return Visit(browser, file, 390)


def test_it_is_quiet_and_asks_for_nothing(desktop: Visit) -> None:
    desktop.page.wait_for_load_state("networkidle")
    assert desktop.messages == []
    assert desktop.requests == []


@pytest.mark.parametrize("visit", ["desktop", "phone"])
def test_figures_are_drawn(visit: str, request: pytest.FixtureRequest) -> None:
    page = request.getfixturevalue(visit).page
    boxes = [drawing.bounding_box() for drawing in page.query_selector_all("figure svg")]
    assert len(boxes) == 9
    assert all(box and box["width"] > 250 and box["height"] > 150 for box in boxes), boxes
    label = page.query_selector("figure [role=img]").get_attribute("aria-label")
    assert "AIR 62" in label


def test_a_click_sorts_and_another_turns_it_round(desktop: Visit) -> None:
    button = desktop.page.get_by_role("button", name="perplexity").first
    head = button.locator("..")
    assert head.get_attribute("aria-sort") == "none"
    button.click()
    assert head.get_attribute("aria-sort") == "ascending"
    assert desktop.column(2) == pytest.approx(SORTED)
    button.click()
    assert head.get_attribute("aria-sort") == "descending"
    assert desktop.column(2) == pytest.approx(SORTED[::-1])


def test_names_sort_as_words_and_missing_numbers_stay_last(desktop: Visit) -> None:
    page = desktop.page
    first = (
        "[...document.querySelector('table').tBodies[0].rows].map(row => row.cells[0].innerText)"
    )
    page.get_by_role("button", name="method").first.click()
    assert page.evaluate(first) == ["AIR", "Exact granular‡", "PEER"]
    overlap = page.get_by_role("button", name="overlap").first
    for _ in range(2):
        overlap.click()
        assert page.evaluate(first)[0] == "AIR"  # the only one that has a value


def test_a_phone_need_not_scroll_sideways(phone: Visit) -> None:
    width = phone.page.evaluate("document.documentElement.scrollWidth")
    assert width <= 390
    inside = phone.page.evaluate(
        "(() => { const box = document.querySelector('.scroll'); "
        "return [box.scrollWidth, box.clientWidth]; })()"
    )
    assert inside[0] > inside[1]  # the wide table scrolls in its own box


def test_paper_shows_everything(desktop: Visit, tmp_path: Path) -> None:
    page = desktop.page
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    folded = page.eval_on_selector_all("details:not([open])", "all => all.length")
    hidden = page.evaluate("getComputedStyle(document.querySelector('.scroll')).overflowX")
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    page.emulate_media(media="screen")
    assert (folded, hidden) == (0, "visible")
    assert page.eval_on_selector_all("details[open]", "all => all.length") == 0
