"""The page in a browser: colours, a cut link, keyboard, errors, accessibility."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import browsing
import memorised_target
import serving
from browsing import PHONE
from chatpage import CHAT, DONE, answering, ask, asked, local_source, painted, raw_text, violations
from edges import PausedTransport
from memorised_target import ANSWER, QUESTION
from moaspec_edge.device.local_parts import LocalDevice
from moaspec_edge.device.remote_session import RemoteOptions
from moaspec_edge.emulation import Faults, LinkProfile, ShapedTransport
from moaspec_edge.http.edge_source import EdgeSource
from moaspec_edge.server.service import TargetService
from moaspec_serve.guard import GuardSettings
from moaspec_serve.server_context import ServeSettings
from serving import Served

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Request

pytestmark = pytest.mark.browser

LINK = LinkProfile(name="slow", delay_s=0.04)
"""Longer than a round of the drafter."""

HELD = 20
"""Tokens of an answer, over 60 characters, at which a test may hold it."""


@pytest.fixture(scope="module")
def transport() -> PausedTransport:
    target, drafter = memorised_target.target(), memorised_target.drafter()
    return PausedTransport(TargetService(target, drafter))


@pytest.fixture(scope="module")
def edge(browser: Browser, transport: PausedTransport) -> Iterator[Served]:  # noqa: ARG001 - skips
    target, drafter, faults = memorised_target.target(), memorised_target.drafter(), Faults()
    source = EdgeSource(
        LocalDevice(target, drafter),
        ShapedTransport(transport, LINK, faults),
        name=serving.MODEL,
        options=RemoteOptions(draft="tree:2x2x3"),
        faults=faults,
    )
    with serving.serving(source) as served:
        yield served


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return browsing.screenshots(tmp_path_factory.mktemp("screenshots"))


def test_tokens_stream_coloured_by_source(browser: Browser, local: Served) -> None:
    with browsing.visit(browser, local.url) as visited:
        ask(visited)
        visited.shows("CSS.highlights.get('draft').size > 3")
        visited.shows(DONE)
        assert raw_text(visited) == ANSWER
        # The tokens of the last pass's tree are coloured at the end of the text.
        assert visited.text(".answer .text").split() == ANSWER.split()
        words = painted(visited)
        assert words["draft"]
        assert len(words["draft"].split()) < len(ANSWER.split())
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


def test_colours_can_be_switched_off(browser: Browser, local: Served) -> None:
    with browsing.visit(browser, local.url) as visited:
        asked(visited)
        visited.page.click("#show-settings")
        visited.page.uncheck("#colours")
        assert painted(visited) == {}
        visited.page.reload()
        visited.shows("document.querySelectorAll('.reply').length === 1")
        assert painted(visited) == {}
        assert visited.page.is_hidden("#legend")
        visited.page.click("#show-settings")
        visited.page.check("#colours")
        assert painted(visited)["draft"]


def test_plain_decoding_beside(browser: Browser, local: Served, pictures: Path) -> None:
    with browsing.visit(browser, local.url) as visited:
        visited.page.check("#compare")
        speculated: list[bool] = []

        def note(request: Request) -> None:
            if request.url.endswith("completions"):
                speculated.append((request.post_data_json or {})["moaspec"]["speculation"])

        visited.page.on("request", note)
        asked(visited)
        visited.shows("document.querySelector('.verdict') !== null")
        texts = visited.page.locator(".answer .text").all_text_contents()
        assert [text.split() for text in texts] == [ANSWER.split(), ANSWER.split()]
        assert "Same text" in visited.text(".verdict")
        assert "passes of the model instead of" in visited.text(".verdict")
        assert "1.00 a pass" in visited.page.locator(".speed").all_text_contents()[1]
        assert speculated == [True, False]
        visited.page.screenshot(path=pictures / "compare.png")
        assert not violations(visited)
        # A reload shows both, and the verdict.
        said = visited.text(".verdict")
        visited.page.reload()
        visited.shows("document.querySelector('.verdict') !== null")
        assert visited.text(".verdict") == said
        assert visited.count(".answer") == 2
        assert not visited.complaints


def test_the_race_is_run_where_things_may_move(browser: Browser, local: Served) -> None:
    with browsing.visit(browser, local.url) as visited:
        visited.page.emulate_media(reduced_motion="no-preference")
        visited.page.evaluate(
            "() => new MutationObserver(() => {"
            " window.lanes ||= document.querySelectorAll('progress.lane').length === 2;"
            " }).observe(document.querySelector('#log'), { childList: true, subtree: true })"
        )
        visited.page.check("#compare")
        ask(visited)
        visited.shows("window.lanes")
        visited.page.click("#send")  # which now skips it
        visited.shows(DONE)
        texts = visited.page.locator(".answer .text").all_text_contents()
        assert [text.split() for text in texts] == [ANSWER.split(), ANSWER.split()]
        assert visited.count("progress.lane") == 0
        assert visited.count(".verdict") == 1
        record = [{"at": 5}, {"at": 15}, {"at": 40}]
        assert [visited.module("race.js", "m.arrived(...a)", [record, t]) for t in (0, 10, 99)] == [
            1,
            2,
            3,
        ]


def test_through_a_cut(
    browser: Browser, edge: Served, transport: PausedTransport, pictures: Path
) -> None:
    with browsing.visit(browser, edge.url) as visited:
        with transport.holding(HELD, QUESTION):
            ask(visited)
            visited.shows("document.querySelector('.answer .text').textContent.length > 60")
            visited.page.click("#cut")
            # No more than a few can be asked for: by itself the drafter may see an end soon.
            visited.shows("CSS.highlights.get('provisional').size > 3")
        visited.shows("document.querySelector('#link-state').dataset.state === 'down'")
        assert visited.page.get_attribute("#cut", "aria-checked") == "false"
        visited.page.screenshot(path=pictures / "edge-cut.png")
        visited.page.click("#cut")
        visited.shows("CSS.highlights.get('corrected').size > 0")
        visited.shows(DONE)
        assert raw_text(visited) == ANSWER
        assert not painted(visited)["provisional"]
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
        asked(visited)
        visited.page.screenshot(path=pictures / f"answer-{size}-{scheme}.png")
        assert not violations(visited)
        for name in ("history", "settings"):
            visited.page.click(f"#show-{name}")
            visited.page.screenshot(path=pictures / f"{name}-{size}-{scheme}.png")
            assert not violations(visited), name
            visited.page.click(f"#close-{name}")
        assert visited.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert not visited.complaints


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_long_conversations_look_well(
    browser: Browser, local: Served, pictures: Path, scheme: str
) -> None:
    with browsing.visit(browser, local.url, scheme=scheme) as visited:
        with answering(visited, RICH):
            for number in range(8):
                asked(visited, f"Question {number}", answers=number + 1)
        visited.shows(AT_END)
        visited.page.screenshot(path=pictures / f"long-{scheme}.png")
        assert not violations(visited)
        assert not visited.complaints


RICH = """# Title

