"""Calls without credentials, or without a request, keep nobody out."""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

import tiny
from moaspec.remote.protocol import target_pb2 as pb
from moaspec.remote.protocol.grpc_transport import SERVICE
from moaspec.remote.server.auth import CallAuth
from moaspec.remote.server.listeners.admission import Admission
from moaspec.remote.server.listeners.grpc_server import GrpcServer, ServerOptions
from moaspec.remote.server.service import TargetService
from moaspec.remote.server.session_store import NoRoomError
from moaspec.remote.server.telemetry import Telemetry
from moaspec.support import limits
from moaspec.support.tasks import RefusalDelay

TOKEN = "good"
APART = [("grpc.use_local_subchannel_pool", 1)]
"""Channels with these options share no connection."""
GUARD = CallAuth(
    {hashlib.sha256(one.encode()).hexdigest(): name for one, name in ((TOKEN, "a"), ("b", "b"))}
)


def server() -> GrpcServer:
    return GrpcServer(TargetService(tiny.target()), ServerOptions(port=0, guard=GUARD))


async def described(at: GrpcServer, token: str = TOKEN) -> pb.Description:
    """What a client with a token is told, over a connection of its own."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{at.port}") as channel:
        describe = channel.unary_unary(
            f"/{SERVICE}/Describe", response_deserializer=pb.Description.FromString
        )
        return await describe(b"", metadata=[("authorization", f"Bearer {token}")], timeout=60)


@pytest.mark.slow
def test_open_calls_keep_nobody_out() -> None:
    async def run() -> None:
        async with server() as at, grpc.aio.insecure_channel(f"127.0.0.1:{at.port}") as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch
            watching = [watch(health_pb2.HealthCheckRequest(service=SERVICE)) for _ in range(300)]
            firsts = await asyncio.gather(
                *(call.read() for call in watching), return_exceptions=True
            )
            refused = [one for one in firsts if isinstance(one, grpc.aio.AioRpcError)]
            assert len(firsts) - len(refused) == limits.MAX_OPEN_CALLS_PER_ADDRESS
            # More than a connection may have at a time are refused by gRPC itself.
            assert {one.code() for one in refused} <= {
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                grpc.StatusCode.UNAVAILABLE,
            }
            assert (await described(at)).protocol
            for call in watching:
                call.cancel()

    asyncio.run(run())


@pytest.mark.slow
def test_messages_beyond_all_limits_are_not_read() -> None:
    async def run() -> None:
        async with server() as at, grpc.aio.insecure_channel(f"127.0.0.1:{at.port}") as channel:
            frame = bytes(at.service.capabilities.limits.max_bytes + 1)
            call = channel.unary_stream(f"/{SERVICE}/Generate")(
                frame, metadata=[("authorization", f"Bearer {TOKEN}")]
            )
            assert await call.code() == grpc.StatusCode.RESOURCE_EXHAUSTED

    asyncio.run(run())


def test_open_calls_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_OPEN_CALL_S", 0.2)

    async def run() -> None:
        async with server() as at, grpc.aio.insecure_channel(f"127.0.0.1:{at.port}") as channel:
            call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                _ = [one async for one in call]
            assert ended.value.code() == grpc.StatusCode.UNAVAILABLE

    asyncio.run(run())


def test_reflection_still_answers() -> None:
    async def run() -> None:
        async with server() as at, grpc.aio.insecure_channel(f"127.0.0.1:{at.port}") as channel:
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            asked = reflection_pb2.ServerReflectionRequest(list_services="")
            answers = [one async for one in stub.ServerReflectionInfo(iter([asked]))]
            names = [one.name for one in answers[0].list_services_response.service]
            assert SERVICE in names

    asyncio.run(run())


@pytest.mark.slow
def test_one_token_cannot_take_all_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even with calls that never send their request; those end, too."""
    monkeypatch.setattr(limits, "MAX_REQUEST_S", 5)

    async def run() -> None:
        async with server() as at, AsyncExitStack() as channels:
            silent = []
            for _ in range(3):
                channel = grpc.aio.insecure_channel(f"127.0.0.1:{at.port}", APART)
                await channels.enter_async_context(channel)
                describe = channel.stream_unary(f"/{SERVICE}/Describe")
                token = [("authorization", f"Bearer {TOKEN}")]
                silent += [describe(metadata=token) for _ in range(100)]
            codes = asyncio.gather(*(call.code() for call in silent))
            assert (await described(at, "b")).protocol
            assert set(await codes) == {
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                grpc.StatusCode.DEADLINE_EXCEEDED,
            }

    asyncio.run(run())


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""HTTP/2's, and empty settings: all that a connection without a call says."""


def allow_open_files(number: int) -> None:
    """Let this process open so many files; skips where the system does not."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY != hard < number:
        pytest.skip(f"the system allows {hard} open files")
    if resource.RLIM_INFINITY != soft < number:
        resource.setrlimit(resource.RLIMIT_NOFILE, (number, hard))


def test_five_hundred_connections_keep_nobody_out() -> None:
    allow_open_files(2000)  # both ends of each connection are here

    async def run() -> None:
        async with server() as at:
            held = [await asyncio.open_connection("127.0.0.1", at.port) for _ in range(500)]
            for _, writer in held[::2]:
                writer.write(PREFACE)
            assert (await described(at)).protocol
            for _, writer in held:
                writer.transport.abort()

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "said"), [("MAX_HANDSHAKE_S", b""), ("MAX_GRPC_IDLE_S", PREFACE)]
)
def test_connections_without_calls_end(
    monkeypatch: pytest.MonkeyPatch, limit: str, said: bytes
) -> None:
    monkeypatch.setattr(limits, limit, 1)

    async def run() -> None:
        async with server() as at:
            reader, writer = await asyncio.open_connection("127.0.0.1", at.port)
            writer.write(said)
            async with asyncio.timeout(60):
                while await reader.read(1000):
                    pass
            writer.close()

    asyncio.run(run())


def test_so_many_connections_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_GRPC_CONNECTIONS", 4)

    async def run() -> None:
        async with server() as at:
            held = [await asyncio.open_connection("127.0.0.1", at.port) for _ in range(4)]
            for reader, writer in held:
                writer.write(PREFACE)
                assert await reader.read(1)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await described(at)
            assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
            for _, writer in held:
                writer.transport.abort()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("open_to_all", "most"), [(True, limits.MAX_OPEN_CALLS_PER_ADDRESS), (False, 5)]
)
def test_one_address_cannot_take_all_calls(open_to_all: bool, most: int) -> None:
    """Where it has shown no token, or where there are none."""

    async def run() -> None:
        admission = Admission(CallAuth(), Telemetry(), max_calls=10, call_s=3600.0)

        def admitted(address: str) -> AbstractAsyncContextManager[Any]:
            if open_to_all:
                return admission.open_call(address)
            return admission.call(None, None, address)

        async with AsyncExitStack() as held:
            for _ in range(most):
                await held.enter_async_context(admitted("192.0.2.1"))
            with pytest.raises(NoRoomError):
                await held.enter_async_context(admitted("192.0.2.1"))
            await held.enter_async_context(admitted("192.0.2.2"))

    asyncio.run(run())


def test_wrong_tokens_are_answered_late_but_do_not_pile_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "WRONG_TOKEN_S", 3600.0)

    async def run() -> None:
        down = RefusalDelay()
        late = [asyncio.create_task(down.wait()) for _ in range(limits.MAX_WRONG_TOKENS)]
        await asyncio.sleep(0)
        await down.wait()
        assert not any(one.done() for one in late)
        for one in late:
            one.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        assert down._waiting == 0

    asyncio.run(run())
