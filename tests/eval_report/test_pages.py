"""The page: whole, self-contained, and without plots where they cannot be drawn."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import browsing
import tiny
from eval_report.pages import BEGIN, END, page, write_markdown, write_page
from eval_report.plots import draw_plots, scalable
from eval_studies.cut_quality import measure_cut
from eval_studies.pass_costs import measure_costs
from moaspec.evaluate.method_names import MethodResources, parse_methods
from moaspec.evaluate.prompt_suites import Prompt
from moaspec.evaluate.runner import EvalSettings, measure
from moaspec_core.errors import DataError, InputError

SETTINGS = {"model": "tiny", "dtype": "float32"}
PROMPTS = [Prompt("a", "1", ("5 9",), "x<y"), Prompt("b", "2", ("7 1",), "math")]


@pytest.fixture(scope="module")
def results() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    parts = MethodResources(
        target=tiny.target(), checkpoints={"moa": tiny.agreeing_drafter("llama")}
    )
    methods = parse_methods(["plain", "moa@chain:3"], parts)

    def encode(turn: str) -> list[int]:
        return [int(word) for word in turn.split()]

    report = measure(
        methods,
        PROMPTS,
        lambda turns, _: encode(turns[0]),
        EvalSettings(max_new_tokens=6, repeats=2),
    )
    costs = measure_costs(methods, contexts=(32, 64), batches=(1, 2), widths=(1, 2))
    cut = measure_cut(methods, PROMPTS, encode, after=3, max_new_tokens=6)
    values = (report.as_json(), costs.as_json(), cut.as_json())
    return json.loads(json.dumps([{**one, "settings": SETTINGS} for one in values]))


def written(results: Any, directory: Path) -> Path:
    """A directory as `moaspec eval --out` leaves it."""
    for name, part in zip(("report", "costs", "cut"), results, strict=True):
        (directory / f"{name}.json").write_text(json.dumps(part))
    return directory


class Checker(HTMLParser):
    """Notes what a page would load, and whether its tags close."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in {"meta", "link", "br"}:
            self.open.append(tag)
        self.loads += [v or "" for k, v in attrs if k in {"src", "href"}]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.slow
def test_the_page_is_whole_and_needs_no_network(results: Any) -> None:
    values, costs, cut = results
    text = page(values, {"A plot": "<svg viewBox='0 0 1 1'></svg>"}, costs, cut)
    checker = Checker()
    checker.feed(text)
    assert checker.open == []
    assert checker.loads == ["data:,"]
    assert not re.search(r"https?://", text)
    for words in (
        "moa@chain:3",
        "the target's",
        "A plot",
        "pays from tau",
        "Alone after 3",
        "x&lt;y",
        "moaspec eval",
        "Each prompt",
    ):
        assert words in text


@pytest.mark.slow
def test_a_lossy_method_has_no_speedup(results: Any) -> None:
    values = json.loads(json.dumps(results[0]))
    values["methods"]["moa@chain:3"] |= {"lossless": False, "median_speedup": None}
    assert 'class="bad">lossy' in page(values, {})


def test_without_matplotlib_the_error_says_what_to_do(
    results: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match="install matplotlib"):
        draw_plots(results[0])


