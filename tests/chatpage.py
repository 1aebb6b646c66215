"""What tests of the chat page do: ask, answer in a server's place, look for faults."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

import memorised_target
import serving
from browsing import Visit
from memorised_target import QUESTION
from moaspec_core.drafting.tree_shapes import parse_shape
from moaspec_core.policy.policies import DraftSettings
from moaspec_serve.sources.local_source import LocalSource

if TYPE_CHECKING:
    from playwright.sync_api import Route

DONE = "document.querySelector('#send').textContent === 'Send'"
CHAT = "**/v1/chat/completions"
SOURCES = ("draft", "draft", "target", "copy")
PIECE = 7
"""Characters of the pieces in which an answer comes."""


def local_source() -> LocalSource:
    """A model that knows one answer, and its drafter."""
    shaping = DraftSettings(parse_shape("tree:3x3x6"), free_branches=True)
    return LocalSource(
        memorised_target.target(), memorised_target.drafter(), name=serving.MODEL, shaping=shaping
    )


def ask(visited: Visit, question: str = QUESTION) -> None:
    """Type a question and send it."""
    visited.page.fill("#message", question)
    visited.page.press("#message", "Enter")


def asked(visited: Visit, question: str = QUESTION, *, answers: int = 1) -> None:
    """Send a question, and wait until this number of answers is complete."""
    ask(visited, question)
    visited.shows(
        f"document.querySelectorAll('.reply').length === {answers} && {DONE}"
        " && !document.querySelector('[aria-busy]')"
    )


def raw_text(visited: Visit) -> str:
    """The text of the last answer as the model wrote it."""
    visited.page.evaluate(
        "() => { navigator.clipboard.writeText = async (text) => { window.copied = text; }; }"
    )
    visited.page.click(".reply >> nth=-1 >> .actions >> text=Copy")
    visited.shows("window.copied !== undefined")
    return str(visited.page.evaluate("window.copied"))


def painted(visited: Visit) -> dict[str, str]:
    """The words that are painted, by the kind of their source."""
    found: dict[str, str] = visited.page.evaluate(
        """() => Object.fromEntries([...CSS.highlights].map(([kind, ranges]) =>
            [kind, [...ranges].map((range) => range.startContainer.data
                .slice(range.startOffset, range.endOffset)).join(' ')]))"""
    )
    return found


def violations(visited: Visit) -> list[str]:
    """What axe-core finds wrong, with where."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    found = axe.run(visited.page).response["violations"]
    return [f"{one['id']}: {node['html']}" for one in found for node in one["nodes"]]


def events(text: str, *, finish: str | None = "stop", done: bool = True) -> str:
    """The stream of an answer with this text."""
    pieces = [text[i : i + PIECE] for i in range(0, len(text), PIECE)]
    chunks = [_chunk(piece, i) for i, piece in enumerate(pieces)]
    if finish:
        chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    lines = [json.dumps(chunk) for chunk in chunks] + (["[DONE]"] if done else [])
    return "".join(f"data: {line}\n\n" for line in lines)


def _chunk(text: str, number: int) -> dict[str, Any]:
    stats = {"tokens": number + 1, "rounds": number + 1, "tau": 1.0, "drafted": 0, "accepted": 0}
    piece = {"text": text, "id": number, "source": SOURCES[number % len(SOURCES)]}
    return {
        "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}],
        "moaspec": {
            "pieces": [piece],
            "stats": {**stats, "copied": 0, "tokens_per_second": 20.0, "elapsed_s": 1.0},
        },
    }


@contextmanager
def answering(visited: Visit, *texts: str, **ends: Any) -> Iterator[list[dict[str, Any]]]:
    """Answer in the server's place, with each text in turn; the bodies that were asked."""
    bodies: list[dict[str, Any]] = []

    def fulfill(route: Route) -> None:
        bodies.append(dict(route.request.post_data_json or {}))
        text = texts[min(len(bodies), len(texts)) - 1]
        stream = events(text, **ends)
        route.fulfill(status=200, content_type="text/event-stream", body=stream)

    visited.page.route(CHAT, fulfill)
    try:
        yield bodies
    finally:
        visited.page.unroute(CHAT)


def begin_answer(visited: Visit, text: str) -> None:
    """Ask, and get the beginning of an answer that does not end by itself."""
    visited.page.evaluate(
        """(events) => { window.fetch = async (_, { signal }) => new Response(new ReadableStream({
            start(to) {
                to.enqueue(new TextEncoder().encode(events));
                signal.addEventListener('abort', () => to.error(signal.reason));
            } })); }""",
        events(text, finish=None, done=False),
    )
    ask(visited, "Go on.")
    visited.shows("document.querySelector('.answer .text')?.textContent.length > 10")


def stored(visited: Visit) -> Sequence[dict[str, Any]]:
    """The conversations that the browser keeps."""
    found: Sequence[dict[str, Any]] = visited.page.evaluate(
        """() => Object.keys(localStorage).filter((key) => key.startsWith('moaspec-chat-'))
            .map((key) => JSON.parse(localStorage.getItem(key)))"""
    )
    return found
