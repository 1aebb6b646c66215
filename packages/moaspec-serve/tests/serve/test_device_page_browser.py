"""The page as a device: it drafts in Chromium, goes on without a server, and is corrected."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import random
import re
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import browsing
import memorised_target
import moaspec
import serving
from browsing import PHONE, Visit
from chatpage import DONE, ask, asked, local_source, painted, raw_text, violations
from device_pages import BEGIN_ANSWER, KEPT, READY, PageServer, built_scripts, serving_pages
from free_port import free_port
from memorised_target import ANSWER, QUESTION
from moaspec_edge.protocol import target_pb2 as pb
from moaspec_edge.protocol.websocket_transport import WebSocketConnection
from moaspec_edge.server.service import TargetService

if TYPE_CHECKING:
    from playwright.sync_api import Browser

Cut = Callable[[Visit, PageServer], AbstractContextManager[None]]

pytestmark = pytest.mark.browser

STARTED = "document.querySelector('.answer .text')?.textContent.length > 20"
PROVISIONAL = "CSS.highlights.get('provisional').size > 3"
DOWN = "document.querySelector('#link-state').dataset.state === 'down'"
NUM_CUTS = 20
NEW_TOKENS = 48
MAX_DELAY_MS = 1000
SENT = 12
"""Tokens of an answer before it is cut: more than `STARTED` takes, and far from its end."""

CUT_IN_THE_MIDDLE = """() => {
  const log = document.querySelector('#log');
  const observer = new MutationObserver(() => {
    if (!(log.querySelector('.answer .text')?.textContent.length > 20)) return;
    observer.disconnect();
    document.querySelector('#cut').click();
  });
  observer.observe(log, { childList: true, subtree: true, characterData: true });
}"""
"""Cuts the emulated link as soon as an answer has some words."""


@pytest.fixture(scope="module")
def server(device_models: Path, browser: Browser) -> Iterator[PageServer]:  # noqa: ARG001
    with serving_pages(device_models, built_scripts()) as running:
        yield running


@pytest.fixture
def page(server: PageServer, browser: Browser) -> Iterator[Visit]:
    """A page that has its bundle, and its own files for a reload without a server."""
    with browsing.visit(browser, server.url) as visited:
        visited.shows(READY)
        visited.shows(KEPT)
        yield visited
        assert not visited.complaints


def sampled(visited: Visit, seed: int) -> None:
    """Set the settings of answers."""
    visited.page.click("#show-settings")
    visited.page.fill("#temperature", "0.8")
    visited.page.fill("#seed", str(seed))
    visited.page.click("#close-settings")


def forgive_refused(visited: Visit) -> None:
    """Forget what the browser logs of each refused connection, which it should."""
    expected = "ERR_CONNECTION_", "ERR_INTERNET_"
    visited.complaints[:] = [
        said for said in visited.complaints if not any(one in said for one in expected)
    ]


def own_text(prompt: str, **settings: Any) -> str:
    """What `moaspec.generate` writes with the target alone."""
    of = memorised_target.target()
    ids = memorised_target.prompt_ids(of, prompt)
    result = moaspec.generate(of, ids, max_new_tokens=512, **settings)
    tokens: Any = of.tokenizer
    return str(tokens.decode(result.token_ids, skip_special_tokens=True))


def test_an_answer_streams_with_drafts_of_the_browser(page: Visit, tmp_path: Path) -> None:
    assert page.page.evaluate("crossOriginIsolated")
    asked(page)
    assert raw_text(page) == ANSWER
    assert painted(page)["draft"]
    assert float(page.text("#tau")) > 1
    for figure in ("#token-sent", "#token-received", "#draft-time"):
        assert float(page.text(figure).split()[0]) > 0
    assert re.fullmatch(r"\d+%(, charging)?", page.text("#battery"))
    assert page.page.is_hidden("#download")
    assert not violations(page)
    page.page.screenshot(path=browsing.screenshots(tmp_path) / "device.png")


def test_on_a_phone(server: PageServer, browser: Browser, tmp_path: Path) -> None:
    pictures = browsing.screenshots(tmp_path)
    with browsing.visit(browser, server.url, size=PHONE) as visited:
        visited.shows(READY)
        asked(visited)
        assert raw_text(visited) == ANSWER
        visited.page.screenshot(path=pictures / "device-phone.png")
        assert not violations(visited)
        visited.page.click("#fresh")
        look_offline(visited, server, pictures / "device-phone-offline.png")
        assert raw_text(visited) == ANSWER
        assert not visited.complaints


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> set[tuple[int, ...]]:
    """The prompts that servers read on connections that open from now on."""
    seen: set[tuple[int, ...]] = set()
    receive = WebSocketConnection.receive

    async def note(connection: WebSocketConnection) -> bytes:
        frame = await receive(connection)
        seen.add(tuple(pb.ClientMessage.FromString(frame).open.token_ids))
        return frame

    monkeypatch.setattr(WebSocketConnection, "receive", note)
    return seen


def test_marked_text_stays_in_the_browser(
    prompts: set[tuple[int, ...]], page: Visit, tmp_path: Path
) -> None:
    """The server reads placeholders, also of what is recognised."""
    page.page.fill("#message", "Is Ada at ada@example.org?")
    page.page.evaluate("document.querySelector('#message').setSelectionRange(3, 6)")
    page.page.click("#private")
    assert page.page.input_value("#message") == "Is <private>Ada</private> at ada@example.org?"
    assert not violations(page)
    page.page.screenshot(path=browsing.screenshots(tmp_path) / "device-private.png")
    page.page.press("#message", "Enter")
    page.shows(f"document.querySelector('.reply') && {DONE}")
    of = memorised_target.target()
    assert tuple(memorised_target.prompt_ids(of, "Is [PRIVATE_1] at [EMAIL_1]?")) in prompts
    tokens: Any = of.tokenizer
    assert not any("Ada" in tokens.decode(ids) for ids in prompts)
    page.page.click("#private")
    assert page.page.input_value("#message") == "<private></private>"
    page.page.keyboard.type("Bob")
    assert page.page.input_value("#message") == "<private>Bob</private>"
    page.page.fill("#message", "I am <private>Ada")
    page.page.press("#message", "Enter")
    page.shows("document.querySelector('.failure')?.textContent.includes('never closed')")


def test_plain_decoding_has_the_same_text(page: Visit) -> None:
    page.page.check("#compare")
    asked(page)
    page.shows("document.querySelector('.verdict') !== null")
    assert "Same text" in page.text(".verdict")
    assert re.search(r"\b1\.00 a pass", page.page.locator(".speed").all_text_contents()[1])


@contextmanager
def without_network(visited: Visit, server: PageServer) -> Iterator[None]:  # noqa: ARG001
    visited.page.context.set_offline(True)
    try:
        yield
    finally:
        visited.page.context.set_offline(False)


@contextmanager
def without_server(visited: Visit, server: PageServer) -> Iterator[None]:  # noqa: ARG001
    """Kill the server, which forgets all sessions."""
    server.kill()
    try:
        yield
    finally:
        server.start()


def look_offline(visited: Visit, server: PageServer, picture: Path) -> None:
    """Look at an answer whose network is gone in the middle, then await its end."""
    with server.holding(SENT):
        ask(visited)
        visited.shows(STARTED)
        with without_network(visited, server):
            visited.shows(PROVISIONAL)
            visited.shows(DOWN)
            visited.page.screenshot(path=picture)
            assert not violations(visited)
    visited.shows(DONE)


@pytest.mark.parametrize("cut", [without_network, without_server])
def test_cuts_change_no_text(page: Visit, server: PageServer, cut: Cut) -> None:
    """Ten answers, greedy and sampled, are cut once each; most show words within a second."""
    of, chance, delays = memorised_target.target(), random.Random(3), []
    for number in range(NUM_CUTS // 2):
        question, after = QUESTION[: -number or None], chance.randrange(1, 25)
        settings: Any = {"temperature": 0.0 if number % 2 else 0.8, "seed": number}
        body = {"messages": serving.say(question), "max_completion_tokens": NEW_TOKENS} | settings
        with server.holding(after, question):
            page.page.evaluate(BEGIN_ANSWER, body)
            page.shows(f"told.ids.length >= {after}")
            page.page.evaluate("told.cutMs = Date.now()")
            with cut(page, server):
                # A drafter that believes that the text has ended shows nothing more.
                page.page.evaluate("told.untilMs = Date.now() + 5000")
                page.shows("told.most > 2 || Date.now() > told.untilMs")
        page.shows("told.done")
        told = page.page.evaluate("told")
        prompt = memorised_target.prompt_ids(of, question)
        result = moaspec.generate(of, prompt, max_new_tokens=NEW_TOKENS, **settings)
        assert told["ids"] == result.token_ids
        if told["most"] > 2:
            delays.append(told["shownMs"] - told["cutMs"])
    assert statistics.median(delays) < MAX_DELAY_MS
    forgive_refused(page)


@pytest.mark.parametrize("seed", [None, 11])
def test_offline_in_the_middle(
    page: Visit, server: PageServer, tmp_path: Path, seed: int | None
) -> None:
    if seed is not None:
        sampled(page, seed)
    look_offline(page, server, browsing.screenshots(tmp_path) / "device-offline.png")
    settings = {} if seed is None else {"temperature": 0.8, "seed": seed}
    assert raw_text(page) == own_text(QUESTION, **settings)
    assert "provisional tokens were right" in page.text(".notes")


def test_a_lost_server_and_a_reload_without_one(page: Visit, server: PageServer) -> None:
    with server.holding(SENT):
        ask(page)
        page.shows(STARTED)
        server.kill()
    try:
        page.shows(PROVISIONAL)
        page.page.reload()
        page.shows(READY)
        page.page.click("#fresh")
        ask(page)
        page.shows(PROVISIONAL)
        page.shows(DOWN)
    finally:
        server.start()
    page.shows(DONE)
    assert raw_text(page) == ANSWER
    forgive_refused(page)


def test_a_first_question_without_a_network(page: Visit, server: PageServer) -> None:
    """There are no activations, so words are mostly wrong; they are replaced later."""
    with without_network(page, server):
        page.page.reload()
        page.shows(READY)
        ask(page)
        page.shows(PROVISIONAL)
    page.shows(DONE)
    assert raw_text(page) == ANSWER
    forgive_refused(page)


def test_a_version_of_the_drafter_is_taken_and_kept(
    page: Visit, server: PageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page downloads it once."""
    sent = list[str]()
    give = TargetService.device_weights

    async def count(service: TargetService, packing: str = "") -> tuple[str, bytes]:
        sent.append(packing)
        return await give(service, packing)

    monkeypatch.setattr(TargetService, "device_weights", count)
    version = copy.deepcopy(memorised_target.drafter())
    with torch.no_grad():
        version.decoder.self_attention.mlp.down_proj.weight.mul_(0.9)
    server.adopt(version)
    try:
        for _ in range(2):
            page.page.reload()
            page.shows(READY)
            page.shows(
                "caches.open('moaspec-version').then((one) => one.keys()).then((all) => all.length)"
            )
            page.page.click("#fresh")
            asked(page)
            assert raw_text(page) == ANSWER
            assert painted(page)["draft"]
    finally:
        server.kill()
        server.start()
    assert sent == ["onnx/1/float32/0"]
    forgive_refused(page)


