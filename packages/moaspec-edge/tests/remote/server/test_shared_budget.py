"""Devices and texts of the server alone share the drafts of a pass, and no text changes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

import moaspec
import tiny
from costs import table
from links import Restartable
from moaspec_core.drafting.protocols import VerifyRequest
from moaspec_core.drafting.tree_shapes import Chain, without
from moaspec_core.policy.pass_budget import PassBudget
from moaspec_core.policy.policies import DraftSettings
from moaspec_edge.device.local_parts import LocalDevice
from moaspec_edge.device.remote_session import RemoteOptions, RemoteSession
from moaspec_edge.device.server_text import RemoteText
from moaspec_edge.server.service import TargetService
from simulated_time import run_simulated

STEEP = table(pass_s=((0.010, 0.024, 0.048, 0.192),) * 2, encode_s=(0.0001, 0.0008, 0.0016, 0.0064))
"""Passes that cost 2 ms per token: of several rows only sure drafts pay."""

PASS_S = 0.05


@pytest.mark.slow
@pytest.mark.parametrize("agrees", [False, True])
def test_texts_are_the_targets_own(agrees: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny.target()
    drafter = tiny.agreeing_drafter("llama") if agrees else tiny.random_drafter(target)
    passes: list[list[VerifyRequest]] = []
    applied = PassBudget.applied

    def watched(budget: PassBudget, requests: Sequence[VerifyRequest]) -> list[VerifyRequest]:
        passes.append(applied(budget, requests))
        return passes[-1]

    monkeypatch.setattr(PassBudget, "applied", watched)

    async def device(server: Restartable, prompt: list[int]) -> list[int]:
        remote = RemoteOptions(draft=Chain(4))
        session = RemoteSession(LocalDevice(target, drafter), server.transport(), remote)
        await session.generate(prompt, max_new_tokens=tiny.NEW_TOKENS)
        await session.close()
        return session.result.token_ids

    async def alone(server: Restartable, prompt: list[int]) -> list[int]:
        here: Any = SimpleNamespace(generate=partial(server.service.generate, "local"))
        stream = RemoteText(here).stream(prompt, speculate=True, max_new_tokens=tiny.NEW_TOKENS)
        return [token async for event in stream for token in event.token_ids]

    async def run() -> list[list[int]]:
        shaping = DraftSettings(costs=STEEP, prior=[[0.6]])
        service = TargetService(target, drafter, shaping=shaping)
        server = Restartable(lambda: service)
        texts = await asyncio.gather(
            *(write(server, [*prompt]) for write in (device, alone) for prompt in tiny.PROMPTS)
        )
        await service.stop()
        return texts

    texts = asyncio.run(run())
    expected = [
        moaspec.generate(target, prompt, max_new_tokens=tiny.NEW_TOKENS).token_ids
        for prompt in tiny.PROMPTS
    ]
    assert texts == [*expected, *expected]
    rounds = [one for one in passes if all(row.num_verified for row in one)]
    assert any(row.tree.tokens for one in rounds for row in one)
    assert any(len(one) > 2 and not any(row.tree.tokens for row in one) for one in rounds)
    assert any(not row.encode for one in rounds for row in one)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [Chain(4), moaspec.Tree(2, 2, 4), "auto"])
def test_dropped_drafts_are_not_counted_as_wrong(
    shape: moaspec.Tree | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither by the device nor by the server; in simulated time `auto` always drafts."""
    target = tiny.target()
    verified: list[int] = []

    def without_some(_: PassBudget, requests: Sequence[VerifyRequest]) -> list[VerifyRequest]:
        rest = [replace(one, tree=without(one.tree, {1, 3})) for one in requests]
        verified.extend(len(one.tree.tokens) for one in rest)
        return rest

    monkeypatch.setattr(PassBudget, "applied", without_some)

    async def run() -> tuple[RemoteSession, float | None]:
        shaping = DraftSettings(costs=STEEP, prior=[[0.6]])
        service = TargetService(target, tiny.agreeing_drafter("llama"), shaping=shaping)
        device = LocalDevice(target, tiny.agreeing_drafter("llama"))
        session = RemoteSession(
            device, Restartable(lambda: service).transport(), RemoteOptions(draft=shape)
        )
        await session.generate(tiny.PROMPTS[0], max_new_tokens=tiny.NEW_TOKENS)
        await session.close()
        counted = service.observer.registry.get_sample_value
        await service.stop()
        return session, counted("moaspec_tokens_total", {"kind": "drafted"})

    session, counted = run_simulated(run(), PASS_S)
    result, rounds = session.result, session.stats.rounds
    own = moaspec.generate(target, tiny.PROMPTS[0], max_new_tokens=tiny.NEW_TOKENS).token_ids
    assert result.token_ids == own
    assert 0 < result.num_drafted == sum(verified) == sum(one.drafted for one in rounds) == counted
    assert sum(one.dropped for one in rounds) > 0
    assert max(result.drafted_depths) == (2 if shape == moaspec.Tree(2, 2, 4) else 1)
