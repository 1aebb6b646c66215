"""A device takes new versions of a server's drafter; no text is cut, and none changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import bundles
import moaspec
import tiny
from moaspec.generation.drafters import load_drafter
from moaspec.model.checkpoint.moa_checkpoint import device_part, fingerprint, save_drafter
from moaspec.model.moa import MoADrafter
from moaspec.target.target import Target
from moaspec_core.drafting.tree_shapes import Chain
from moaspec_core.errors import LinkError, RefusedError, WireError
from moaspec_core.sampling.params import GREEDY, SamplingParams
from moaspec_edge.device.bundle import DeviceBundle, export_bundle, load_device
from moaspec_edge.device.local_parts import LocalDevice
from moaspec_edge.device.remote_session import RemoteOptions, RemoteSession
from moaspec_edge.http import edge_source
from moaspec_edge.http.edge_source import EdgeSource
from moaspec_edge.protocol import target_pb2 as pb
from moaspec_edge.protocol import wire
from moaspec_edge.protocol.fleet import Fleet
from moaspec_edge.protocol.transport import InProcessTransport
from moaspec_edge.protocol.websocket_transport import WebSocketTransport
from moaspec_edge.server import device_weights as device_weights_module
from moaspec_edge.server.listeners.websocket_server import ServerOptions, TargetServer
from moaspec_edge.server.server_session import TurnRequest
from moaspec_edge.server.service import TargetService

PROMPT = tiny.PROMPTS[1]
OPTIONS: dict[str, Any] = {"max_new_tokens": tiny.NEW_TOKENS, "temperature": 0.0}


@pytest.fixture(scope="module", params=[False, True], ids=["bf16", "int8"])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("device")
    return bundles.save_bundle(directory, int8=request.param, sa_layers=3)


def served(bundle: Path) -> tuple[Target, MoADrafter, MoADrafter]:
    """Target and drafter of the server, and a version with another decoder."""
    target = moaspec.load_target(bundle.parent / "target", dtype="float32")
    first = load_drafter(bundle.parent / "drafter", target=target)
    layers = first.config.self_attention_layers
    version = tiny.random_drafter(target, seed=9, sa_layers=layers)
    version.encoder.load_state_dict(first.encoder.state_dict())
    return target, first, version


def decoder_weight(module: Any) -> torch.Tensor:
    weight: torch.Tensor = module.decoder.self_attention.mlp.down_proj.weight
    return weight


@pytest.mark.slow
def test_a_running_session_takes_a_version(bundle: Path) -> None:
    """The turn in which it arrives goes on, the next one drafts with it."""
    target, first, version = served(bundle)
    plain = moaspec.generate(target, PROMPT, **OPTIONS).token_ids

    async def run() -> None:
        service = TargetService(target, first)
        async with TargetServer(service, ServerOptions(port=0)) as server:
            transport = Fleet.of(WebSocketTransport(server.url))
            device = load_device(bundle, dtype="float32")
            session = RemoteSession(device, transport, RemoteOptions(draft=Chain(3)))
            assert not await device.update(transport)  # there is none yet
            text: list[int] = []
            async for event in session.stream(PROMPT, **OPTIONS):
                text[event.start :] = event.token_ids
                if device.version == device.fingerprint:
                    service.adopt(version, fingerprint(version))
                    assert await device.update(transport)
            assert text == plain
            assert device.version == fingerprint(version) != device.fingerprint
            assert not await device.update(transport)  # it has the newest
            old = session._drafting.module  # type: ignore[attr-defined]
            after = [*PROMPT, *plain[:4]]
            assert (await session.generate(after, **OPTIONS)).token_ids[: len(plain) - 4] == plain[
                4:
            ]
            new = session._drafting.module  # type: ignore[attr-defined]
            assert new is not old
            expected = decoder_weight(version).bfloat16().float()
            assert torch.equal(decoder_weight(new), expected)
            # A bundle of the first drafter opens as before, and drafts with the old version.
            late = RemoteSession(load_device(bundle, dtype="float32"), transport)
            assert (await late.generate(PROMPT, **OPTIONS)).token_ids == plain
            await late.close()
            await session.close()

    asyncio.run(run())


def test_bundles_of_all_versions_are_served(tmp_path: Path) -> None:
    """Also those of versions that a server made before its last start."""
    bundle = bundles.save_bundle(tmp_path)
    target, first, version = served(bundle)
    save_drafter(version, tmp_path / "version")
    export_bundle(tmp_path / "target", tmp_path / "version", tmp_path / "later")

    async def run() -> None:
        service = TargetService(target, version)
        service.capabilities.add_versions(fingerprint(first), fingerprint(version))
        assert service.capabilities.describe().newest == fingerprint(version)
        for directory in (bundle, tmp_path / "later"):
            session = RemoteSession(
                load_device(directory, dtype="float32"), InProcessTransport(service)
            )
            assert len((await session.generate(PROMPT, **OPTIONS)).token_ids) == tiny.NEW_TOKENS
            await session.close()
        session = RemoteSession(
            load_device(bundle, dtype="float32"),
            InProcessTransport(TargetService(target, version)),
        )
        with pytest.raises(RefusedError, match="is not the one whose encoder runs here"):
            await session.generate(PROMPT, **OPTIONS)
        await session.close()
        await service.stop()

    asyncio.run(run())


class Sender:
    """A server that announces a version and sends these pieces."""

    def __init__(self, *pieces: bytes, version: str = "new") -> None:
        self.pieces, self.version, self.sent = pieces, version, 0

    async def describe(self) -> pb.Description:
        return pb.Description(newest="new")

    async def weights(self, packing: str = "") -> AsyncGenerator[pb.Weights]:
        for piece in self.pieces:
            self.sent += 1
            yield pb.Weights(data=piece, version=self.version, packing=packing)


def file_of(version: MoADrafter, **changes: torch.Tensor) -> bytes:
    return safetensors.torch.save(device_part(version) | changes)


@pytest.mark.parametrize("fault", ["noise", "endless", "shape", "missing", "not finite"])
def test_weights_that_do_not_fit_are_refused(fault: str, bundle: Path) -> None:
    """The device goes on drafting with what it has."""
    device = load_device(bundle, dtype="float32")
    _, _, version = served(bundle)
    name, weight = next(iter(device_part(version).items()))
    pieces = {
        "noise": (b"noise" * 100,),
        "endless": (bytes(1 << 20),) * 100,
        "shape": (file_of(version, **{name: torch.zeros(3, 3)}),),
        "missing": (safetensors.torch.save({name: weight}),),
        "not finite": (file_of(version, **{name: torch.full_like(weight, torch.nan)}),),
    }[fault]
    before, sender = device.module, Sender(*pieces)
    with pytest.raises(RefusedError, match="The server"):
        asyncio.run(device.update(sender))  # type: ignore[arg-type]
    assert (device.module, device.version) == (before, device.fingerprint)
    assert sender.sent < 10


def test_another_server_of_a_fleet_answers(bundle: Path) -> None:
    """Its weights have their own name; it may be behind, or have no version at all."""
    device = load_device(bundle, dtype="float32")
    _, _, version = served(bundle)
    before = device.module
    for behind in (Sender(), Sender(b"not read", version=str(device.version))):
        assert not asyncio.run(device.update(behind))  # type: ignore[arg-type]
    assert device.module is before
    assert asyncio.run(device.update(Sender(file_of(version), version="newer")))  # type: ignore[arg-type]
    assert device.version == "newer"


def test_weights_are_made_once_for_all_devices(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, first, version = served(bundle)
    made: list[MoADrafter] = []

    def part(of: MoADrafter) -> dict[str, torch.Tensor]:
        made.append(of)
        return device_part(of)

    monkeypatch.setattr(device_weights_module, "device_part", part)

    async def run() -> None:
        service = TargetService(target, first)
        assert await service.device_weights() == ("", b"")  # only the initial drafter
        service.adopt(version, "new")
        found = await asyncio.gather(*(service.device_weights() for _ in range(3)))
        assert found == [("new", file_of(version))] * 3
        await service.stop()

    asyncio.run(run())
    assert made == [version]


@pytest.mark.parametrize("last", [RefusedError("not ours"), WireError("not ours")])
def test_an_edge_asks_again_after_a_cut(
    last: Exception,
    bundle: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And no more once it is refused, or cannot read the answer."""
    answers: list[Any] = [LinkError("cut"), True, last]
    done = asyncio.Event()

    async def update(_: Any, __: Any) -> bool:
        answer = answers.pop(0)
        if not answers:
            done.set()
        if isinstance(answer, Exception):
            raise answer
        return True

    monkeypatch.setattr(DeviceBundle, "update", update)
    monkeypatch.setattr(edge_source, "UPDATE_EVERY_S", 0.0)
    monkeypatch.setattr(edge_source, "REACH_EVERY_S", 0.0)
    device = load_device(bundle, dtype="float32")

    async def run() -> None:
        sender: Any = Sender()
        transport = Fleet.of(sender)
        source = EdgeSource(device, transport, name="tiny", server=transport)
        await source.start()
        await done.wait()
        await asyncio.wait_for(source._updating, 60)  # type: ignore[arg-type]
        await source.close()

    asyncio.run(run())
    assert "not ours" in caplog.text
    assert caplog.text.count("No link to") == 1


