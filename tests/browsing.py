"""Debian's Chromium, driven by Playwright: pages that remember what went wrong in them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page, ViewportSize

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)
DESKTOP: ViewportSize = {"width": 1280, "height": 800}
PHONE: ViewportSize = {"width": 390, "height": 844}
TIMEOUT_MS = 300_000
"""Machines that run tests may be busy; what is waited for comes in a second or two."""

LOOKS = 3000
"""Before a test gives up waiting; a machine that stands still for a minute does not look."""


@dataclass
class Visit:
    """A page, and what it complained about."""

    page: Page
    complaints: list[str] = field(default_factory=list)

    def shows(self, expression: str) -> None:
        """Wait until a JavaScript expression is true.

        Playwright's own waiting evaluates in the page, which the page's security policy forbids.
        """
        for _ in range(LOOKS):
            if self.page.evaluate(expression):
                return
            self.page.wait_for_timeout(20)
        raise AssertionError(f"still not true: {expression}")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, or of the promise that it is."""
        return self.page.evaluate(expression)

    def count(self, selector: str) -> int:
        """How many elements there are."""
        return self.page.locator(selector).count()

    def text(self, selector: str) -> str:
        """The text of one element, white space included."""
        return self.page.locator(selector).text_content() or ""

    def module(self, name: str, expression: str, argument: Any = None) -> Any:
        """What an expression over a module `m` and an argument `a` gives in the page."""
        source = f"async (a) => {{ const m = await import('/{name}'); return {expression}; }}"
        return self.page.evaluate(source, argument)


@contextmanager
def chromium(*flags: str) -> Iterator[Browser]:
    """The browser. Ends before other tests run: its event loop would be in their way."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not CHROMIUM.exists():
        pytest.skip(f"there is no {CHROMIUM} (Debian: apt-get install chromium)")
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=str(CHROMIUM), args=[*FLAGS, *flags])
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def visit(
    browser: Browser, url: str, *, size: ViewportSize | None = None, scheme: str = "light"
) -> Iterator[Visit]:
    """A new visitor of a page; every error that the page logs is a complaint."""
    asked: Any = {"viewport": size or DESKTOP, "color_scheme": scheme, "reduced_motion": "reduce"}
    context = browser.new_context(**asked, has_touch=size == PHONE)
    context.set_default_timeout(TIMEOUT_MS)
    visited = Visit(context.new_page())

    def note(said: ConsoleMessage) -> None:
        if said.type in ("error", "warning"):
            visited.complaints.append(said.text)

    visited.page.on("console", note)
    visited.page.on("pageerror", lambda error: visited.complaints.append(str(error)))
    try:
        visited.page.goto(url)
        yield visited
    finally:
        context.close()


def screenshots(fallback: Path) -> Path:
    """Where pictures go: `$MOASPEC_SCREENSHOTS`, or the test's own directory."""
    directory = Path(os.environ.get("MOASPEC_SCREENSHOTS") or fallback)
    directory.mkdir(parents=True, exist_ok=True)
    return directory
