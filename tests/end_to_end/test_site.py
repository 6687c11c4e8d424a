"""A real browser opens the site from disk, with the network blocked."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "suite" / "report"))

from made_up_site import Built, build

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser

WIDE, NARROW = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
PAGES = ("index", "case", "arm", "failed")


@dataclass
class Visit:
    """An open page and what went wrong on it."""

    page: Page
    requests: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def check(self) -> None:
        assert [url for url in self.requests if not url.startswith("file://")] == []
        assert self.errors == []


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def paths(built: Built) -> dict[str, Path]:
    rows = built.store.runs()
    arm = next(row.key for row in rows if row.status == "ok" and row.fidelity == "emulated")
    failed = next(row.key for row in rows if row.status == "diverged")
    runs = built.site / "runs"
    return {
        "index": built.index,
        "case": built.case,
        "arm": runs / f"{arm}.html",
        "failed": runs / f"{failed}.html",
    }


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine; `apt-get install chromium` brings it")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"],
        )
        yield browser
        browser.close()


class Visitor:
    """Opens pages without a network; keeps a screenshot where the test then failed."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self.visits: list[Visit] = []

    def open(self, path: Path, size: dict[str, int] = WIDE, **options: Any) -> Visit:
        context = self._browser.new_context(viewport=size, **options)
        context.set_offline(True)
        context.route(
            "**/*",
            lambda route: route.continue_() if route.request.url.startswith("file://") else route.abort(),
        )
        visit = Visit(context.new_page())
        visit.page.on("request", lambda request: visit.requests.append(request.url))
        visit.page.on(
            "console", lambda message: visit.errors.append(message.text) if message.type == "error" else None
        )
        visit.page.on("pageerror", lambda error: visit.errors.append(str(error)))
        visit.page.goto(path.as_uri())
        self.visits.append(visit)
        return visit


@pytest.fixture
def visitor(browser: Browser, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Visitor]:
    visitor = Visitor(browser)
    failed_before = request.session.testsfailed
    yield visitor
    for number, visit in enumerate(visitor.visits):
        if request.session.testsfailed > failed_before:
            visit.page.screenshot(path=tmp_path / f"page-{number}.png", full_page=True)
        visit.page.context.close()


@pytest.mark.parametrize("name", PAGES)
def test_pages_open_from_disk_without_the_network(
    name: str, paths: dict[str, Path], visitor: Visitor
) -> None:
    for size in (WIDE, NARROW):
        visit = visitor.open(paths[name], size)
        _scroll_through(visit.page)
        visit.check()
        assert visit.page.evaluate("document.documentElement.scrollWidth") <= size["width"], (
            "the page scrolls sideways"
        )
        assert visit.page.evaluate("getComputedStyle(document.body).maxWidth") != "none", (
            "the style sheet did not load"
        )


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
def test_no_serious_accessibility_mistakes(
    name: str, scheme: str, paths: dict[str, Path], visitor: Visitor
) -> None:
    from axe_playwright_python.sync_playwright import Axe

    for size in (WIDE, NARROW):
        page = visitor.open(paths[name], size, color_scheme=scheme, reduced_motion="reduce").page
        page.evaluate("document.querySelectorAll('details').forEach((d) => (d.open = true))")
        _scroll_through(page)
        violations = Axe().run(page).response["violations"]
        bad = [
            f"{v['id']}: {v['help']}: {v['nodes'][0]['html'][:120]} ({len(v['nodes'])} places)"
            for v in violations
            if v["impact"] in ("serious", "critical")
        ]
        assert bad == []


def test_the_content_security_policy_holds(paths: dict[str, Path], visitor: Visitor) -> None:
    visit = visitor.open(paths["index"])
    refused: list[str | None] = []
    visit.page.on("requestfailed", lambda request: refused.append(request.failure))
    loaded = visit.page.evaluate(
        """() => new Promise((done) => {
            const image = new Image();
            image.onload = () => done("loaded");
            image.onerror = () => done("refused");
            image.src = "https://example.org/x.png";
        })"""
    )
    assert loaded == "refused"
    assert refused == ["csp"], "refused by the policy before the blocked network had a say"


def test_without_scripts_all_is_there(paths: dict[str, Path], visitor: Visitor) -> None:
    page = visitor.open(paths["case"], java_script_enabled=False).page
    assert page.locator("figure.chart svg.plot").count() >= 12
    assert page.locator("svg.plot").first.is_visible()
    assert not page.locator(".toolbar").first.is_visible()
    assert not page.locator(".copy").first.is_visible()
    page.locator("figure.chart summary").first.click()
    assert page.locator("figure.chart table").first.is_visible()


