"""The page in a browser: colours, a cut link, keyboard, errors, accessibility."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import browsing
import serving
import storyteller
from browsing import PHONE, Visit
from moaspec.decode import Shaping, parse_shape
from moaspec.remote import (
    InProcessTransport,
    LinkOptions,
    LocalDevice,
    RemoteOptions,
    TargetService,
)
from moaspec.remote.emulation import Faults, Link, ShapedTransport
from moaspec.serve.desk import ServeSettings
from moaspec.serve.edge import EdgeSource
from moaspec.serve.guard import Guarded
from moaspec.serve.local import LocalSource
from serving import Served
from storyteller import ANSWER, QUESTION

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.browser

LINK = Link(name="slow", delay_s=0.04)
"""Slow enough that there is time to cut it, quick enough for a test."""
DONE = "document.querySelector('#send').textContent === 'Send'"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing.chromium() as running:
        yield running


def local_source() -> LocalSource:
    shaping = Shaping(parse_shape("tree:3x3x6"), free_branches=True)
    return LocalSource(
        storyteller.target(), storyteller.drafter(), name=serving.MODEL, shaping=shaping
    )


@pytest.fixture(scope="module")
def local(browser: Browser) -> Iterator[Served]:  # noqa: ARG001 - skips without one
    with serving.serving(local_source()) as served:
        yield served


@pytest.fixture(scope="module")
def edge(browser: Browser) -> Iterator[Served]:  # noqa: ARG001 - skips without one
    target, drafter, faults = storyteller.target(), storyteller.drafter(), Faults()
    quick = LinkOptions(heartbeat_s=0.1, dead_after_s=1.0, backoff_s=0.05, max_backoff_s=0.1)
    source = EdgeSource(
        LocalDevice(target, drafter),
        ShapedTransport(InProcessTransport(TargetService(target, drafter)), LINK, faults),
        name=serving.MODEL,
        options=RemoteOptions(link=quick, draft="tree:2x2x3"),
        faults=faults,
    )
    with serving.serving(source) as served:
        yield served


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return browsing.screenshots(tmp_path_factory.mktemp("screenshots"))


def ask(visited: Visit, question: str = QUESTION) -> None:
    visited.page.fill("#message", question)
    visited.page.press("#message", "Enter")


def violations(visited: Visit) -> list[str]:
    """What axe-core finds wrong, with where."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    found = axe.run(visited.page).response["violations"]
    return [f"{one['id']}: {node['html']}" for one in found for node in one["nodes"]]


def test_tokens_stream_coloured_by_source(browser: Browser, local: Served) -> None:
    with browsing.visit(browser, local.url) as visited:
        ask(visited)
        visited.shows("document.querySelectorAll('.token.draft').length > 3")
        visited.shows(DONE)
        assert visited.text(".answer .text") == ANSWER
        assert visited.count(".answer .target") > 3
        colours = {
            visited.page.eval_on_selector(
                f".answer .{kind} .ink",
                "one => getComputedStyle(one).color + getComputedStyle(one).textDecorationLine",
            )
            for kind in ("draft", "target")
        }
        assert len(colours) == 2
        assert float(visited.text("#tau")) > 1
        assert float(visited.text("#speed")) > 0
        assert visited.count("#tree g.draft") > 0
        visited.page.focus("#round")
        visited.page.keyboard.press("Home")
        assert visited.text("#round-said").startswith("Pass 1: ")
        # Whole sentences are spoken, and all of the text.
        spoken = visited.page.locator("#spoken p").all_text_contents()
        assert " ".join(spoken) == " ".join(ANSWER.split())
        assert len(spoken) < 10
        assert not visited.complaints


def test_plain_decoding_beside(browser: Browser, local: Served, pictures: Path) -> None:
    with browsing.visit(browser, local.url) as visited:
        visited.page.check("#compare")
        ask(visited)
        visited.shows("document.querySelector('.verdict') !== null")
        texts = visited.page.locator(".answer .text").all_text_contents()
        assert texts == [ANSWER, ANSWER]
        assert "same text" in visited.text(".verdict")
        assert "tau 1.00" in visited.page.locator(".speed").all_text_contents()[1]
        visited.page.screenshot(path=pictures / "compare.png")
        assert not visited.complaints


def test_through_a_cut(browser: Browser, edge: Served, pictures: Path) -> None:
    with browsing.visit(browser, edge.url) as visited:
        ask(visited)
        visited.shows("document.querySelectorAll('.token').length > 15")
        visited.page.click("#cut")
        # No more than a few can be asked for: by itself the drafter may see an end soon.
        visited.shows("document.querySelectorAll('.tail .provisional').length > 3")
        visited.shows("document.querySelector('#link-state').dataset.state === 'down'")
        assert visited.page.get_attribute("#cut", "aria-checked") == "false"
        visited.page.screenshot(path=pictures / "edge-cut.png")
        visited.page.click("#cut")
        visited.shows("document.querySelectorAll('.token.corrected').length > 0")
        visited.shows(DONE)
        assert visited.text(".answer .text") == ANSWER
        # On a busy machine the link may seem dead once more.
        assert "taken back" in visited.text(".correction >> nth=0")
        assert visited.text(".correction del >> nth=0")
        assert any(
            "provisional" in line for line in visited.page.locator("#spoken p").all_text_contents()
        )
        visited.page.screenshot(path=pictures / "edge-restored.png")
        assert not violations(visited)
        assert not visited.complaints


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", ["desktop", "phone"])
def test_looks(browser: Browser, edge: Served, pictures: Path, *, size: str, scheme: str) -> None:
    """Pictures for people, and everything that axe-core can tell."""
    shape = PHONE if size == "phone" else None
    with browsing.visit(browser, edge.url, size=shape, scheme=scheme) as visited:
        visited.shows("document.querySelector('#where').textContent !== ''")
        visited.page.screenshot(path=pictures / f"empty-{size}-{scheme}.png")
        assert not violations(visited)
        visited.page.eval_on_selector("#max-tokens", "one => { one.value = 72; }")
        ask(visited)
        visited.shows(DONE)
        visited.page.screenshot(path=pictures / f"answer-{size}-{scheme}.png")
        if size == "phone":
            visited.page.click("summary")
            visited.page.screenshot(path=pictures / f"figures-{size}-{scheme}.png")
        assert visited.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert not violations(visited)
        assert not visited.complaints