@pytest.mark.slow
def test_every_plot_is_drawn(results: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    values, costs, cut = results
    plots = draw_plots(values, costs, cut)
    assert len(plots) == 9
    for title, svg in plots.items():
        root = ElementTree.fromstring(svg)
        assert root.get("aria-label") == title
        assert root.get("viewBox")
        assert root.get("width") is None
    assert "moa@chain:3" in plots["Tokens per round (tau)"]
    assert draw_plots({"methods": {}}) == {}
    assert write_page(written(results, tmp_path)).read_text().count("<figure>") == 9


@pytest.mark.slow
def test_what_was_measured_with_other_settings_is_not_on_the_page(
    results: Any, tmp_path: Path
) -> None:
    directory = written(results, tmp_path)
    other = {**results[2], "settings": {**SETTINGS, "dtype": "bfloat16"}}
    (directory / "cut.json").write_text(json.dumps(other))
    text = write_page(directory).read_text()
    assert "Alone after" not in text
    assert "pays from tau" in text


@pytest.mark.parametrize("name", ["costs.json", "cut.json"])
@pytest.mark.parametrize("text", ["{", "[]", "{}", "[" * 99_999], ids=len)
def test_damaged_files_beside_a_report(name: str, text: str, results: Any, tmp_path: Path) -> None:
    (written(results, tmp_path) / name).write_text(text)
    with pytest.raises(DataError, match=f"{name} is damaged"):
        write_page(tmp_path)


@pytest.mark.slow
def test_names_with_dollar_signs(results: Any) -> None:
    """They are not read as formulas."""
    pytest.importorskip("matplotlib")
    values = json.loads(json.dumps(results[0]).replace('"a"', '"a$x_{$|b"'))
    assert "a$x_{$|b" in draw_plots(values)["Tokens per round (tau)"]


def test_a_plot_scales() -> None:
    svg = '<?xml version="1.0"?>\n<svg width="360pt" height="9pt" viewBox="0 0 1 1"><g/></svg>'
    expected = '<svg viewBox="0 0 1 1" role="img" aria-label="T"><g/></svg>'
    assert scalable(svg, "T") == expected


def test_a_directory_without_report(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="Cannot read the report"):
        write_page(tmp_path)


def test_markdown_in_no_directory(results: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no directory"):
        write_markdown(written(results, tmp_path), tmp_path / "typo" / "README.md")
    assert not (tmp_path / "typo").exists()


@pytest.mark.slow
def test_markdown(results: Any, tmp_path: Path) -> None:
    """A page of its own has everything; a README keeps what is around its markers."""
    pytest.importorskip("matplotlib")
    (tmp_path / "docs").mkdir()
    readme, whole = tmp_path / "README.md", tmp_path / "docs" / "results.md"
    readme.write_text(f"# Title\n\n{BEGIN}\nold\n{END}\n\nThe end.\n")
    for path in (readme, whole, readme):
        write_markdown(written(results, tmp_path), path)
    text = readme.read_text()
    assert text.startswith(f"# Title\n\n{BEGIN}\ntiny-llama, float32")
    assert text.endswith(f"{END}\n\nThe end.\n")
    assert "old" not in text
    assert "| `moa@chain:3` |" in text
    for path, number in ((readme, 2), (whole, 9)):
        shown = re.findall(r"\]\((.*?)\)", path.read_text())
        assert len(shown) == number
        for name in shown:
            ElementTree.fromstring((path.parent / name).read_text())
    assert "| tau | a | b |" in whole.read_text()
    values = json.loads(json.dumps(results[0]))
    values["methods"]["moa@chain:3"] |= {"lossless": False, "median_speedup": None}
    (tmp_path / "report.json").write_text(json.dumps(values))
    write_markdown(tmp_path, readme)
    assert "|  | " in readme.read_text().split("moa@chain:3")[1].splitlines()[0]
    assert "**lossy**" in readme.read_text()


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
QUIET = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)


@pytest.fixture
def tab() -> Iterator[Any]:
    """A tab that notes complaints, and requests for anything but files, in `complaints`."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=list(QUIET))
        opened = browser.new_page()
        opened.set_default_timeout(browsing.TIMEOUT_MS)
        opened.complaints = []
        opened.on("console", lambda message: opened.complaints.append(message.text))
        opened.on("pageerror", lambda error: opened.complaints.append(str(error)))
        opened.on(
            "request",
            lambda request: (
                opened.complaints.append(request.url)
                if not request.url.startswith(("file:", "data:"))
                else None
            ),
        )
        yield opened
        browser.close()


DRAWN = """figures => figures.map(figure => ({
    title: figure.querySelector("figcaption").textContent,
    width: figure.querySelector("svg").getBoundingClientRect().width,
    height: figure.querySelector("svg").getBoundingClientRect().height,
    shapes: figure.querySelectorAll("svg path, svg use").length,
    text: Math.min(...[...figure.querySelectorAll("svg text")].map(
        text => text.getBoundingClientRect().height)),
}))"""


def boxed(element: Any) -> Any:
    return element.bounding_box()


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_in_a_browser(width: int, results: Any, tmp_path: Path, tab: Any) -> None:
    """Every plot is drawn and its text legible, at the width of a desk and of a phone."""
    pytest.importorskip("matplotlib")
    tab.set_viewport_size({"width": width, "height": 844})
    tab.goto(write_page(written(results, tmp_path)).as_uri())
    figures = tab.locator("figure").evaluate_all(DRAWN)
    assert len(figures) == 9
    for figure in figures:
        assert 300 < figure["width"] <= width
        assert figure["height"] > 100
        assert figure["shapes"] > 10
        # Pixels: type of nine points, a little less on a phone.
        assert figure["text"] >= 8
    verdicts = tab.locator("table").first.locator("td:nth-child(2)")
    assert set(verdicts.all_text_contents()) == {"the target's"}
    assert all(box["x"] + box["width"] <= width for box in map(boxed, verdicts.all()))
    heads = tab.locator("#prompts th button")
    first = tab.locator("#prompts tbody td:first-child")
    before = first.all_text_contents()
    heads.first.click()
    heads.first.click()
    assert first.all_text_contents() == sorted(before, reverse=True)
    assert tab.locator("[aria-sort]").count() == 1
    # Wide tables scroll by themselves; the page does not.
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.complaints == []


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_for_everybody(
    width: int, scheme: str, results: Any, tmp_path: Path, tab: Any
) -> None:
    """What axe-core can tell, in both schemes; the picture is for people."""
    pytest.importorskip("matplotlib")
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    tab.set_viewport_size({"width": width, "height": 844})
    tab.emulate_media(color_scheme=scheme)
    tab.goto(write_page(written(results, tmp_path)).as_uri())
    found = axe.run(tab).response["violations"]
    assert [(one["id"], node["html"]) for one in found for node in one["nodes"]] == []
    picture = browsing.screenshots(tmp_path) / f"report-{width}-{scheme}.png"
    tab.screenshot(path=picture, full_page=True)
    assert tab.complaints == []
