"""Connections over WebSockets: each binary message is one frame.

A call is the path that its connection is opened with, `/v1/converse` for `Converse`. Calls with one
request send it as the first message. The server ends a call with a close code and the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncGenerator, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import websockets.asyncio.client
from google.protobuf.message import Message
from websockets.asyncio.connection import Connection as WebSocket
from websockets.exceptions import (
    ConnectionClosed,
    ConnectionClosedOK,
    InvalidHandshake,
    InvalidStatus,
)
from websockets.typing import Subprotocol

from moaspec_core.errors import InputError, LinkError, RefusedError
from moaspec_core.support.limits import MAX_FRAME_BYTES
from moaspec_core.support.tasks import time_limit
from moaspec_edge.protocol import target_pb2 as pb
from moaspec_edge.protocol import wire
from moaspec_edge.protocol.transport import ServerTransport
from moaspec_edge.server.auth import Credentials

SUBPROTOCOL = Subprotocol("moaspec.v1")
"""The subprotocol that both sides agree on in the handshake."""

UNKNOWN_CLIENT, FORBIDDEN, INVALID, REFUSED, TOO_BIG, BUSY = 4401, 4403, 4400, 4412, 1009, 1013
"""Close codes; those above 4000 are HTTP's status and 4000."""

REFUSALS = frozenset({UNKNOWN_CLIENT, FORBIDDEN, INVALID, REFUSED, TOO_BIG})
"""Close codes after which a device does not try again."""

MAX_REASON_BYTES = 123
"""Of a close frame's reason, see RFC 6455, section 5.5."""

CLOSE_S = 0.2
"""Time that a device waits for the server to confirm that a connection ends."""

AFFINITY = "moaspec-affinity"
"""The header with the hash of a text's first tokens, by which load balancers choose a server."""

TEXT_S = 3600.0
"""Deadline of a text that the server writes alone."""

UPDATE_S = 600.0
"""Deadline of an update of the drafter."""

CALL_S = 10.0
"""Deadline of a call that is answered at once."""


