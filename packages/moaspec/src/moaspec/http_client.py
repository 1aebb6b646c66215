"""Clients of HTTP servers that a user names. What a server sends is limited in size and time."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx

from moaspec_core.errors import InputError, ServerError
from moaspec_core.support.proxies import Proxy, proxy_for

MAX_SHOWN = 200  # characters of a server's message that are shown
MAX_ERROR_BYTES = 1 << 16  # of an answer that is an error
_DONE = b"[DONE]"

T = TypeVar("T")


class BadAnswerError(ServerError):
    """A server's answer is too large, takes too long, or has another form."""


class SlowAnswerError(BadAnswerError):
    """A server has not answered in time; it may still work on the request."""


def require_url(option: str, url: str) -> None:
    """InputError for text that is no URL of an HTTP server."""
    try:
        known, port = httpx.URL(url), urlsplit(url).port
        known.host.encode("idna")
    except (httpx.InvalidURL, ValueError) as error:
        raise InputError(f"{option} {url!r} is no URL: {error}.") from error
    spaced = url != "".join(url.split())
    if known.scheme not in ("http", "https") or not known.host or port == 0 or spaced:
        raise InputError(
            f"{option} {url!r} is no URL of a server; it has the form http://localhost:8000."
        )


class HttpClient:
    """A client of one server; used inside an event loop.

    Args:
        option: that names the server, for messages.
        url: base URL, with or without /v1.
        key: API key; "" sends none.
        connect_s: time to connect.
        connections: at the same time; further requests wait.

    Raises:
        InputError: no URL, or a proxy of the environment that cannot be used.
    """

    def __init__(
        self, option: str, url: str, key: str = "", *, connect_s: float, connections: int = 1
    ) -> None:
        require_url(option, url)
        self.base = url.rstrip("/").removesuffix("/v1")
        self.proxy: Proxy | None = proxy_for(self.base)
        limits = httpx.Limits(max_connections=connections)
        headers = {"Accept-Encoding": "identity"}  # packed bytes may become many more
        if key:
            headers["Authorization"] = f"Bearer {key}"
        self._http = httpx.AsyncClient(
            base_url=self.base,
            headers=headers,
            timeout=httpx.Timeout(None, connect=connect_s),
            # With a transport of its own the library reads no proxies from the environment.
            transport=httpx.AsyncHTTPTransport(
                limits=limits, proxy=None if self.proxy is None else self.proxy.url
            ),
        )

    def __str__(self) -> str:
        """The server, and the proxy on the way to it, for messages."""
        shown = str(httpx.URL(self.base).copy_with(userinfo=b""))
        return shown if self.proxy is None else f"{shown} (through the proxy {self.proxy})"

    async def close(self) -> None:
        await self._http.aclose()

    async def ask(
        self,
        method: str,
        path: str,
        fields: Mapping[str, Any] | None = None,
        *,
        most: int,
        s: float,
    ) -> httpx.Response:
        """A whole answer.

        Args:
            most: bytes of its body.
            s: seconds until its last byte.

        Raises:
            SlowAnswerError: more seconds.
            BadAnswerError: more bytes, or a body that is packed.
            httpx.TransportError: the server cannot be reached, or breaks the protocol.
        """
        async with self._in_time(s), self._opened(method, path, fields) as answer:
            body = await self._read(answer, most)
            return httpx.Response(answer.status_code, headers=answer.headers, content=body)

    async def events(
        self, path: str, fields: Mapping[str, Any], *, most: int, line: int, s: float
    ) -> AsyncGenerator[bytes]:
        """Yield the data of server-sent events, until [DONE].

        Args:
            most: bytes of all events.
            line: bytes of one.
            s: seconds until the first event, and between two.

        Raises:
            ServerError: an answer of another status than 200.
            BadAnswerError: more bytes or seconds, or an end without [DONE].
            httpx.TransportError: the connection broke.
        """
        opened = self._opened("POST", path, fields)
        async with self._in_time(s):
            answer = await opened.__aenter__()
        try:
            if answer.status_code != httpx.codes.OK:
                async with self._in_time(s):
                    text = await self._read(answer, MAX_ERROR_BYTES)
                raise ServerError(f"{self} answered {refusal(answer, text)}")
            async with aclosing(self._lines(answer, most, line)) as lines:
                while True:
                    async with self._in_time(s):
                        data = await _next_data(lines)
                    if data is None:
                        raise BadAnswerError(f"{self} ended its answer early: it sent no [DONE].")
                    if data == _DONE:
                        return
                    yield data
        finally:
            await opened.__aexit__(None, None, None)

    @asynccontextmanager
    async def _opened(
        self, method: str, path: str, fields: Mapping[str, Any] | None
    ) -> AsyncIterator[httpx.Response]:
        try:
            async with self._http.stream(method, path, json=fields) as answer:
                yield answer
        except UnicodeEncodeError as error:
            raise InputError("The request holds text that is no Unicode.") from error

    async def _read(self, answer: httpx.Response, most: int) -> bytes:
        found = bytearray()
        async with aclosing(self._chunks(answer)) as chunks:
            async for chunk in chunks:
                found += chunk
                if len(found) > most:
                    raise self._beyond(most, "an answer")
        return bytes(found)

    async def _lines(self, answer: httpx.Response, most: int, line: int) -> AsyncGenerator[bytes]:
        rest, total = bytearray(), 0
        async with aclosing(self._chunks(answer)) as chunks:
            async for chunk in chunks:
                total += len(chunk)
                if total > most:
                    raise self._beyond(most, "an answer")
                *whole, last = chunk.split(b"\n")
                for part in whole:
                    yield bytes(rest + part).rstrip(b"\r")
                    rest.clear()
                rest += last
                if len(rest) > line:
                    raise self._beyond(line, "one line of an answer")
        yield bytes(rest)

    def _chunks(self, answer: httpx.Response) -> AsyncGenerator[bytes]:
        if answer.headers.get("content-encoding", "identity").lower() not in ("identity", ""):
            raise BadAnswerError(f"{self} packs its answers, which it was asked not to.")
        chunks: Any = answer.aiter_raw()  # a generator, says the library's code
        return chunks

    def _beyond(self, most: int, what: str) -> BadAnswerError:
        size = f"{most >> 20} MiB" if most >= 1 << 20 else f"{most >> 10} KiB"
        return BadAnswerError(f"{self} sends more than {size} in {what}.")

    @asynccontextmanager
    async def _in_time(self, s: float) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(s):
                yield
        except TimeoutError as error:
            raise SlowAnswerError(f"{self} has not answered within {s:g} s.") from error