def test_keyboard(browser: Browser, edge: Served) -> None:
    with browsing.visit(browser, edge.url) as visited:
        page = visited.page
        visited.shows("document.querySelector('#where').textContent !== ''")
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "message"
        page.keyboard.type("Why")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("not?")
        assert page.input_value("#message") == "Why\nnot?"
        page.keyboard.press("Enter")
        visited.shows("document.querySelectorAll('.token').length > 3")
        page.keyboard.press("Escape")
        visited.shows(DONE)
        assert "Stopped." in visited.text(".answer")
        assert page.evaluate("document.activeElement.id") == "message"
        assert not visited.complaints


def test_theme_button_is_remembered(browser: Browser, local: Served) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    with browsing.visit(browser, local.url) as visited:
        light = visited.page.evaluate(background)
        visited.page.click("#theme")
        dark = visited.page.evaluate(background)
        assert dark != light
        visited.page.reload()
        assert visited.page.evaluate(background) == dark


def test_errors_in_words(browser: Browser) -> None:
    settings = ServeSettings(guarded=Guarded(api_keys=("right",)))
    with (
        serving.serving(local_source(), settings) as served,
        browsing.visit(browser, served.url) as visited,
    ):
        page = visited.page
        visited.shows("!document.querySelector('#key-form').hidden")
        assert "wants an API key" in visited.text("#trouble")
        assert not violations(visited)
        page.fill("#key", "right")
        page.keyboard.press("Enter")
        visited.shows("document.querySelector('#key-form').hidden")
        assert not visited.text("#trouble")
        page.fill("#max-tokens", "0")
        page.route("**/v1/chat/completions", lambda route: route.abort())
        ask(visited)
        visited.shows("!document.querySelector('#trouble').hidden")
        assert "cannot be reached" in visited.text("#trouble")
        assert page.input_value("#message") == QUESTION
        page.unroute("**/v1/chat/completions")
        page.fill("#temperature", "9")
        ask(visited)
        visited.shows("document.querySelector('#trouble').textContent.includes('temperature')")


def test_streams_are_read_whatever_their_pieces(browser: Browser, local: Served) -> None:
    with browsing.visit(browser, local.url) as visited:
        found = visited.module("events.js", "m.split(a)", 'data: {"a":1}\r\n\r\n: hi\n\ndata: [D')
        assert found == {"events": ['{"a":1}'], "rest": "data: [D"}
        read = """(async () => {
            const bytes = new TextEncoder().encode('data: "ü"\\n\\ndata: [DONE]\\n\\n');
            const stream = new ReadableStream({ start(to) {
                bytes.forEach((byte) => to.enqueue(Uint8Array.of(byte)));
                to.close();
            } });
            const found = [];
            for await (const one of m.read(stream)) found.push(one);
            return found;
        })()"""
        assert visited.module("events.js", read) == ["ü"]


def test_trees_are_laid_out_with_the_accepted_path_on_top(browser: Browser, local: Served) -> None:
    #   -1 ─ 0 ─ 2 (refused)      accepted: 1, 3
    #    └── 1 ─ 3
    #         └─ 4
    nodes = [
        {"parent": parent, "accepted": accepted, "text": "x", "source": "draft"}
        for parent, accepted in [(-1, False), (-1, True), (0, False), (1, True), (1, False)]
    ]
    with browsing.visit(browser, local.url) as visited:
        found = visited.module("tree.js", "m.layout(a)", nodes)
        assert [(one["depth"], one["row"]) for one in found["places"]] == [
            (1, 2),
            (1, 0),
            (2, 2),
            (2, 0),
            (2, 1),
        ]
        assert (found["rows"], found["depth"]) == (3, 2)
        empty = visited.module("tree.js", "m.layout([])")
        assert (empty["rows"], empty["depth"]) == (1, 0)
        assert visited.module("tree.js", "m.label(a)", " tremendous\n") == "␣tremen…"


def test_verdicts_and_sentences(browser: Browser, local: Served) -> None:
    with browsing.visit(browser, local.url) as visited:
        differ = "m.firstDifference(...a)"
        assert visited.module("compare.js", differ, [[1, 2], [1, 2]]) == -1
        assert visited.module("compare.js", differ, [[1, 2], [1, 3]]) == 1
        assert visited.module("compare.js", differ, [[1, 2], [1]]) == 1
        found = visited.module("spoken.js", "m.sentences(a)", "One. Two 1.5 is (two.) Thr")
        assert found == {"whole": "One. Two 1.5 is (two.)", "rest": "Thr"}
        assert visited.module("panel.js", "a.map(m.bytes)", [0, 999, 1500, 2e6]) == [
            "0 B",
            "999 B",
            "1.5 kB",
            "2.0 MB",
        ]