class WebSocketTransport(ServerTransport):
    """Calls to a `moaspec target-server`.

    Args:
        address: ws://HOST:PORT, or wss://HOST:PORT for TLS; a path in it precedes the calls' paths.
        credentials: with wss:// their CAs are by default this system's.
        affinity: sent with every call, for load balancers that hash it.

    Raises:
        InputError: the address or the credentials cannot be used.
    """

    def __init__(
        self,
        address: str,
        credentials: Credentials | None = None,
        *,
        affinity: str = "",
    ) -> None:
        self._credentials = _checked(address, credentials or Credentials())
        self.address = address.rstrip("/")
        self._tls = self._credentials.tls()
        token = self._credentials.token
        self._headers = {} if token is None else {"authorization": f"Bearer {token}"}
        if affinity:
            self._headers[AFFINITY] = affinity

    async def describe(self) -> pb.Description:
        asked = self._call("Describe", pb.DescribeRequest(), CALL_S)
        async with contextlib.aclosing(asked) as frames:
            async for frame in frames:
                return wire.parse(frame, pb.Description())
        raise LinkError("The server ended the call without an answer.")

    async def generate(self, request: pb.GenerateRequest) -> AsyncGenerator[pb.Generated]:
        async with contextlib.aclosing(self._call("Generate", request, TEXT_S)) as frames:
            async for frame in frames:
                yield wire.parse(frame, pb.Generated())

    async def weights(self, packing: str = "") -> AsyncGenerator[pb.Weights]:
        asked = self._call("Update", pb.DescribeRequest(packing=packing), UPDATE_S)
        async with contextlib.aclosing(asked) as frames:
            async for frame in frames:
                yield wire.parse(frame, pb.Weights())

    async def connect(self) -> WebSocketConnection:
        return await self._open("Converse")

    async def _call(self, name: str, request: Message, timeout_s: float) -> AsyncGenerator[bytes]:
        """Make a call that has one request; yields the frames of its answers."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s

        def rest() -> AbstractAsyncContextManager[None]:
            return time_limit(deadline - loop.time(), "The server took too long.")

        async with rest():
            connection = await self._open(name)
        try:
            async with rest():
                await connection.send(request.SerializeToString())
            while True:
                async with rest():
                    frame = await connection.receive_or_end()
                if frame is None:
                    return
                yield frame
        finally:
            await connection.close()

    async def _open(self, call: str) -> WebSocketConnection:
        with translated_errors():
            opened = await _Connect(
                f"{self.address}/v1/{call.lower()}",
                additional_headers=self._headers,
                subprotocols=[SUBPROTOCOL],
                compression=None,
                user_agent_header=None,
                # A proxy in the environment is for HTTP.
                proxy=None,
                # Those who call this have deadlines; silent links are found by heartbeats.
                open_timeout=None,
                ping_interval=None,
                close_timeout=CLOSE_S,
                max_size=MAX_FRAME_BYTES,
                max_queue=2,
                **self._encryption(),
            )
        connection = WebSocketConnection(opened)
        if opened.subprotocol != SUBPROTOCOL:
            await connection.close()
            raise RefusedError("What answers there is no `moaspec target-server`.")
        return connection

    def _encryption(self) -> dict[str, Any]:
        if self._tls is None:
            return {}
        name = self._credentials.server_name
        return {"ssl": self._tls, **({} if name is None else {"server_hostname": name})}


class WebSocketConnection:
    """A `Connection` over one WebSocket, on either side."""

    def __init__(self, inner: WebSocket) -> None:
        self._inner = inner

    async def send(self, frame: bytes) -> None:
        if len(frame) > MAX_FRAME_BYTES:
            raise RefusedError(
                f"A message of {len(frame)} bytes is larger than the largest, {MAX_FRAME_BYTES}. "
                "Send a shorter text, or a smaller grammar."
            )
        with translated_errors():
            await self._inner.send(frame)

    async def receive(self) -> bytes:
        with translated_errors():
            return await self._inner.recv(decode=False)

    async def receive_or_end(self) -> bytes | None:
        """Receive a frame; None when the other side has ended the call as it should."""
        with translated_errors():
            try:
                return await self._inner.recv(decode=False)
            except ConnectionClosedOK as error:
                # Servers that stop say 1001, which is no error to the library.
                if error.rcvd is not None and error.rcvd.code == 1000:
                    return None
                raise

    async def close(self, code: int = 1000, reason: str = "", timeout_s: float = CLOSE_S) -> None:
        """Close the connection; see `Connection`.

        Args:
            reason: cut to `MAX_REASON_BYTES`.
            timeout_s: time until the connection is aborted, whether or not the other side reads.
        """
        told = reason.encode()[:MAX_REASON_BYTES].decode(errors="ignore")
        try:
            async with asyncio.timeout(timeout_s):
                await self._inner.close(code, told)
        except TimeoutError:
            pass
        finally:
            self._inner.transport.abort()


class _Connect(websockets.asyncio.client.connect):
    """Follows no redirects: the user has named the server that may read the text."""

    def process_redirect(self, exc: Exception) -> Exception:
        return exc


def _checked(address: str, credentials: Credentials) -> Credentials:
    """Check an address and the credentials for it; returns them as they are used."""
    try:
        parts = urlsplit(address)
        port = parts.port or 0
        (parts.hostname or "").encode("idna")
    except ValueError:  # also of a name that has an empty or a long part
        parts, port = urlsplit(""), 0
    plain = parts.hostname and not (parts.query or parts.fragment or "@" in parts.netloc)
    if not plain or parts.scheme not in ("ws", "wss"):
        raise InputError(
            f"A server's address is ws://HOST:PORT or wss://HOST:PORT, got {address!r}."
        )
    if parts.scheme == "wss":
        return replace(credentials, ca=credentials.ca or "system")
    if credentials.ca is not None:
        raise InputError(f"{address} has no TLS. Connect to wss://, or name no ca.")
    credentials.check(f"{parts.hostname}:{port}")
    return credentials


@contextlib.contextmanager
def translated_errors() -> Iterator[None]:
    """Translate errors of WebSockets into ours."""
    try:
        yield
    except ConnectionClosed as error:
        if error.rcvd is not None and error.rcvd.code in REFUSALS:
            raise RefusedError(wire.refusal(error.rcvd.reason)) from error
        if error.rcvd is None and error.sent is not None and error.sent.code == TOO_BIG:
            raise LinkError(f"A message is beyond {MAX_FRAME_BYTES >> 20} MiB.") from error
        code = "no close code" if error.rcvd is None else f"close code {error.rcvd.code}"
        raise LinkError(f"The link broke: {code}.") from error
    except InvalidStatus as error:
        status = error.response.status_code
        if status in (408, 429) or status >= 500:
            raise LinkError(f"The server answers with HTTP status {status}.") from error
        if status < 400:
            raise RefusedError(
                f"What answers there is no `moaspec target-server`: HTTP status {status}."
            ) from error
        raise RefusedError(f"The server refuses: HTTP status {status}.") from error
    except ssl.SSLCertVerificationError as error:
        raise RefusedError(
            "The server's certificate is not signed by the CA of these credentials, or is for "
            "another name."
        ) from error
    except (InvalidHandshake, OSError, EOFError) as error:
        raise LinkError(f"The server cannot be reached: {type(error).__name__}.") from error
