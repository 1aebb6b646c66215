"""What stands before the endpoints: keys, sizes of bodies, time to send them, known hosts.

Plain ASGI: a refused request never reaches the parser, and streams pass through untouched.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moaspec.serve import http_errors
from moaspec.support import limits
from moaspec.support.refusal_delay import RefusalDelay

CLOSED = ("/v1", "/metrics")
"""What a key protects: these paths and all below them."""


@dataclass(frozen=True, kw_only=True)
class Guarded:
    """What the guard allows.

    Attributes:
        api_keys: any of them opens the endpoints; none: everybody may.
        max_body_bytes: of a request.
        body_timeout_s: time to send it.
        hosts: names that the `Host` header may have; none: any. Where only this machine can
            connect, this keeps web pages of others from reaching it under a name of their own.
    """

    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = limits.MAX_BODY_BYTES
    body_timeout_s: float = 30.0
    hosts: tuple[str, ...] = ()


class _RefusedError(Exception):
    """A body that is too large or too slow."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class HttpGuard:
    """An ASGI application around another.

    Args:
        app: what is guarded.
        allowed: see `Guarded`.
    """

    def __init__(self, app: ASGIApp, allowed: Guarded) -> None:
        self._app, self._allowed = app, allowed
        self._slow = RefusalDelay()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse, or pass on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        refusal = self._refusal(scope["path"], headers)
        if refusal is not None:
            if refusal[0] == 401:
                await self._slow.wait()
            await _refuse(send, *refusal)
            return
        name = tenant(_key(headers))
        # Where no key is asked for, clients could take any number of them.
        client = name if len(self._allowed.api_keys) > 1 else ""
        scope.setdefault("state", {}).update(tenant=name, client=client)
        try:
            # Read before anything is answered: handlers only ever see whole bodies.
            received = await self._body(receive)
        except _RefusedError as error:
            await _refuse(send, error.status, str(error))
            return
        await self._answered(scope, _replayed(received, receive), send)

    async def _answered(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Starlette raises an error again after answering it, and servers then cut connections."""
        whole = False

        async def watched(message: Message) -> None:
            nonlocal whole
            await send(message)
            whole = message["type"] == "http.response.body" and not message.get("more_body", False)

        try:
            await self._app(scope, receive, watched)
        except Exception:
            if not whole:
                raise

    def _refusal(self, path: str, headers: Headers) -> tuple[int, str] | None:
        hosts = self._allowed.hosts
        if hosts and _host(headers.get("host", "")) not in hosts:
            return 400, "This server is not known under the name in the Host header."
        if self._closed(path) and not self._opens(_key(headers)):
            return 401, "Incorrect API key. Send one of this server's as a bearer token."
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > self._allowed.max_body_bytes:
            return 413, self._too_large()
        return None

    def _closed(self, path: str) -> bool:
        return any(path == one or path.startswith(one + "/") for one in CLOSED)

    def _opens(self, key: str) -> bool:
        keys = self._allowed.api_keys
        found = [hmac.compare_digest(key.encode(), one.encode()) for one in keys]
        return any(found) or not keys

    async def _body(self, receive: Receive) -> list[Message]:
        """All messages up to the body's end."""
        messages: list[Message] = []
        size = 0
        try:
            async with asyncio.timeout(self._allowed.body_timeout_s):
                while not messages or messages[-1].get("more_body", False):
                    messages.append(await receive())
                    size += len(messages[-1].get("body", b""))
                    if size > self._allowed.max_body_bytes:
                        raise _RefusedError(413, self._too_large())
        except TimeoutError:
            raise _RefusedError(
                408, f"The body did not arrive within {self._allowed.body_timeout_s:g} s."
            ) from None
        return messages

    def _too_large(self) -> str:
        return f"The body is larger than this server takes ({self._allowed.max_body_bytes} bytes)."


def tenant(key: str) -> str:
    """Whose request it is, without the key itself."""
    return hashlib.sha256(key.encode()).hexdigest()[:16] if key else ""


def _key(headers: Headers) -> str:
    kind, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else ""


def _host(header: str) -> str:
    """The name without its port; IPv6 addresses keep their brackets."""
    name, colon, port = header.rpartition(":")
    return (name if colon and port.isdecimal() else header).lower()


def _replayed(messages: Sequence[Message], receive: Receive) -> Receive:
    """What was received, then whatever comes: the client's leaving."""
    left = iter(messages)

    async def replay() -> Message:
        message = next(left, None)
        return await receive() if message is None else message

    return replay


async def _refuse(send: Send, status: int, message: str) -> None:
    content = json.dumps(http_errors.body(status, message)).encode()
    headers: list[Any] = [(b"content-type", b"application/json"), (b"connection", b"close")]
    headers.append((b"content-length", str(len(content)).encode()))
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})