def test_a_stopped_answer_and_the_next(page: Visit, server: PageServer) -> None:
    with server.holding(SENT):
        ask(page)
        page.shows(STARTED)
        page.page.click("#cut")
        page.shows(PROVISIONAL)
    page.page.click("#send")
    page.shows(DONE)
    assert ANSWER.startswith(page.text(".answer .text").strip())
    page.page.click("#cut")
    page.page.click("text=Continue")
    page.shows(f"{DONE} && !document.querySelector('[aria-busy]')")
    assert raw_text(page) == ANSWER


def test_deleting_all_chats_keeps_no_text(page: Visit) -> None:
    kept = "caches.has('moaspec-prefix')"
    asked(page)
    page.shows(kept)
    page.page.click("#show-history")
    page.page.once("dialog", lambda dialog: dialog.dismiss())
    page.page.click("#clear-all")
    assert page.page.evaluate(kept)
    page.page.click("#close-history")
    page.page.click("#fresh")
    ask(page)
    page.shows(STARTED)
    page.page.click("#show-history")
    page.page.once("dialog", lambda dialog: dialog.accept())
    page.page.click("#clear-all")
    page.shows(f"{kept}.then((found) => !found)")
    # The worker ends the answer now, and would keep its text.
    page.page.wait_for_timeout(1000)
    assert not page.page.evaluate(kept)


