"""Whatever a server, model or bundle says, the page that drafts in the browser shows as text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlparse

import pytest

import browsing
from chatpage import ask, asked
from device_pages import built_scripts
from moaspec_edge.http.device_page import MADE, PAGE_HEADERS, TYPES
from moaspec_serve.app import page_directory
from serve.test_page_hostile import HTML, MARKDOWN, attacked

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Route

pytestmark = pytest.mark.browser

URL = "http://localhost:9"
WORKER = """
const payloads = PAYLOADS;
const link = { state: 'up', round_trip_s: 0.1, bytes_sent: 1, bytes_received: 1, cut: false,
  can_cut: true, draft_ms: 1 };
const stats = { tokens: 1, rounds: 1, tau: 1, drafted: 1, accepted: 1, copied: 0,
  tokens_per_second: 1, elapsed_s: 1, bytes_sent_per_token: 1, bytes_received_per_token: 1 };
const chunk = (id, content, more, finish_reason = null) => {
  const choices = [{ index: 0, delta: { content }, finish_reason }];
  postMessage({ kind: 'chunk', id, chunk: { choices, moaspec: { stats, link, ...more } } });
};
const piece = (text, source, was) => ({ text, id: 1, source, ...(was ? { was } : {}) });
self.addEventListener('message', ({ data }) => {
  if (data.kind === 'load') {
    postMessage({ kind: 'progress', loaded: 1, total: 2 });
    const info = { model: payloads.join(' '), context: 99, bytes: 1, threads: 1 };
    postMessage({ kind: 'ready', info });
  }
  if (data.kind !== 'ask') return;
  const { id, question } = data;
  const asked = question.messages.at(-1).content;
  const payload = payloads[Number(asked.split(' ')[1])];
  if (asked.startsWith('fail')) {
    return postMessage({ kind: 'end', id, failure: { message: payload, status: 0 } });
  }
  const parts = (payload + '\\n\\nThe end.').match(/[^]{1,7}/g);
  chunk(id, '', { provisional: parts.map((part) => piece(part, 'provisional')) });
  const drafted = { id: 1, source: 'draft', accepted: true };
  const nodes = parts.map((text, i) => ({ ...drafted, text, parent: i - 1 }));
  const correction = { confirmed: 0, removed: parts.length, text: payload };
  parts.forEach((part, i) => chunk(id, part, {
    pieces: [piece(part, i % 2 ? 'draft' : 'target', 'corrected')],
    round: { number: i, nodes, emitted: 1 }, ...(i ? {} : { correction, provisional: [] }) },
    i + 1 === parts.length ? 'stop' : null));
  postMessage({ kind: 'end', id });
});
"""
"""Stands for the page's worker and says what a hostile server would make it say."""


def fulfil(route: Route, scripts: Path, worker: str) -> None:
    """Serve the page's files as `DevicePage` does, but for the worker."""
    path = urlparse(route.request.url).path
    name = "index.html" if path == "/" else path[1:]
    place = (scripts if name in MADE else page_directory()) / name
    headers = {**PAGE_HEADERS, "content-type": TYPES.get(place.suffix, "text/plain")}
    if name == "worker.js":
        route.fulfill(headers=headers, body=worker)
    elif place.is_file():
        route.fulfill(headers=headers, body=place.read_bytes())
    else:
        route.fulfill(status=404, headers=headers, body="")


@pytest.mark.parametrize("name", ["HTML", "MARKDOWN"])
def test_hostile_tokens_names_and_errors_are_text(browser: Browser, name: str) -> None:
    payloads = {"HTML": HTML, "MARKDOWN": MARKDOWN}[name]
    worker, scripts = WORKER.replace("PAYLOADS", json.dumps(payloads)), built_scripts()
    with browsing.visit(browser, "about:blank") as visited:
        requests: list[str] = []
        visited.page.on("request", lambda request: requests.append(request.url))
        visited.page.on("dialog", lambda dialog: visited.complaints.append(dialog.message))
        visited.page.context.route("**/*", lambda route: fulfil(route, scripts, worker))
        visited.page.goto(f"{URL}/")
        visited.shows("document.querySelector('#model').textContent !== ''")
        assert visited.text("#model").startswith(payloads[0])
        for index, payload in enumerate(payloads):
            visited.page.click("#fresh")
            asked(visited, f"say {index}")
            assert "The end." in visited.text(".answer .text"), payload
            assert not attacked(visited, requests, URL), payload
        for index in range(0, len(payloads), 8):
            visited.page.click("#fresh")
            ask(visited, f"fail {index}")
            visited.shows("document.querySelector('.failure') !== null")
            assert not attacked(visited, requests, URL), payloads[index]