def test_a_drag_zooms_and_a_double_click_goes_back(paths: dict[str, Path], visitor: Visitor) -> None:
    visit = visitor.open(paths["case"])
    figure = visit.page.locator("figure.chart").first
    figure.scroll_into_view_if_needed()
    plot = figure.locator(".u-over")
    plot.wait_for()
    assert not figure.locator("svg.plot").is_visible()
    assert _step_at(visit.page, figure, 0.02) <= 2
    box = plot.bounding_box()
    assert box is not None
    middle = box["y"] + box["height"] / 2
    visit.page.mouse.move(box["x"] + 0.5 * box["width"], middle)
    visit.page.mouse.down()
    visit.page.mouse.move(box["x"] + 0.9 * box["width"], middle, steps=5)
    visit.page.mouse.up()
    assert 18 <= _step_at(visit.page, figure, 0.02) <= 24
    other = visit.page.locator("figure.chart").nth(1)
    other.scroll_into_view_if_needed()
    assert 18 <= _step_at(visit.page, other, 0.02) <= 24, "charts of a group zoom together"
    plot.dblclick()
    assert _step_at(visit.page, figure, 0.02) <= 2
    visit.check()


def test_the_toolbar_zooms_by_keyboard(paths: dict[str, Path], visitor: Visitor) -> None:
    visit = visitor.open(paths["arm"])
    figure = visit.page.locator("figure.chart").first
    figure.locator(".u-over").wait_for()
    group = visit.page.locator(".chart-group").first
    group.get_by_role("button", name="Zoom in").press("Enter")
    assert _step_at(visit.page, figure, 0.02) > 5
    group.get_by_role("button", name="Later steps").press("Enter")
    assert _step_at(visit.page, figure, 0.02) > 12
    group.get_by_role("button", name="Show all steps").press("Enter")
    assert _step_at(visit.page, figure, 0.02) <= 2
    visit.check()


def test_the_legend_switches_series(paths: dict[str, Path], visitor: Visitor) -> None:
    visit = visitor.open(paths["case"])
    group = visit.page.locator(".chart-group").first
    group.scroll_into_view_if_needed()
    group.locator(".u-over").first.wait_for()
    button = group.get_by_role("button", name="fp8-delayed · swiglu", exact=True)
    assert button.get_attribute("aria-pressed") == "true"
    before = _ink(visit.page)
    button.press("Space")
    assert button.get_attribute("aria-pressed") == "false"
    assert _ink(visit.page) < before, "the line is gone from the canvas"
    button.press("Space")
    assert _ink(visit.page) == before
    visit.check()


def test_tables_sort_by_their_headings(paths: dict[str, Path], visitor: Visitor) -> None:
    visit = visitor.open(paths["case"])
    table = visit.page.get_by_role("region", name="Cost of emulation").locator("table")
    heading = table.get_by_role("button", name="Emulated step, ms")

    def column() -> list[float]:
        return [float(text) for text in table.locator("tbody td:nth-child(2)").all_inner_texts()]

    heading.press("Enter")
    assert column() == sorted(column())
    heading.press("Enter")
    assert column() == sorted(column(), reverse=True)
    assert table.locator("th[aria-sort=descending]").count() == 1
    visit.check()


def test_charts_follow_the_colour_scheme_and_the_width(paths: dict[str, Path], visitor: Visitor) -> None:
    visit = visitor.open(paths["arm"])
    figure = visit.page.locator("figure.chart").first
    figure.locator(".u-over").wait_for()
    visit.page.emulate_media(color_scheme="dark")
    figure.locator(".u-over").wait_for()
    visit.page.set_viewport_size(NARROW)
    visit.page.wait_for_function("document.querySelector('.uplot').clientWidth <= 390")
    visit.check()


def _scroll_through(page: Page) -> None:
    """Charts are built when they come near the screen: bring each near once."""
    height = page.evaluate("document.documentElement.scrollHeight")
    for top in range(0, height, 700):
        page.evaluate(f"window.scrollTo({{top: {top}, behavior: 'instant'}})")
        page.wait_for_timeout(20)


def _step_at(page: Page, figure: Any, share: float) -> int:
    """The step under the pointer at a share of the plot's width."""
    plot = figure.locator(".u-over")
    box = plot.bounding_box()
    plot.hover(position={"x": box["width"] * share, "y": box["height"] / 3})
    figure.locator(".readout", has_text="step").wait_for()
    text = figure.locator(".readout").inner_text()
    return int(text.removeprefix("step ").split(" ")[0])


def _ink(page: Page) -> int:
    """How many pixels of the first canvas are not empty."""
    return page.evaluate(
        """() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => {
            const canvas = document.querySelector(".uplot canvas");
            const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
            let count = 0;
            for (let i = 3; i < data.length; i += 4) if (data[i]) count++;
            done(count);
        })))"""
    )
