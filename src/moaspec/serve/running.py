"""Running the application with uvicorn."""

from __future__ import annotations

import threading
import webbrowser
from dataclasses import replace
from typing import Any

import uvicorn

from moaspec.errors import InputError
from moaspec.serve.app import create_app
from moaspec.serve.desk import ServeSettings
from moaspec.serve.source import TextSource

LOOPBACK = ("127.0.0.1", "localhost", "::1")
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "[::1]")
"""The same as the `Host` header has them."""

CONNECTIONS = 1024
"""More are refused, so that idle ones cannot use up the process's files."""


def serve(
    source: TextSource, settings: ServeSettings, *, host: str, port: int, browse: bool = False
) -> None:
    """Serve until interrupted.

    Args:
        source: decodes.
        settings: see `ServeSettings`; where only this machine can connect, foreign names in the
            `Host` header are refused too.
        host: address to listen on.
        port: the same.
        browse: show the page in the user's browser.

    Raises:
        InputError: the port cannot be used.
    """
    if host in LOOPBACK and not settings.guarded.hosts:
        settings = replace(settings, guarded=replace(settings.guarded, hosts=LOOPBACK_HOSTS))
    server = uvicorn.Server(config(create_app(source, settings), host=host, port=port))
    if browse:
        threading.Timer(1.0, webbrowser.open, [page_url(host, port)]).start()
    try:
        server.run()
    except SystemExit as error:
        raise InputError(
            f"Cannot listen on {host}:{port}; another program may. Choose another --port."
        ) from error


def config(app: Any, **options: Any) -> uvicorn.Config:
    """Uvicorn's settings, the same for users and tests."""
    return uvicorn.Config(
        app,
        log_level="warning",
        server_header=False,
        limit_concurrency=CONNECTIONS,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=5,
        **options,
    )


def page_url(host: str, port: int) -> str:
    """Where a browser finds the page."""
    name = "127.0.0.1" if host in ("0.0.0.0", "::") else host  # noqa: S104 - not bound here
    return f"http://{f'[{name}]' if ':' in name else name}:{port}/"
