"""The device page in headless Chromium: starts, what it shows of an answer, memory."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import browsing

QUESTION = "How do bees find their way home?"
FIGURES = ("#draft-time", "#token-sent", "#token-received")
DRAFTED = "parseFloat(document.querySelector('#draft-time').textContent) > 0"
KEPT = "navigator.serviceWorker.controller !== null"
DONE = "document.querySelector('#send').textContent === 'Send'"


def page_starts(bundle: Path, model: str, drafter: str, repeats: int) -> dict[str, Any]:
    """Seconds from the page's address to its first draft, with empty caches and again."""
    cold: list[float] = []
    warm: list[float] = []
    figures: list[list[str]] = []
    ready = f"document.querySelector('#model').textContent === {Path(model).name!r}"

    def answer(visited: browsing.Visit, began: float) -> float:
        """Ask as soon as the page can; seconds to the first draft since `began`."""
        visited.shows(ready)
        visited.page.fill("#message", QUESTION)
        visited.page.press("#message", "Enter")
        visited.shows(DRAFTED)
        first_s = time.monotonic() - began
        visited.shows(DONE)
        figures.append([visited.text(name).strip() for name in FIGURES])
        return first_s

    with _serving(bundle, model, drafter) as url, browsing.chromium() as browser:
        for _ in range(repeats):
            began = time.monotonic()
            with browsing.visit(browser, url) as visited:
                cold.append(answer(visited, began))
                visited.shows(KEPT)
                began = time.monotonic()
                visited.page.reload()
                warm.append(answer(visited, began))
                memory = renderer_bytes()
    return {
        "bytes": sum(file.stat().st_size for file in bundle.iterdir()),
        "cold_s": cold,
        "warm_s": warm,
        "figures": figures,
        "memory_bytes": memory,
    }


@contextlib.contextmanager
def _serving(bundle: Path, model: str, drafter: str) -> Iterator[str]:
    """The page's server; its address."""
    command = [sys.executable, "-m", "moaspec", "target-server", "--model", model]
    command += ["--drafter", drafter, "--port", "0", "--page", str(bundle)]
    command += ["--threads", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:  # noqa: S603 - our own
        assert running.stdout is not None
        try:
            yield json.loads(running.stdout.readline())["page"]
        finally:
            running.terminate()


def renderer_bytes() -> int:
    """Private memory of the largest of Chromium's renderers that this process started."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # some end meanwhile
            if "--type=renderer" in child.cmdline():
                found.append(child.memory_full_info().uss)
    return max(found)
