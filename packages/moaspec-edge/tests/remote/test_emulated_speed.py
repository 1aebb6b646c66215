"""Speed of a device with `draft="auto"` beside plain streaming, in simulated time.

Session and server are real. Passes, draft steps and links take simulated time, and nothing else
takes any, so the figures are the same on every machine.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest

import tiny
from moaspec.drafting.other_proposers.oracle_proposer import OracleProposer
from moaspec_core.drafting.draft_tree import DraftTree, Tree
from moaspec_core.drafting.protocols import RequestText
from moaspec_edge.device.link_policy import FIRST_LOSS, LOSS_PER_TOKEN
from moaspec_edge.device.local_parts import LocalDevice
from moaspec_edge.device.remote_session import RemoteOptions, RemoteSession
from moaspec_edge.protocol.transport import Connection, InProcessTransport
from moaspec_edge.server.service import TargetService
from simulated_time import run_simulated

PASS_S = 0.15
LENGTHS = (32, 64, 96, 128)
"""Tokens of texts: what a measurement costs weighs most in short ones."""
MIN_OVER_PLAIN = 0.97
LINKS = {"lan": 0.009, "5g": 0.025, "4g": 0.042}
"""Round trips, in seconds."""
STEPS = (0.003, 0.03, 0.15)
"""Seconds of a draft step: a fast device, a phone, and one that should not draft."""
HARD, EASY = 0.17, 0.71
"""Probability that a draft is right: chains of five have 1.2 and 3.0 tokens a round."""
NUM_TEXTS = 6
"""Draws of which drafts are right: a few lucky ones begin drafts that do not pay."""


class SlowedDrafter(OracleProposer):
    """A drafter whose steps take simulated time, in which nothing else happens on the device."""

    step_s = 0.0

    def propose(self, rows: Sequence[RequestText], shape: Tree) -> list[DraftTree]:
        loop: Any = asyncio.get_running_loop()
        loop._skipping.now_s += self.step_s * shape.depth
        return super().propose(rows, shape)


class Slow:
    """A connection whose frames arrive after a while, in their order."""

    def __init__(self, inner: Connection, delay_s: float) -> None:
        self._inner, self._delay_s = inner, delay_s
        self._arrived = asyncio.Queue[bytes]()
        self._tasks = {asyncio.create_task(self._read())}

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            frame = await self._inner.receive()
            loop.call_later(self._delay_s, self._arrived.put_nowait, frame)

    async def _later(self, frame: bytes) -> None:
        await asyncio.sleep(self._delay_s)
        await self._inner.send(frame)

    async def send(self, frame: bytes) -> None:
        self._tasks.add(asyncio.create_task(self._later(frame)))

    async def receive(self) -> bytes:
        return await self._arrived.get()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._inner.close()


class SlowTransport:
    """Makes such connections."""

    def __init__(self, service: TargetService, delay_s: float) -> None:
        self._inner, self._delay_s = InProcessTransport(service), delay_s

    async def connect(self) -> Connection:
        return Slow(await self._inner.connect(), self._delay_s)


@functools.cache
def own_text() -> list[int]:
    """The target's, which takes as long as a measurement does."""
    return tiny.own_text(tiny.target(), tiny.PROMPTS[1], LENGTHS[-1])


async def over_plain(
    rtt_s: float,
    step_s: float,
    agreement: float,
    *,
    ahead: bool,
    seed: int = 0,
    dropping: bool = False,
) -> dict[int, float]:
    """Speed over that of plain streaming, from the request to the last token of each length.

    With `dropping`, the server verifies no drafts, as under load.
    """
    target, prompt, text = tiny.target(), tiny.PROMPTS[1], own_text()
    drafter = SlowedDrafter([[*prompt, *text]], agreement=agreement, seed=seed)
    drafter.step_s = step_s
    service = TargetService(target)
    if dropping:
        budget: Any = SimpleNamespace(
            applied=lambda requests: [replace(one, tree=DraftTree()) for one in requests],
            count=lambda *_: None,
            forget=lambda *_: None,
        )
        service.shared.budget = budget
    transport = SlowTransport(service, rtt_s / 2)
    options = RemoteOptions(draft_ahead=ahead)
    session = RemoteSession(LocalDevice(target, drafter), transport, options)
    loop, got, took_s = asyncio.get_running_loop(), list[int](), list[float]()
    started_s = loop.time()
    async for event in session.stream(prompt, max_new_tokens=LENGTHS[-1]):
        got[event.start :] = event.token_ids
        took_s += [loop.time() - started_s] * (len(got) - len(took_s))
    assert got == text
    await session.close()
    await service.stop()
    return {length: (rtt_s + PASS_S * length) / took_s[length - 1] for length in LENGTHS}


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("name", LINKS)
def test_no_device_is_slower_than_plain_streaming(name: str, ahead: bool) -> None:
    def measured(step_s: float, agreement: float, seed: int = 0) -> dict[int, float]:
        work = over_plain(LINKS[name], step_s, agreement, ahead=ahead, seed=seed)
        return run_simulated(work, PASS_S)

    for step_s in STEPS:
        hopeless = measured(step_s, 0.0)
        assert min(hopeless.values()) >= MIN_OVER_PLAIN, (step_s, hopeless)
        hard = [measured(step_s, HARD, seed) for seed in range(NUM_TEXTS)]
        for length in LENGTHS:
            speeds = [one[length] for one in hard]
            assert fmean(speeds) >= MIN_OVER_PLAIN, (step_s, length, speeds)
            most = FIRST_LOSS + LOSS_PER_TOKEN * length + 1  # of the last round with drafts
            assert min(speeds) > length / (length + most), (step_s, length, speeds)
    assert measured(STEPS[0], EASY)[LENGTHS[-1]] > 1.8


@pytest.mark.parametrize("name", LINKS)
def test_a_server_that_drops_all_drafts_is_sent_few(name: str) -> None:
    work = over_plain(LINKS[name], STEPS[0], EASY, ahead=True, dropping=True)
    for length, speed in run_simulated(work, PASS_S).items():
        assert speed > length / (length + FIRST_LOSS + LOSS_PER_TOKEN * length + 1)


def test_other_threads_keep_their_clock() -> None:
    """Servers of other tests slept for hours in which their clock had been another."""

    async def times() -> tuple[float, float]:
        await asyncio.sleep(1e6)
        with ThreadPoolExecutor(1) as pool:
            return time.monotonic(), pool.submit(time.monotonic).result()

    before_s = time.monotonic()
    here, there = run_simulated(times())
    assert here == pytest.approx(1e6)
    assert before_s <= there <= time.monotonic()
