"""The device page after outages of its server, in Chromium and in Firefox.

In each outage every page is in the middle of an answer when the server is killed. Prints, for each
browser and length: seconds from the server's return until the link is up and until the answer is
complete, and whether each text is that of plain decoding. A text that is not complete is counted by
itself: on a busy machine it may take minutes. The load average stands in each row. Needs `make
device-page`, Debian's chromium and firefox-esr, and Playwright. The last line is JSON.

    python benchmarks/outages.py --outages 5,30,60,120 --pages 5
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import browsing
import device_pages
import firefox
import memorised_target
import moaspec
import serving
from device_pages import BEGIN_ANSWER, LINK_DOWN, READY, PageServer
from memorised_target import QUESTION

SENT = 12
"""Tokens of an answer before the server is killed."""
NEW_TOKENS = 96
LOST_S = 120.0
"""A page that is not connected, or that writes nothing, for so long counts as lost."""


def main() -> None:
    """Print a row for each browser and length of the outage, then one line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--outages", default="5,30,60,120", help="Seconds.")
    parser.add_argument("--pages", type=int, default=5, help="Of each browser, at once.")
    parser.add_argument("--browsers", default="chromium,firefox")
    args = parser.parse_args()
    rows = []
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        device_pages.save_models(directory)
        scripts = device_pages.built_scripts()
        server = stack.enter_context(device_pages.serving_pages(directory, scripts))
        pages = []
        for name in args.browsers.split(","):
            make = opened(name, stack, server.url)
            pages += [(name, make()) for _ in range(args.pages)]
        for length_s in map(float, args.outages.split(",")):
            for row in outage(server, pages, length_s):
                rows.append(row)
                print(
                    f"{row['browser']:>8} {length_s:4.0f} s: connected after "
                    f"{statistics.median(row['connected_s']):.1f} s, at most "
                    f"{max(row['connected_s']):.1f} s; of {args.pages} texts {row['equal']} equal, "
                    f"{row['wrong']} wrong, {row['incomplete']} incomplete; load {row['load']:.1f}",
                    flush=True,
                )
    print(json.dumps({"benchmark": "outages", "rows": rows}))


def opened(name: str, stack: contextlib.ExitStack, url: str) -> Callable[[], Any]:
    """Makes pages of a browser."""
    if name == "firefox":
        running = stack.enter_context(firefox.firefox())
        return lambda: running.open(url)
    browser = stack.enter_context(browsing.chromium())
    return lambda: stack.enter_context(browsing.visit(browser, url))


def outage(
    server: PageServer, pages: Sequence[tuple[str, Any]], length_s: float
) -> list[dict[str, Any]]:
    """One outage, in the middle of an answer of each page."""
    body = {"messages": serving.say(QUESTION), "max_completion_tokens": NEW_TOKENS}
    body |= {"temperature": 0.0, "seed": 0}
    with server.holding(SENT):
        for _, page in pages:
            page.shows(READY)
            page.evaluate(f"({BEGIN_ANSWER})({json.dumps(body)})")
        for _, page in pages:
            page.shows(f"told.ids.length >= {SENT}")
        server.kill()
        for _, page in pages:
            page.shows(LINK_DOWN)
        time.sleep(length_s)
    server.start()
    back_s = time.monotonic()
    connected = wait_all(pages, f"!({LINK_DOWN})", back_s)
    complete = wait_all(pages, "told.done", back_s)
    load = os.getloadavg()[0]
    right = moaspec.generate(
        server.target,
        memorised_target.prompt_ids(server.target),
        max_new_tokens=NEW_TOKENS,
        temperature=0.0,
    ).token_ids
    texts = [page.evaluate("told.ids") for _, page in pages]
    done = [one < float("inf") for one in complete]
    is_right = [
        text == (right if all_ else right[: len(text)])
        for text, all_ in zip(texts, done, strict=True)
    ]
    rows = []
    for name in dict.fromkeys(name for name, _ in pages):
        own = [index for index, (one, _) in enumerate(pages) if one == name]
        rows.append(
            {
                "browser": name,
                "outage_s": length_s,
                "connected_s": [connected[index] for index in own],
                "complete_s": [complete[index] for index in own],
                "equal": sum(is_right[index] and done[index] for index in own),
                "wrong": sum(not is_right[index] for index in own),
                "incomplete": sum(not done[index] for index in own),
                "load": load,
            }
        )
    return rows


def wait_all(pages: Sequence[tuple[str, Any]], expression: str, since_s: float) -> list[float]:
    """Seconds after which an expression became true in each page; infinity where it never did."""
    found: dict[int, float] = {}
    known, changed_s = [0] * len(pages), since_s
    while len(found) < len(pages) and time.monotonic() - changed_s < LOST_S:
        for index, (_, page) in enumerate(pages):
            is_true, tokens = page.evaluate(f"[{expression}, told.ids.length]")
            if tokens != known[index]:
                known[index], changed_s = tokens, time.monotonic()
            if index not in found and is_true:
                found[index] = time.monotonic() - since_s
        time.sleep(0.05)
    return [found.get(index, float("inf")) for index in range(len(pages))]


if __name__ == "__main__":
    main()
