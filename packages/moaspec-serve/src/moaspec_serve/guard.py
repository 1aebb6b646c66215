"""Checks before the endpoints: API keys, body size and time, `Host` header.

This is plain ASGI: a refused request does not reach the parser, and streams pass unchanged.
"""

import asyncio
import hashlib
import hmac
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moaspec_core.errors import BusyError
from moaspec_core.support import limits
from moaspec_core.support.tasks import LoopTurns, RefusalDelay
from moaspec_serve import http_errors
from moaspec_serve.http_errors import RequestError

PROTECTED_PATHS = ("/v1", "/metrics")  # paths that require a key, with all paths below them
BODY_TIMEOUT_S = 30.0  # maximum time to receive a request's body
COMPOUND_VALUES = 4  # values that an object, a list or a member of an object counts for


@dataclass(frozen=True, kw_only=True)
class GuardSettings:
    """Keys and names of `HttpGuard`."""

    api_keys: tuple[str, ...] = ()  # accepted API keys; if empty, no key is required
    # Accepted names in the `Host` header; if empty, or with "*", all are. On a loopback address
    # this prevents DNS rebinding by web pages.
    hosts: tuple[str, ...] = ()


@dataclass
class _Body:
    """What has arrived of a request's body."""

    client: str = ""
    size: int = 0
    messages: list[Message] = field(default_factory=list)


class HttpGuard:
    """An ASGI middleware that refuses invalid requests."""

    def __init__(self, app: ASGIApp, settings: GuardSettings) -> None:
        self._app, self._settings = app, settings
        self._slow_down, self._turns = RefusalDelay(), LoopTurns()
        self._held: Counter[str] = Counter()  # bytes of bodies by client

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, body = Headers(scope=scope), _Body()
        name = tenant(_key(headers))
        # Without required keys, a client could use any number of them.
        client = name if len(self._settings.api_keys) > 1 else ""
        try:
            try:
                self._check(scope, headers)
                # Read the whole body before the application sees the request.
                body.client = client or (scope.get("client") or ("",))[0]
                await self._read(body, receive)
                if _is_protected(scope["path"]):
                    await self._turns.wait()
            except (RequestError, BusyError) as error:
                await self._refuse(error, scope, receive, send)
                return
            scope.setdefault("state", {}).update(tenant=name, client=client)
            await self._call_app(scope, _replayed(body.messages, receive), send)
        finally:
            self._held[body.client] -= body.size
            self._held += Counter()  # drops clients without bodies

    async def _refuse(
        self, error: RequestError | BusyError, scope: Scope, receive: Receive, send: Send
    ) -> None:
        status, content = http_errors.error_response(error)
        headers = {"connection": "close"}
        if status == 401:
            headers["www-authenticate"] = "Bearer"
            await self._slow_down.wait()
        if isinstance(error, BusyError):
            headers["retry-after"] = str(ceil(error.retry_s))
        await JSONResponse(content, status, headers)(scope, receive, send)

    async def _call_app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application. Drop its error if it has sent a whole response.

        Starlette raises errors again after its response, and servers then cut the connection.
        """
        complete = False

        async def send_and_watch(message: Message) -> None:
            nonlocal complete
            await send(message)
            complete = message["type"] == "http.response.body" and not message.get(
                "more_body", False
            )

        try:
            await self._app(scope, receive, send_and_watch)
        except Exception:
            if not complete:
                raise

    def _check(self, scope: Scope, headers: Headers) -> None:
        path, hosts, host = scope["path"], self._settings.hosts, _host(headers.get("host", ""))
        # HTTP/1.0 does without; browsers, whose pages are kept out here, send later versions.
        unnamed = scope["http_version"] == "1.0" and "host" not in headers
        if hosts and not unnamed and not {host, "*"} & set(map(_host, hosts)):
            raise RequestError(
                f"This server does not answer as {host[:100]!r}, the name in the Host header, but "
                f"as {', '.join(hosts)}. Behind a reverse proxy that forwards its own name, start "
                "the server with --allow-host NAME, or let the proxy send one of these names."
            )
        if _is_protected(path) and not self._accepts(_key(headers)):
            text = "Incorrect API key. Send one of this server's as a bearer token."
            raise RequestError(text, status=401)
        encoding = headers.get("content-encoding", "").strip().lower()
        if encoding not in ("", "identity"):
            raise RequestError(
                f"Bodies in Content-Encoding {encoding[:50]!r} are not read; send plain JSON.",
                status=415,
            )
        length = headers.get("content-length", "0")
        if length.isdecimal():
            self._check_size(int(length[:20]))

    def _check_size(self, size: int) -> None:
        limit = limits.MAX_BODY_BYTES
        if size > limit:
            text = f"The body is larger than this server takes ({limit} bytes)."
            raise RequestError(text, status=413)

    def _accepts(self, key: str) -> bool:
        keys = self._settings.api_keys
        matches = [hmac.compare_digest(key.encode(), accepted.encode()) for accepted in keys]
        return any(matches) or not keys

    def _hold(self, body: _Body, size: int) -> None:
        """Count bytes of a body; BusyError where all bodies are too many, and its client's too."""
        body.size += size
        self._held[body.client] += size
        share = limits.MAX_BODIES_BYTES // len(self._held)
        if self._held.total() > limits.MAX_BODIES_BYTES and self._held[body.client] > share:
            # By then each body has arrived or is refused.
            raise BusyError(
                f"The bodies of this server's requests have {limits.MAX_BODIES_BYTES} bytes, and "
                f"this client's more than its part of {share}. Try again in {BODY_TIMEOUT_S:g} s.",
                BODY_TIMEOUT_S,
            )

    async def _read(self, body: _Body, receive: Receive) -> None:
        """Receive all messages up to the end of the body."""
        messages = body.messages
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                while not messages or messages[-1].get("more_body", False):
                    messages.append(await receive())
                    self._hold(body, len(messages[-1].get("body", b"")))
                    self._check_size(body.size)
        except TimeoutError:
            text = f"The body did not arrive within {BODY_TIMEOUT_S:g} s."
            raise RequestError(text, status=408) from None
        if too_many_json_values(b"".join(message.get("body", b"") for message in messages)):
            text = f"The body holds more than {limits.MAX_JSON_VALUES} JSON values."
            raise RequestError(text, status=413)


