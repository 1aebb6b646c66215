"""Connections over gRPC, which carries the frames unchanged."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message

from moaspec.errors import LinkError, RefusedError
from moaspec.remote.protocol.transport import STREAM_S, AddressedTransport
from moaspec.remote.protocol.wire import refusal
from moaspec.support.limits import MAX_FRAME_BYTES
from moaspec.support.ports import joined_address

SERVICE = "moaspec.remote.v1.Target"

REFUSALS = frozenset(
    {
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)
"""Statuses after which a device does not try again."""

OPTIONS = (
    ("grpc.max_receive_message_length", MAX_FRAME_BYTES),
    ("grpc.max_send_message_length", MAX_FRAME_BYTES),
    # We reconnect ourselves: gRPC's own pauses grow to minutes.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    # A proxy in the environment is for HTTP.
    ("grpc.enable_http_proxy", 0),
)


class GrpcTransport(AddressedTransport):
    """Connections to a `moaspec target-server`, whose address is HOST:PORT."""

    def _prepare(self) -> None:
        self._credentials.check(self.address)
        self._credentials.tls()  # gRPC would only report that it cannot connect

    async def connect(self) -> GrpcConnection:
        channel = self._channel()
        call = channel.stream_stream(f"/{SERVICE}/Converse")(
            metadata=tuple(self._headers.items()), timeout=STREAM_S
        )
        connection = GrpcConnection(channel, call)
        try:
            with translated_errors():
                # The server accepts at once, or says why not.
                await call.wait_for_connection()
        except BaseException:
            await asyncio.shield(connection.close())
            raise
        return connection

    async def _call(self, name: str, request: Message, timeout_s: float) -> AsyncGenerator[bytes]:
        async with self._channel() as channel:
            call = channel.unary_stream(f"/{SERVICE}/{name}")(
                request.SerializeToString(),
                metadata=tuple(self._headers.items()),
                timeout=timeout_s,
            )
            with translated_errors():
                async for frame in call:
                    yield frame

    def _channel(self) -> grpc.aio.Channel:
        options: list[tuple[str, Any]] = list(OPTIONS)
        secure, name = self._credentials.channel(), self._credentials.server_name
        at, (host, _, port) = self.address, self.address.rpartition(":")
        if self._ip:
            at = joined_address(self._ip, port)
            options.append(("grpc.default_authority", self.address))
            name = name or host.strip("[]")
        if name is not None and secure is not None:
            options.append(("grpc.ssl_target_name_override", name))
        if secure is None:
            return grpc.aio.insecure_channel(at, options)
        return grpc.aio.secure_channel(at, secure, options)


class GrpcConnection:
    """A `Connection`: one stream of its own channel."""

    def __init__(self, channel: grpc.aio.Channel, call: Any) -> None:
        self._channel, self._call = channel, call

    async def send(self, frame: bytes) -> None:
        with translated_errors():
            await self._call.write(frame)

    async def receive(self) -> bytes:
        with translated_errors():
            frame = await self._call.read()
        if frame is grpc.aio.EOF:
            with translated_errors():
                raise LinkError(f"The server ended the connection ({await self._call.code()}).")
        return bytes(frame)

    async def close(self) -> None:
        self._call.cancel()
        with contextlib.suppress(Exception):
            await self._channel.close(None)


@contextlib.contextmanager
def translated_errors() -> Iterator[None]:
    """Translate gRPC's errors into ours."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        if "CERTIFICATE_VERIFY_FAILED" in (error.details() or ""):
            raise RefusedError(
                "The server's certificate is not signed by the CA of these credentials, or is for "
                "another name."
            ) from error
        if error.code() in REFUSALS:
            raise RefusedError(refusal(error.details() or "")) from error
        raise LinkError(f"The link broke: {error.code().name}.") from error
    except (grpc.aio.UsageError, asyncio.InvalidStateError) as error:
        raise LinkError("The connection was closed.") from error