**Bold**, *slanted*, ~~gone~~, `code` and [a link](https://example.org).

1. One
2. Two
   - nested

```python
print("a line that is longer than a phone is wide, so that it has to be scrolled by itself")
```

### Table

| a | b |
|---|--:|
| 1 | 2 |

> quoted
"""
AT_END = """(() => { const log = document.querySelector('#log');
    return log.scrollHeight - log.scrollTop - log.clientHeight < 2; })()"""
SHARE = """(() => { const log = document.querySelector('#log').getBoundingClientRect();
    const ask = document.querySelector('#ask').getBoundingClientRect();
    const seen = Math.min(log.bottom, ask.top, visualViewport.height) - log.top;
    return [seen / visualViewport.height, ask.bottom <= visualViewport.height]; })()"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone_the_answer_stays_in_view(
    browser: Browser, local: Served, pictures: Path, scheme: str
) -> None:
    """With the figures open, and with a keyboard, whether it shrinks the page or covers it."""
    with browsing.visit(browser, local.url, size=PHONE, scheme=scheme) as visited:
        asked(visited)
        visited.page.click("summary")
        share, whole = visited.page.evaluate(SHARE)
        assert share > 0.35
        assert whole
        visited.page.screenshot(path=pictures / f"figures-phone-{scheme}.png")
        assert not violations(visited)
        visited.page.set_viewport_size({"width": 390, "height": 430})
        visited.page.focus("#message")
        visited.shows("document.documentElement.classList.contains('short')")
        share, whole = visited.page.evaluate(SHARE)
        assert share > 0.6
        assert whole
        visited.shows(AT_END)
        visited.page.screenshot(path=pictures / f"keyboard-phone-{scheme}.png")
        assert not violations(visited)
        visited.page.set_viewport_size(PHONE)
        visited.shows("!document.documentElement.classList.contains('short')")
        visited.page.evaluate(
            "() => { Object.defineProperty(visualViewport, 'height', { get: () => 430 });"
            " visualViewport.dispatchEvent(new Event('resize')); }"
        )
        share, whole = visited.page.evaluate(SHARE)
        assert share > 0.6
        assert whole
        assert not visited.complaints