def _is_protected(path: str) -> bool:
    return any(path == root or path.startswith(f"{root}/") for root in PROTECTED_PATHS)


def too_many_json_values(body: bytes) -> bool:
    """Whether a body holds more than `MAX_JSON_VALUES` values; takes much less time than parsing.

    Separators outside of strings are counted: there are at least as many as values, less one.
    Parsing blocks all other requests. Objects, lists and members of objects take several times as
    long as numbers, so they count `COMPOUND_VALUES` times.
    """
    if _count_separators(body) < limits.MAX_JSON_VALUES:
        return False
    if b"\0" not in body:  # which only UTF-16 and UTF-32 have, whose strings are not found here
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
        if body.count(b'"') < 2 * limits.MAX_JSON_VALUES:
            body = b"".join(body.split(b'"')[::2])
    return _count_separators(body) >= limits.MAX_JSON_VALUES


def _count_separators(body: bytes) -> int:
    return body.count(b",") + COMPOUND_VALUES * sum(map(body.count, (b":", b"[", b"{")))


def tenant(key: str) -> str:
    """Tenant of a request: a hash of its key."""
    return hashlib.sha256(key.encode()).hexdigest()[:16] if key else ""


def _key(headers: Headers) -> str:
    words = headers.get("authorization", "").split(maxsplit=1)  # by any spaces and tabs
    return words[1].strip() if len(words) == 2 and words[0].lower() == "bearer" else ""


def _host(header: str) -> str:
    """Host name without the port and the root's dot. IPv6 addresses keep their brackets."""
    name, colon, port = header.rpartition(":")
    return (name if colon and port.isdecimal() else header).lower().removesuffix(".")


def _replayed(messages: Sequence[Message], receive: Receive) -> Receive:
    """Replay received messages, then receive further ones."""
    remaining = iter(messages)

    async def replay() -> Message:
        message = next(remaining, None)
        return await receive() if message is None else message

    return replay
