"""Rows that join, run and leave in any order, each with settings of its own."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import moaspec
import moaspec.generation.local_engine
import tiny
from moaspec import Engine, GenerationResult, NgramProposer, OracleProposer, SamplingParams, Tree
from moaspec.backends.fast_moa_proposer import FastMoAProposer
from moaspec.drafting.moa_proposer import MoAProposer
from moaspec.engine.local_verifier import LocalVerifier
from moaspec_core.drafting.protocols import TextProposer

pytestmark = pytest.mark.kernels

NEW_TOKENS = 10
TARGET = tiny.fresh_target(tokenizer=tiny.tokenizer())
SHAPES = (Tree(1, 1, 1), moaspec.Chain(3), Tree(2, 2, 4), Tree(3, 3, 7), Tree(3, 2, 3))


def no_repeats(prefix: Sequence[int], logits_V: Tensor) -> Tensor:
    changed_V = logits_V.clone()
    changed_V[list(prefix[-3:])] = -math.inf
    return changed_V


DISTRIBUTIONS = (
    SamplingParams(),
    SamplingParams(temperature=0.8, top_p=0.95, seed=1),
    SamplingParams(temperature=1.5, top_k=8, seed=2, choice=1),
    SamplingParams(repetition_penalty=1.6),
    SamplingParams(temperature=1.0, frequency_penalty=0.5, processors=(no_repeats,), seed=3),
)
STOPS: tuple[dict[str, Any], ...] = (
    {},
    {"stop_token_ids": tuple(range(0, 64, 7))},
    {"stop": ("1 w", "w3")},
)


@functools.cache
def alone(prompt: int, distribution: int, stop: int, new_tokens: int) -> list[int]:
    """A row's text when it is decoded plainly and by itself."""
    engine = moaspec.generation.local_engine.local_engine(TARGET)
    result = engine.result(
        engine.add(
            tiny.PROMPTS[prompt],
            max_new_tokens=new_tokens,
            sampling=DISTRIBUTIONS[distribution],
            **STOPS[stop],
        )
    )
    while engine.num_active:
        engine.step()
    return result.token_ids


@functools.cache
def all_texts() -> list[list[int]]:
    return [
        [*prompt, *alone(i, distribution, 0, NEW_TOKENS)]
        for i, prompt in enumerate(tiny.PROMPTS)
        for distribution in range(len(DISTRIBUTIONS))
    ]


@dataclass
class Machine:
    """An engine under test, and what its rows should say."""

    engine: Engine
    expected: dict[int, list[int]] = field(default_factory=dict)
    results: dict[int, GenerationResult] = field(default_factory=dict)
    streamed: dict[int, list[int]] = field(default_factory=dict)

    def add(self, draw: st.DrawFn) -> None:
        prompt = draw(st.integers(0, len(tiny.PROMPTS) - 1))
        distribution, stop = (
            draw(st.integers(0, len(DISTRIBUTIONS) - 1)),
            draw(st.integers(0, len(STOPS) - 1)),
        )
        new_tokens = draw(st.sampled_from([0, 1, 4, NEW_TOKENS]))
        handle = self.engine.add(
            tiny.PROMPTS[prompt],
            max_new_tokens=new_tokens,
            shape=draw(st.sampled_from(SHAPES)),
            sampling=DISTRIBUTIONS[distribution],
            **STOPS[stop],
        )
        self.expected[handle] = alone(prompt, distribution, stop, new_tokens)
        self.results[handle] = self.engine.result(handle)
        self.streamed[handle] = []

    def step(self) -> None:
        for event in self.engine.step():
            self.streamed[event.handle] += event.token_ids

    def abort(self, draw: st.DrawFn) -> None:
        running = [handle for handle, one in self.results.items() if one.stop_reason is None]
        if running:
            self.engine.abort(draw(st.sampled_from(running)))

    def check(self) -> None:
        for handle, result in self.results.items():
            expected = self.expected[handle]
            assert self.streamed[handle] == result.token_ids
            assert len(result.sources) == len(result.token_ids)
            assert result.token_ids == expected[: len(result.token_ids)]
            if result.stop_reason not in (None, "aborted"):
                assert result.token_ids == expected


@st.composite
def runs(draw: st.DrawFn, machine: Machine) -> None:
    """Random calls, until the engine is empty."""
    for action in draw(st.lists(st.sampled_from("aaassssx"), min_size=6, max_size=14)):
        if action == "a":
            machine.add(draw)
        elif action == "s":
            machine.step()
        else:
            machine.abort(draw)
        machine.check()
    while machine.engine.num_active:
        machine.step()
    machine.check()


@pytest.mark.slow
@settings(max_examples=12)
@given(st.data())
def test_every_row_gets_its_own_text_and_memory_returns_to_zero(data: st.DataObject) -> None:
    layers = data.draw(st.sampled_from([None, 0, 1]))
    drafting: TextProposer | MoAProposer
    if layers is None:
        drafting = data.draw(
            st.sampled_from([NgramProposer(), OracleProposer(all_texts(), agreement=(0.9, 0.5))])
        )
    else:
        module = tiny.random_drafter(TARGET)
        drafting = FastMoAProposer(module, TARGET, num_target_layers=layers)
    verifier = LocalVerifier(TARGET, drafting)
    if isinstance(drafting, MoAProposer):
        drafting.share_target_cache(verifier.cache)
    engine = Engine(
        verifier,
        drafting,
        target=TARGET,
    )
    data.draw(runs(Machine(engine)))
    verifier.release()
    assert verifier.cache.num_bytes == 0
    if isinstance(drafting, MoAProposer):
        drafting.release()
        assert drafting.text_cache.num_bytes == drafting.memory.num_bytes == 0
        assert drafting.num_read == drafting.num_encoded == {}
