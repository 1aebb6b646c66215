"""The device page after a long outage of its server, in the browsers that people have.

Browsers hold WebSockets back after failed ones, the longer the more of them failed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import browsing
import firefox
import memorised_target
import moaspec
import serving
from device_pages import BEGIN_ANSWER, LINK_DOWN, READY, built_scripts, serving_pages

pytestmark = [pytest.mark.browser, pytest.mark.slow]

OUTAGE_S = 60
BACK_S = 15  # much less than browsers held back once failed connections were left to them
SENT, NEW_TOKENS = 12, 64


@contextmanager
def chromium_page(url: str) -> Iterator[browsing.Visit]:
    with browsing.chromium() as browser, browsing.visit(browser, url) as visited:
        yield visited


@contextmanager
def firefox_page(url: str) -> Iterator[firefox.FirefoxPage]:
    with firefox.firefox() as browser:
        yield browser.open(url)


@pytest.mark.parametrize("opened", [chromium_page, firefox_page])
def test_an_answer_ends_after_a_long_outage(device_models: Path, opened: Any) -> None:
    """The server is killed in the middle of an answer; the page comes back with it."""
    with serving_pages(device_models, built_scripts()) as server, opened(server.url) as page:
        body = {"messages": serving.say(memorised_target.QUESTION), "temperature": 0.0, "seed": 0}
        body["max_completion_tokens"] = NEW_TOKENS
        with server.holding(SENT):
            page.shows(READY)
            page.evaluate(f"({BEGIN_ANSWER})({json.dumps(body)})")
            page.shows(f"told.ids.length >= {SENT}")
            server.kill()
            page.shows(LINK_DOWN)
            time.sleep(OUTAGE_S)  # what is tested is how long the browser holds back after that
        server.start()
        started_s = time.monotonic()
        page.shows(f"!({LINK_DOWN})")
        assert time.monotonic() - started_s < BACK_S
        page.shows("told.done")
        found = page.evaluate("told.ids")
    of = memorised_target.target()
    prompt = memorised_target.prompt_ids(of)
    assert found == moaspec.generate(of, prompt, max_new_tokens=NEW_TOKENS).token_ids
