"""A server that drafts by itself encodes a window of a prompt, as an engine of one process does."""

from __future__ import annotations

import asyncio
import dataclasses
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

import tiny
from moaspec.model.moa import MoADrafter
from moaspec_core.drafting.tree_shapes import Chain
from moaspec_core.policy.policies import DraftSettings
from moaspec_edge.device.server_text import RemoteText
from moaspec_edge.server.activation_records import WireEncoder
from moaspec_edge.server.service import TargetService

WINDOW = 6


@pytest.mark.parametrize("window", [0, WINDOW])
def test_a_window_of_the_prompt_is_encoded(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    target, agreeing = tiny.target(), tiny.agreeing_drafter("llama")
    drafter = MoADrafter(dataclasses.replace(agreeing.config, prompt_window=window)).eval()
    drafter.load_state_dict(agreeing.state_dict())
    encoded: list[list[int]] = []
    encode = WireEncoder.encode

    def watched(own: WireEncoder, kv_1NLK: Tensor, positions_1N: Tensor, counts: Any) -> Any:
        encoded.append(positions_1N[0].tolist())
        return encode(own, kv_1NLK, positions_1N, counts)

    monkeypatch.setattr(WireEncoder, "encode", watched)
    prompt = [*tiny.PROMPTS[2]]

    async def run() -> tuple[list[int], set[str]]:
        service = TargetService(target, drafter, shaping=DraftSettings(Chain(4)))
        here: Any = SimpleNamespace(generate=partial(service.generate, "local"))
        stream = RemoteText(here).stream(prompt, speculate=True, max_new_tokens=tiny.NEW_TOKENS)
        events = [event async for event in stream]
        await service.stop()
        tokens = [token for event in events for token in event.token_ids]
        return tokens, {source for event in events for source in event.sources}

    tokens, sources = asyncio.run(run())
    assert tuple(tokens) == tiny.own_texts("llama")[2][: len(tokens)]
    assert "draft" in sources
    first = len(prompt) - window if window else 0
    assert [position for one in encoded for position in one] == [
        *range(first, len(prompt) + len(tokens) - 1)
    ]
