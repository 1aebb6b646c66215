"""Connections over gRPC, which carries the frames unchanged."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import grpc
import grpc.aio

from moaspec.errors import LinkError, RefusedError
from moaspec.remote.protocol import target_pb2 as pb
from moaspec.remote.protocol.transport import AFFINITY, CALL_S, STREAM_S, UPDATE_S
from moaspec.remote.protocol.wire import one_line
from moaspec.remote.server.auth import Credentials
from moaspec.support.limits import MAX_FRAME_BYTES

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


class GrpcTransport:
    """Connections to a `moaspec target-server`.

    Args:
        address: host:port.
        credentials: of this device.
        ip: connects to this address instead of looking up the host.
        affinity: sent with every call, for load balancers that hash it.

    Raises:
        InputError: a token would be sent without encryption.
    """

    def __init__(
        self,
        address: str,
        credentials: Credentials | None = None,
        *,
        ip: str = "",
        affinity: str = "",
    ) -> None:
        self.address, self._credentials = address, credentials or Credentials()
        self._ip, self._affinity = ip, affinity
        self._credentials.check(address)

    async def connect(self) -> GrpcConnection:
        """Open a connection; see `Transport`."""
        channel = self._channel()
        call = channel.stream_stream(f"/{SERVICE}/Converse")(
            metadata=self._metadata(), timeout=STREAM_S
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

    async def describe(self) -> pb.Description:
        """Ask the server to describe itself; see `ServerTransport`."""
        async with self._channel() as channel:
            ask = channel.unary_unary(
                f"/{SERVICE}/Describe", response_deserializer=pb.Description.FromString
            )
            with translated_errors():
                return await ask(b"", metadata=self._metadata(), timeout=CALL_S)

    async def generate(
        self, request: pb.GenerateRequest, timeout_s: float = STREAM_S
    ) -> AsyncGenerator[pb.Generated]:
        """Let the server decode alone; see `ServerTransport`."""
        async with self._channel() as channel:
            call = channel.unary_stream(
                f"/{SERVICE}/Generate",
                request_serializer=pb.GenerateRequest.SerializeToString,
                response_deserializer=pb.Generated.FromString,
            )(request, metadata=self._metadata(), timeout=timeout_s)
            with translated_errors():
                async for message in call:
                    yield message

    async def weights(self) -> AsyncGenerator[pb.Weights]:
        """The newest drafter's weights; see `ServerTransport`."""
        async with self._channel() as channel:
            call = channel.unary_stream(
                f"/{SERVICE}/Update", response_deserializer=pb.Weights.FromString
            )(b"", metadata=self._metadata(), timeout=UPDATE_S)
            with translated_errors():
                async for message in call:
                    yield message

    def _channel(self) -> grpc.aio.Channel:
        options: list[tuple[str, Any]] = list(OPTIONS)
        secure, name = self._credentials.channel(), self._credentials.server_name
        at, (host, _, port) = self.address, self.address.rpartition(":")
        if self._ip:
            at = f"[{self._ip}]:{port}" if ":" in self._ip else f"{self._ip}:{port}"
            options.append(("grpc.default_authority", self.address))
            name = name or host.strip("[]")
        if name is not None and secure is not None:
            options.append(("grpc.ssl_target_name_override", name))
        if secure is None:
            return grpc.aio.insecure_channel(at, options)
        return grpc.aio.secure_channel(at, secure, options)

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        token = self._credentials.token
        own = () if token is None else (("authorization", f"Bearer {token}"),)
        return (*own, (AFFINITY, self._affinity)) if self._affinity else own


class GrpcConnection:
    """A `Connection`: one stream of its own channel."""

    def __init__(self, channel: grpc.aio.Channel, call: Any) -> None:
        self._channel, self._call = channel, call

    async def send(self, frame: bytes) -> None:
        """Send a frame; see `Connection`."""
        with translated_errors():
            await self._call.write(frame)

    async def receive(self) -> bytes:
        """Receive a frame; see `Connection`."""
        with translated_errors():
            frame = await self._call.read()
        if frame is grpc.aio.EOF:
            with translated_errors():
                raise LinkError(f"The server ended the connection ({await self._call.code()}).")
        return bytes(frame)

    async def close(self) -> None:
        """Close the channel; see `Connection`."""
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
            raise RefusedError(f"The server refuses: {one_line(error.details() or '')}") from error
        raise LinkError(f"The link broke: {error.code().name}.") from error
    except (grpc.aio.UsageError, asyncio.InvalidStateError) as error:
        raise LinkError("The connection was closed.") from error