def test_the_page_can_be_installed(page: Visit) -> None:
    session = page.page.context.new_cdp_session(page.page)
    errors = session.send("Page.getInstallabilityErrors")["installabilityErrors"]
    assert {error["errorId"] for error in errors} <= {"in-incognito"}


def test_another_command_at_the_same_address(page: Visit, server: PageServer) -> None:
    """Its page is shown, and nothing of this page is kept."""
    server.kill()
    try:
        with serving.serving(local_source(), port=server.port):
            # First the old page, until its service worker is replaced.
            opened = itertools.count(1)
            with page.page.expect_event("framenavigated", lambda _: next(opened) == 2):
                page.page.reload()
            page.shows("navigator.serviceWorker.controller === null")
            page.shows("!document.querySelector('#downloaded')")
            page.shows("caches.keys().then((names) => !names.length)")
            page.shows(READY)
            asked(page)
            assert raw_text(page) == ANSWER
    finally:
        server.start()
    forgive_refused(page)


def test_a_damaged_bundle_is_reported(server: PageServer, browser: Browser) -> None:
    with browsing.visit(browser, "about:blank") as visited:
        visited.page.context.route(
            "**/bundle/tokenizer.json", lambda route: route.fulfill(status=200, body="{}")
        )
        visited.page.goto(server.url)
        visited.shows("!document.querySelector('#trouble').hidden")
        assert "tokenizer.json is not the file that was exported" in visited.text("#trouble-text")


