"""Debian's Firefox, driven by WebDriver BiDi: Playwright's own Firefox is a patched build."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

FIREFOX = Path("/usr/bin/firefox-esr")
SETTINGS = {
    "browser.shell.checkDefaultBrowser": False,
    "app.normandy.enabled": False,
    "datareporting.policy.dataSubmissionEnabled": False,
    "network.captive-portal-service.enabled": False,
    "network.connectivity-service.enabled": False,
    "toolkit.telemetry.server": "",
}
"""Nothing is fetched but the pages of tests."""

LOOKS = 3000
"""Before a test gives up waiting."""


class ScriptError(Exception):
    """The browser refuses a command, or a page's script throws."""


@dataclass
class Firefox:
    """A running browser.

    Args:
        socket: the connection for commands.
    """

    socket: Any
    numbers: Iterator[int] = field(default_factory=itertools.count)
    answers: dict[int, queue.SimpleQueue[Any]] = field(default_factory=dict)

    def read(self) -> None:
        """Hand answers to those who wait for them, until the browser ends."""
        from websockets.exceptions import ConnectionClosed

        with contextlib.suppress(ConnectionClosed):
            for text in self.socket:
                message = json.loads(text)
                if (waiting := self.answers.pop(message.get("id"), None)) is not None:
                    waiting.put(message)

    def send(self, method: str, **params: Any) -> Any:
        """A command's result."""
        number = next(self.numbers)
        waiting = self.answers[number] = queue.SimpleQueue()
        self.socket.send(json.dumps({"id": number, "method": method, "params": params}))
        answer = waiting.get(timeout=300)
        if answer["type"] == "error":
            raise ScriptError(f"{method}: {answer['message']}")
        return answer["result"]

    def open(self, url: str) -> FirefoxPage:
        """A new tab with a page."""
        tab = self.send("browsingContext.create", type="tab")["context"]
        self.send("browsingContext.navigate", context=tab, url=url, wait="complete")
        return FirefoxPage(self, tab)


@dataclass
class FirefoxPage:
    """A tab."""

    browser: Firefox
    tab: str

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, which may be a promise of it."""
        found = self.browser.send(
            "script.evaluate",
            expression=f"Promise.resolve({expression}).then((one) => JSON.stringify(one ?? null))",
            target={"context": self.tab},
            awaitPromise=True,
        )
        if found["type"] == "exception":
            raise ScriptError(found["exceptionDetails"]["text"])
        return json.loads(found["result"]["value"])

    def shows(self, expression: str) -> None:
        """Wait until a JavaScript expression is true."""
        for _ in range(LOOKS):
            if self.evaluate(expression):
                return
            time.sleep(0.02)
        raise AssertionError(f"still not true: {expression}")


@contextmanager
def firefox() -> Iterator[Firefox]:
    """The browser with an empty profile; skips without one."""
    if not FIREFOX.exists():
        pytest.skip(f"there is no {FIREFOX} (Debian: apt-get install firefox-esr)")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        lines = [f"user_pref({json.dumps(k)}, {json.dumps(v)});" for k, v in SETTINGS.items()]
        (Path(profile) / "user.js").write_text("\n".join(lines))
        command = [str(FIREFOX), "--headless", "--remote-debugging-port", "0", "--profile", profile]
        pipes: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        # The command starts another process, which is the browser.
        with subprocess.Popen(command, start_new_session=True, **pipes) as running:
            try:
                with _connected(running) as browser:
                    yield browser
            finally:
                os.killpg(running.pid, signal.SIGKILL)


@contextmanager
def _connected(running: subprocess.Popen[str]) -> Iterator[Firefox]:
    from websockets.sync.client import connect

    assert running.stderr is not None
    marker = "WebDriver BiDi listening on "
    place = next((line for line in running.stderr if marker in line), None)
    assert place is not None, "Firefox ended"
    threading.Thread(target=running.stderr.read, daemon=True).start()
    url = place.partition(marker)[2].strip() + "/session"
    with connect(url, max_size=None, open_timeout=60, ping_interval=None) as socket:
        browser = Firefox(socket)
        threading.Thread(target=browser.read, daemon=True).start()
        browser.send("session.new", capabilities={})
        yield browser
