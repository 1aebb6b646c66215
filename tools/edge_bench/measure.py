"""Measuring one case on the device's side of a link."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from edge_bench.case import Case, Measured
from edge_bench.emulated_device import SlowedDevice
from moaspec.drafting.other_proposers.oracle_proposer import OracleProposer
from moaspec_core.drafting.tree_shapes import Chain
from moaspec_core.engine.request_state import Event
from moaspec_edge.device.device_parts import Device
from moaspec_edge.device.remote_session import RemoteOptions, RemoteSession
from moaspec_edge.device.server_text import RemoteText
from moaspec_edge.emulation import COHERENT_S
from moaspec_edge.protocol import target_pb2 as pb
from moaspec_edge.protocol.transport import Transport
from moaspec_edge.protocol.websocket_transport import WebSocketTransport

PINGS = 30


async def measure_case(
    case: Case,
    device: Device,
    transport: WebSocketTransport,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    texts: Sequence[Sequence[int]] = (),
    through: Transport | None = None,
) -> Measured:
    """Decode all prompts greedily, one after another, a new session for each.

    Args:
        case: the mode and its settings.
        device: drafts.
        transport: leads to the server.
        prompts: token ids.
        max_new_tokens: of each.
        texts: of plain decoding, one for each; the replay drafter proposes it.
        through: a transport around `transport` for sessions, None for itself.
    """
    found = Measured(prompts=[list(one) for one in prompts])
    for index, prompt in enumerate(prompts):
        if case.mode in ("plain", "server"):
            stream = RemoteText(
                transport, device.target.stop_token_ids, device.target.generation_defaults
            ).stream(prompt, speculate=case.mode == "server", max_new_tokens=max_new_tokens)
            await _alone(found, stream)
        else:
            known = [*prompt, *texts[index]] if case.drafter == "replay" else None
            slowed = SlowedDevice(device, case.step_s, _replay(known, case, index))
            session = RemoteSession(slowed, through or transport, _options(case))
            await _session(found, session, prompt, max_new_tokens)
            found.step_s += slowed.steps.mean_s
    found.step_s = found.step_s / len(prompts)
    found.pass_s = found.pass_s / max(1, found.rounds)
    found.hits = found.hits / max(1, found.rounds - found.streamed)
    return found


def _replay(known: list[int] | None, case: Case, seed: int) -> Any:
    if known is None:
        return None
    return lambda: OracleProposer([known], agreement=case.agreement, seed=seed)


async def _alone(found: Measured, stream: AsyncIterator[Event]) -> None:
    """The server alone; every message that arrives is a round."""
    started, text, arrived = time.perf_counter(), list[int](), list[float]()
    async for event in stream:
        text += event.token_ids
        arrived.append(time.perf_counter())
    _add_text(found, text, started, arrived)
    found.rounds += len(arrived) - 1


def _options(case: Case) -> RemoteOptions:
    return RemoteOptions(
        codec=case.codec,
        num_target_layers=case.num_target_layers if case.drafter == "moa" else None,
        draft=Chain(case.drafted) if case.drafted else "auto",
        draft_ahead=case.mode == "ahead",
    )


async def _session(
    found: Measured, session: RemoteSession, prompt: Sequence[int], max_new_tokens: int
) -> None:
    started, text, arrived = time.perf_counter(), list[int](), list[float]()
    async for event in session.stream(prompt, max_new_tokens=max_new_tokens):
        text[event.start :] = event.token_ids
        arrived.append(time.perf_counter())
    await session.close()
    _add_text(found, text, started, arrived)
    # The first verdict is the prefill's, which is no round.
    rounds = list(session.stats.rounds)[1:]
    found.rounds += len(rounds)
    found.drafted += sum(one.drafted for one in rounds)
    if session.options.draft == "auto":
        found.streamed += sum(not one.drafted for one in rounds)
    found.pass_s += sum(one.pass_s for one in rounds)
    found.hits += session.stats.ahead_hits
    found.bytes_up += session.stats.bytes_up
    found.bytes_down += session.stats.bytes_down


def _add_text(found: Measured, text: list[int], started: float, arrived: list[float]) -> None:
    found.texts.append(text)
    found.tokens += len(text)
    found.seconds += arrived[-1] - arrived[0]
    found.first_token_s.append(arrived[0] - started)


async def round_trip_s(address: str) -> float:
    """Mean seconds of a heartbeat over an idle connection.

    A mean, not a median: a round waits for the slow packets too. The heartbeats are far enough
    apart for coherent delays to have changed between them.
    """
    beat = pb.ClientMessage(session=bytes(16), heartbeat=pb.Heartbeat()).SerializeToString()
    connection = await WebSocketTransport(address).connect()
    seconds = 0.0
    try:
        for _ in range(PINGS):
            await asyncio.sleep(COHERENT_S)
            started = time.perf_counter()
            await connection.send(beat)
            await connection.receive()
            seconds += time.perf_counter() - started
    finally:
        await connection.close()
    return seconds / PINGS