@pytest.mark.slow
def test_a_killed_process(device_models: Path, browser: Browser, tmp_path: Path) -> None:
    """The command as users run it, with a token, ended by SIGKILL in the middle of an answer."""
    tokens = tmp_path / "tokens.json"
    tokens.write_text(json.dumps({"alice": {"sha256": hashlib.sha256(b"secret").hexdigest()}}))
    models = ["--model", device_models / "target", "--drafter", device_models / "drafter"]
    places = ["--port", free_port(), "--page", device_models / "bundle"]
    scripts = ["--page-scripts", built_scripts(), "--tokens", tokens]
    command = [sys.executable, "-m", "moaspec", "target-server", *models, *places, *scripts]
    command += ["--dtype", "float32", "--threads", 1]

    def start() -> tuple[subprocess.Popen[str], dict[str, Any]]:
        pipe = subprocess.PIPE
        running = subprocess.Popen(list(map(str, command)), stdout=pipe, text=True)
        assert running.stdout is not None
        with running.stdout:
            return running, json.loads(running.stdout.readline())

    running, info = start()
    try:
        with browsing.visit(browser, info["page"]) as visited:
            visited.shows("document.querySelector('#model')?.textContent === 'target'")
            ask(visited)
            visited.shows("!document.querySelector('#key-form').hidden")
            visited.page.fill("#key", "secret")
            visited.page.click("#key-form button")
            visited.shows("document.querySelector('#key-form').hidden")
            visited.page.evaluate(CUT_IN_THE_MIDDLE)
            visited.page.click(".failure button")
            visited.shows(PROVISIONAL)
            running.send_signal(signal.SIGKILL)
            running.wait(60)
            visited.page.click("#cut")
            visited.shows(DOWN)
            running, _ = start()
            visited.shows(DONE)
            assert raw_text(visited) == ANSWER
    finally:
        running.kill()
        running.wait(60)
