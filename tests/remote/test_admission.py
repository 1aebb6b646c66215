"""Calls without credentials, or without a request, keep nobody out."""

from __future__ import annotations

import asyncio
import hashlib

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

import tiny
from moaspec import limits, slow
from moaspec.remote import GrpcServer, Guard, ServerOptions, TargetService
from moaspec.remote import target_pb2 as pb
from moaspec.remote.grpc_transport import SERVICE

TOKEN = "good"
GUARD = Guard(
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


def test_open_calls_keep_nobody_out() -> None:
    async def run() -> None:
        async with server() as at, grpc.aio.insecure_channel(f"127.0.0.1:{at.port}") as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch
            watching = [watch(health_pb2.HealthCheckRequest(service=SERVICE)) for _ in range(300)]
            firsts = await asyncio.gather(
                *(call.read() for call in watching), return_exceptions=True
            )
            refused = [one for one in firsts if isinstance(one, grpc.aio.AioRpcError)]
            assert len(firsts) - len(refused) == limits.MAX_OPEN_CALLS
            assert {one.code() for one in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
            assert (await described(at)).protocol
            for call in watching:
                call.cancel()

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
        async with server() as at, grpc.aio.insecure_channel(f"127.0.0.1:{at.port}") as channel:
            describe = channel.stream_unary(f"/{SERVICE}/Describe")
            silent = [describe(metadata=[("authorization", f"Bearer {TOKEN}")]) for _ in range(300)]
            codes = asyncio.gather(*(call.code() for call in silent))
            assert (await described(at, "b")).protocol
            assert set(await codes) == {
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                grpc.StatusCode.DEADLINE_EXCEEDED,
            }

    asyncio.run(run())


def test_wrong_tokens_are_answered_late_but_do_not_pile_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "WRONG_TOKEN_S", 3600.0)

    async def run() -> None:
        down = slow.SlowDown()
        late = [asyncio.create_task(down.wait()) for _ in range(limits.MAX_WRONG_TOKENS)]
        await asyncio.sleep(0)
        await down.wait()
        assert not any(one.done() for one in late)
        for one in late:
            one.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        assert down._waiting == 0

    asyncio.run(run())