def test_an_empty_page_above_a_keyboard(browser: Browser, local: Served) -> None:
    with browsing.visit(browser, local.url, size={"width": 390, "height": 420}) as visited:
        bottom = visited.page.evaluate(
            "document.querySelector('#ask').getBoundingClientRect().bottom"
        )
        assert 400 < bottom <= 420


def test_the_introduction_is_read_from_its_beginning(browser: Browser, local: Served) -> None:
    """Also where the figures leave too little room for it."""
    with browsing.visit(browser, local.url, size=PHONE) as visited:
        asked(visited)
        visited.page.click("summary")
        visited.page.click("#fresh")
        assert visited.page.evaluate("document.querySelector('#log').scrollTop") == 0


def test_a_wide_table_scrolls_on_a_phone(browser: Browser, local: Served) -> None:
    """Its columns are not one word wide."""
    table = "| a | b |\n|---|---|\n| short | " + "a long sentence " * 6 + "|"
    with browsing.visit(browser, local.url, size=PHONE) as visited, answering(visited, table):
        asked(visited)
        assert visited.page.evaluate("document.querySelector('.text td').offsetHeight") < 120
        assert visited.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_keyboard(browser: Browser, edge: Served, transport: PausedTransport) -> None:
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
        with transport.holding(HELD, "Why\nnot?"):
            page.keyboard.press("Enter")
            visited.shows("document.querySelector('.answer .text')?.textContent.length > 20")
            page.keyboard.press("Escape")
            visited.shows(DONE)
        assert "Stopped." in visited.text(".answer")
        assert page.evaluate("document.activeElement.id") == "message"
        assert not visited.complaints


def test_words_are_explained_by_keyboard_and_pointer(browser: Browser, local: Served) -> None:
    with browsing.visit(browser, local.url) as visited:
        page = visited.page
        page.focus(".term >> nth=1")
        assert "tau" in visited.text("#tip")
        assert page.get_attribute(".term >> nth=1", "aria-describedby") == "tip"
        assert not violations(visited)
        page.keyboard.press("Escape")
        assert page.is_hidden("#tip")
        page.hover(".term >> nth=2")
        assert "drafter guesses" in visited.text("#tip")
        page.hover("h1")
        assert page.is_hidden("#tip")


def test_theme_is_remembered(browser: Browser, local: Served) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    with browsing.visit(browser, local.url) as visited:
        light = visited.page.evaluate(background)
        visited.page.click("#show-settings")
        visited.page.select_option("#theme", "dark")
        dark = visited.page.evaluate(background)
        assert dark != light
        visited.page.reload()
        assert visited.page.evaluate(background) == dark
        visited.page.click("#show-settings")
        visited.page.select_option("#theme", "system")
        assert visited.page.evaluate(background) == light


