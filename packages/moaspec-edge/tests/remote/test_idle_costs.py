"""A server of devices measures costs while no request is there."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

import tiny
from costs import table
from moaspec_core.policy.policies import DraftSettings
from moaspec_core.sampling.params import GREEDY
from moaspec_edge.protocol import target_pb2 as pb
from moaspec_edge.protocol import wire
from moaspec_edge.server.service import TargetService


def test_an_idle_server_takes_new_costs_and_a_request_ends_a_measurement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("moaspec_edge.server.service.QUIET_S", 0.0)
    monkeypatch.setattr("moaspec_edge.server.service.RENEWAL_S", 0.0)
    begun, used = threading.Event(), list[DraftSettings]()
    better = DraftSettings(costs=table())

    def renew(old: DraftSettings, stopped: Callable[[], bool]) -> DraftSettings:
        used.append(old)
        begun.set()
        while not stopped():
            threading.Event().wait(0.001)
        return better

    async def run() -> None:
        target = tiny.target()
        service = TargetService(target, None)
        service.renew_costs(renew)
        request = pb.GenerateRequest(
            token_ids=tiny.PROMPTS[1], sampling=wire.sampling_message(GREEDY), max_new_tokens=3
        )
        assert service.shared.budget is None
        for _ in range(2):
            texts = [one async for one in service.generate("a", request)]
            assert texts
            await asyncio.to_thread(begun.wait)
            begun.clear()
        assert service.shared.budget is not None
        await service.stop()
        assert used[1] is better

    asyncio.run(run())
