"""A server whose cache is full: rows lose their keys and are read again, and no text changes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import hybrid_models
import moaspec
import tiny
from moaspec_core.drafting.draft_tree import Tree
from moaspec_core.drafting.ngram_proposer import NgramProposer
from moaspec_core.drafting.tree_shapes import Chain
from moaspec_edge.device.local_parts import LocalDevice
from moaspec_edge.device.remote_session import RemoteOptions, RemoteSession
from moaspec_edge.protocol.transport import InProcessTransport
from moaspec_edge.server.service import ServiceOptions, TargetService
from simulated_time import run_simulated

PASS_S, TOKEN_S = 0.01, 0.001
NEW_TOKENS = 36
SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 11}


@pytest.fixture(autouse=True)
def _short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are set back often, and read again in pieces."""
    monkeypatch.setattr("moaspec_core.engine.cache_room.LEAST_TURN_S", 0.05)
    monkeypatch.setattr("moaspec_core.engine.cache_room.READ_AGAIN", 0.5)
    monkeypatch.setattr("moaspec_edge.server.shared_verifier.PREFILL_TOKENS", 7)


def small_service(target: Any, drafter: Any, rows: int) -> TargetService:
    """With room for so many texts; a row takes whole pages."""
    cache = TargetService(target).verifier.cache
    if not cache.follows_use:
        pytest.skip("Here caches do not give back single rows.")
    row = cache.row_bytes(100) + target.state_bytes
    return TargetService(target, drafter, ServiceOptions(max_cache_bytes=rows * row))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "settings"),
    [("anonymous", {}), ("a key", SAMPLED)],
    ids=["devices without a key, greedy", "devices of one key, sampled"],
)
def test_texts_of_devices_stay_the_same(owner: str, settings: dict[str, Any]) -> None:
    """Eight devices write, with drafts and activations, where three texts have room."""
    target, drafter = tiny.target(), tiny.agreeing_drafter("llama")
    service = small_service(target, drafter, 3)
    options = settings | {"max_new_tokens": NEW_TOKENS}

    async def write(number: int) -> list[int]:
        remote = RemoteOptions(draft=Chain(2) if number % 2 else Tree(2, 2, 4))
        session = RemoteSession(
            LocalDevice(target, drafter), InProcessTransport(service, owner), remote
        )
        prompt = (*tiny.PROMPTS[number % len(tiny.PROMPTS)], number)
        first = (await session.generate(prompt, **options)).token_ids
        second = (*prompt, *first, 1, 2, 3)  # another turn of the session
        found = first + (await session.generate(second, **options)).token_ids
        await session.close()
        return found

    def plain(number: int) -> list[int]:
        prompt = (*tiny.PROMPTS[number % len(tiny.PROMPTS)], number)
        first = moaspec.generate(target, prompt, **options).token_ids
        second = (*prompt, *first, 1, 2, 3)
        return first + moaspec.generate(target, second, **options).token_ids

    async def run() -> list[list[int]]:
        texts = await asyncio.gather(*(write(number) for number in range(8)))
        await service.stop()
        return texts

    texts = run_simulated(run(), PASS_S, TOKEN_S)
    assert service.shared.room is not None
    assert service.shared.room.rows_set_back >= 100
    assert texts == [plain(number) for number in range(8)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lfm2", "jamba", "nemotron_h"])
def test_texts_of_hybrids_stay_the_same(kind: str) -> None:
    """Their states are lost too; a prompt is read in one call, what was written is stepped."""
    target = hybrid_models.target(kind)
    service = small_service(target, None, 2)

    async def write(number: int) -> list[int]:
        transport = InProcessTransport(service, str(number % 2))
        session = RemoteSession(LocalDevice(target, NgramProposer()), transport)
        prompt = [number, 4, 5, 6] * 3
        result = await session.generate(prompt, max_new_tokens=20, stop_token_ids=())
        await session.close()
        return result.token_ids

    async def run() -> list[list[int]]:
        texts = await asyncio.gather(*(write(number) for number in range(6)))
        await service.stop()
        return texts

    texts = run_simulated(run(), PASS_S, TOKEN_S)
    assert service.shared.room is not None
    assert service.shared.room.rows_set_back > 5
    for number, text in enumerate(texts):
        own = moaspec.generate(target, [number, 4, 5, 6] * 3, max_new_tokens=20, stop_token_ids=())
        assert text == own.token_ids