def test_an_edge_says_once_that_there_is_no_link(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where the device takes no new versions. The link is down until the server answers."""
    answers: list[Exception | pb.Description] = [
        LinkError("none"),
        LinkError("none"),
        pb.Description(),
        RefusedError("the end"),
    ]
    states = list[str]()

    class Away(Sender):
        async def describe(self) -> pb.Description:
            assert source.link is not None
            states.append(source.link.state)
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

    monkeypatch.setattr(edge_source, "UPDATE_EVERY_S", 0.0)
    monkeypatch.setattr(edge_source, "REACH_EVERY_S", 0.0)
    transport: Any = Fleet(["127.0.0.1:1"], lambda *_: Away())  # type: ignore[arg-type]
    device = LocalDevice(tiny.target(), moaspec.NgramProposer())
    source = EdgeSource(device, transport, name="tiny", server=transport)

    async def run() -> None:
        await source.start()
        await asyncio.wait_for(source._updating, 60)  # type: ignore[arg-type]
        await source.close()

    asyncio.run(run())
    assert caplog.text.count("No link to 127.0.0.1:1; trying again.") == 1
    assert states == ["down", "down", "down", "up"]


def test_texts_are_offered_when_a_turn_is_over(tmp_path: Path) -> None:
    bundle = bundles.save_bundle(tmp_path)
    target, first, _ = served(bundle)
    offered: list[tuple[Sequence[int], Sequence[int]]] = []
    service = TargetService(target, first)
    service.listen(lambda prompt, text: offered.append((tuple(prompt), tuple(text))))

    async def alone(sampling: SamplingParams) -> list[int]:
        request = pb.GenerateRequest(
            token_ids=PROMPT,
            sampling=wire.sampling_message(sampling),
            max_new_tokens=6,
            speculate=True,
        )
        return [i async for one in service.generate("me", request) for i in one.token_ids]

    async def run() -> None:
        session = RemoteSession(load_device(bundle, dtype="float32"), InProcessTransport(service))
        one = (await session.generate(PROMPT, **OPTIONS)).token_ids
        assert offered == []
        two = (await session.generate(tiny.PROMPTS[0], **OPTIONS)).token_ids
        (text,) = offered
        assert text[0] == PROMPT
        assert text[1][: len(one)] == tuple(one)  # the server may have chosen more
        await session.generate(tiny.PROMPTS[2], logit_bias={3: 1.0}, **OPTIONS)
        assert offered[1][0] == tiny.PROMPTS[0]
        assert offered[1][1][: len(two)] == tuple(two)
        await session.close()
        offered.clear()
        written = await alone(GREEDY)
        assert offered == [(PROMPT, tuple(written))]
        await alone(SamplingParams(logit_bias={3: 1.0}))
        assert len(offered) == 1
        await service.stop()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("given", "written", "offered"),
    [
        ((), (5, 6, 7), [(5, 6, 7)]),
        ((), (5, 1, 7), [(5, 1)]),  # the server goes on until the device halts it
        ((8,), (5, 6, 7), []),  # by the device: kept drafts, or anything else
        ((), (), []),
    ],
)
def test_only_what_the_target_chose_is_offered(
    given: tuple[int, ...], written: tuple[int, ...], offered: list[tuple[int, ...]]
) -> None:
    target = tiny.fresh_target()
    target.stop_token_ids = frozenset({1})
    service, texts = TargetService(target), []
    service.listen(lambda prompt, text: texts.append((tuple(prompt), tuple(text))))

    async def run() -> None:
        session = service.sessions.create(bytes(16), "me")
        opening = TurnRequest(
            turn=1,
            token_ids=PROMPT + given,
            prompt_length=len(PROMPT),
            sampling=GREEDY,
            grammar="",
            asked=None,
        )
        session.begin(opening, GREEDY)
        session.token_ids += written
        service.sessions.remove(session)
        await service.stop()

    asyncio.run(run())
    assert texts == [(PROMPT, text) for text in offered]
