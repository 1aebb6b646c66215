"""The page: whole, self-contained, and without plots where they cannot be drawn."""

from __future__ import annotations

import builtins
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import tiny
from moaspec.errors import DataError, InputError
from moaspec.evaluate import Parts, Prompt, Settings, measure, parse_methods
from moaspec.evaluate.cost import measure_costs
from moaspec.evaluate.cut import measure_cut
from moaspec.evaluate.html import page, write_page
from moaspec.evaluate.plots import draw_plots, scalable

PROMPTS = [Prompt("a", "1", ("5 9",), "x<y"), Prompt("b", "2", ("7 1",), "math")]


@pytest.fixture(scope="module")
def results() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    parts = Parts(target=tiny.target(), checkpoints={"moa": tiny.agreeing_drafter("llama")})
    methods = parse_methods(["plain", "moa@chain:3"], parts)

    def encode(turn: str) -> list[int]:
        return [int(word) for word in turn.split()]

    report = measure(
        methods, PROMPTS, lambda turns, _: encode(turns[0]), Settings(max_new_tokens=6, repeats=2)
    )
    costs = measure_costs(methods, contexts=(32, 64), batches=(1, 2), widths=(1, 2))
    cut = measure_cut(methods, PROMPTS, encode, after=3, max_new_tokens=6)
    facts = (report.as_json(), costs.as_json(), cut.as_json())
    return json.loads(json.dumps(facts))


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
        assert tag != "script"

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_needs_no_network(results: Any) -> None:
    facts, costs, cut = results
    text = page(facts, {"A plot": "<svg viewBox='0 0 1 1'></svg>"}, costs, cut)
    checker = Checker()
    checker.feed(text)
    assert checker.open == []
    assert checker.loads == ["data:,"]
    assert not re.search(r"https?://", text)
    for words in ("moa@chain:3", "the same", "A plot", "pays from tau", "Alone after 3", "x&lt;y"):
        assert words in text


def test_a_lossy_method_has_no_speedup(results: Any) -> None:
    facts = json.loads(json.dumps(results[0]))
    facts["methods"]["moa@chain:3"] |= {"lossless": False, "median_speedup": None}
    assert 'class="bad">lossy' in page(facts, {})


def test_without_matplotlib_the_error_says_what_to_do(
    results: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def missing(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(InputError, match=r"moaspec\[report\]"):
        draw_plots(results[0])


def test_every_plot_is_drawn(results: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    facts, costs, cut = results
    plots = draw_plots(facts, costs, cut)
    assert len(plots) == 9
    for title, svg in plots.items():
        root = ElementTree.fromstring(svg)
        assert root.get("aria-label") == title
        assert root.get("viewBox")
        assert root.get("width") is None
    assert "moa@chain:3" in plots["Tokens per round (tau)"]
    assert draw_plots({"methods": {}}) == {}
    for name, part in zip(("report", "costs", "cut"), results, strict=True):
        (tmp_path / f"{name}.json").write_text(json.dumps(part))
    assert write_page(tmp_path).read_text().count("<figure>") == 9


def test_a_plot_scales() -> None:
    svg = '<?xml version="1.0"?>\n<svg width="360pt" height="9pt" viewBox="0 0 1 1"><g/></svg>'
    expected = '<svg viewBox="0 0 1 1" role="img" aria-label="T"><g/></svg>'
    assert scalable(svg, "T") == expected


def test_a_directory_without_report(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="Cannot read the report"):
        write_page(tmp_path)