def test_errors_in_words_and_retried(browser: Browser) -> None:
    settings = ServeSettings(guarded=GuardSettings(api_keys=("right",)))
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
        assert page.is_hidden("#trouble")
        page.route(CHAT, lambda route: route.abort())
        ask(visited)
        visited.shows("document.querySelector('.failure') !== null")
        assert "cannot be reached" in visited.text(".failure")
        assert visited.text(".question") == QUESTION
        assert visited.count(".answer") == 0
        assert not violations(visited)
        page.unroute(CHAT)
        page.click(".failure >> text=Retry")
        visited.shows(f"{DONE} && document.querySelectorAll('.reply').length === 1")
        assert raw_text(visited) == ANSWER
        assert visited.count(".failure") == 0


def test_a_key_that_is_no_longer_right_is_asked_for_again(browser: Browser) -> None:
    settings = ServeSettings(guarded=GuardSettings(api_keys=("right",)))
    with (
        serving.serving(local_source(), settings) as served,
        browsing.visit(browser, served.url) as visited,
    ):
        page = visited.page
        page.fill("#key", "right")
        page.keyboard.press("Enter")
        visited.shows("document.querySelector('#key-form').hidden")
        page.route(CHAT, lambda route: route.fulfill(status=401, json={}))
        ask(visited)
        visited.shows("!document.querySelector('#key-form').hidden")
        assert "wants an API key" in visited.text(".failure")
        page.unroute(CHAT)
        page.fill("#key", "right")
        page.keyboard.press("Enter")
        visited.shows("document.querySelector('#key-form').hidden")
        page.click(".failure >> text=Retry")
        visited.shows(f"{DONE} && document.querySelectorAll('.reply').length === 1")


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
        stats = {"tokens_per_second": 30, "rounds": 4}
        plain = {"ids": [1, 2], "stats": {"tokens_per_second": 20, "rounds": 9}}
        said = "m.verdict(...a)"
        found = visited.module("compare.js", said, [{"ids": [1, 2], "stats": stats}, plain])
        assert found == {
            "same": True,
            "text": "✓ Same text, token for token, in 4 passes of the model instead of 9. "
            "Speed: 1.50 times as fast with speculation (30.0 against 20.0 tokens a second).",
        }
        found = visited.module("compare.js", said, [{"ids": [1, 3], "stats": None}, plain])
        assert found["text"].startswith("✗ The texts differ from token 2 on; ")
        found = visited.module("spoken.js", "m.sentences(a)", "One. Two 1.5 is (two.) Thr")
        assert found == {"whole": "One. Two 1.5 is (two.)", "rest": "Thr"}
        assert visited.module("panel.js", "a.map(m.bytes)", [0, 999, 1500, 2e6]) == [
            "0 B",
            "999 B",
            "1.5 kB",
            "2.0 MB",
        ]
        pays = visited.module("panel.js", "a.map(m.pays)", [None, 0.6, 1.4])
        assert pays[0].startswith("Drafts pay where ")
        assert pays[1].startswith("Drafts do not pay here: ")
        assert pays[2] == "Drafts pay here: about 1.4 times the speed of streaming."


def test_a_race_is_short_and_nothing_has_ended_before_its_end(
    browser: Browser, local: Served
) -> None:
    """Answers of 40 s are replayed; the clock shows their own times."""
    replay = """(async () => {
      const { Answer, emptyText } = await import('/answer.js');
      const [answer, seen] = [new Answer("Answer", emptyText()), []];
      document.body.append(answer.element);
      for (const [id, at] of [0, 20_000, 40_000].entries()) {
        const piece = { id, text: 'word ', source: 'target' };
        answer.add([piece]);
        answer.record.push({ at, pieces: [piece] });
      }
      answer.end('length');
      const clock = answer.clock.bind(answer);
      answer.clock = (text) => { clock(text); seen.push([text, answer.notes.textContent]); };
      await m.race([answer], new AbortController().signal);
      return { seen, notes: answer.notes.textContent };
    })()"""
    with browsing.visit(browser, local.url) as visited:
        found = visited.module("race.js", replay)
        *writing, (last, _) = [one for one in found["seen"] if one[0]]
        assert writing[0][0].endswith("shown 8.0 times as fast")
        assert "done after 40.00 s" in last
        assert not any(notes for _, notes in writing)
        assert found["notes"] == "Ended at the token limit."