async def _next_data(lines: AsyncIterator[bytes]) -> bytes | None:
    """The data of the next event; None at the end."""
    async for line in lines:
        if line.startswith(b"data:"):
            return line.removeprefix(b"data:").strip()
    return None


def refusal(answer: httpx.Response, body: bytes) -> str:
    """The status of an answer that is an error, and why, in one short line."""
    if answer.has_redirect_location:
        place = one_line(answer.headers["location"])
        return f"{answer.status_code}: it redirects to {place}, which is not followed."
    return f"{answer.status_code}: {message(body) or 'without a message'}"


def message(body: bytes) -> str:
    """A server's own words of an error, in one short line of printable characters."""
    text = body.decode(errors="replace")
    try:
        found = json.loads(text)
        error = found.get("error", found)
        text = error if isinstance(error, str) else error.get("message") or found.get("detail")
    except (ValueError, AttributeError, RecursionError):
        pass
    return one_line(str(text))


def one_line(text: str) -> str:
    """The beginning of a text, without control characters."""
    shown = " ".join(text[: 4 * MAX_SHOWN].split())[:MAX_SHOWN]
    return "".join(char if char.isprintable() else "\ufffd" for char in shown)


@contextmanager
def broken_connection(server: HttpClient) -> Iterator[None]:
    """Turn the library's errors into ServerError, which names the server."""
    try:
        yield
    except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
        cause = one_line(str(error)).rstrip(".") or type(error).__name__
        raise ServerError(f"The connection to {server} broke: {cause}.") from error


class BlockingLoop:
    """Runs coroutines for code that has no event loop; an interrupt cancels them."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        task = self._loop.create_task(work)
        try:
            return self._loop.run_until_complete(task)
        except BaseException:
            task.cancel()
            self._loop.run_until_complete(asyncio.wait([task]))
            raise

    def close(self) -> None:
        # Ends of generators that the HTTP library left behind are tasks of their own.
        while left := asyncio.all_tasks(self._loop):
            self._loop.run_until_complete(asyncio.wait(left))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()
