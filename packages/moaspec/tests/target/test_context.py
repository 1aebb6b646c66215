"""The context of each kind of rotary embeddings, and texts beyond the trained length."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from transformers import LlamaConfig, PreTrainedConfig

import moaspec
import tiny
from moaspec.evaluate.correctness.equality import judge
from moaspec.target.families import context_length
from moaspec.target.target import Target

TRAINED = 32
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0},
    "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "proportional": {"factor": 4.0},
    "longrope": {"factor": 4.0, "short_factor": [1.0, 1.2], "long_factor": [3.0, 6.0]},
}
"""As model cards give them, without `original_max_position_embeddings`."""
LONG = 4 * TRAINED
PROMPTS = {"below": list(range(1, 20)), "beyond": [(7 * i) % 60 + 1 for i in range(TRAINED + 9)]}


def _model(kind: str) -> Any:
    rope = {"rope_type": kind, "rope_theta": 100.0, **copy.deepcopy(ROPES[kind])}
    if kind != "longrope":  # of which only Phi-3 is read anew by transformers, as here
        return tiny.model("llama", rope_parameters=rope, max_position_embeddings=TRAINED)
    return tiny.model(
        "phi3",
        rope_parameters=rope | {"partial_rotary_factor": 0.5},
        original_max_position_embeddings=TRAINED,
        max_position_embeddings=TRAINED,
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
def test_texts_beyond_the_trained_length_are_transformers(kind: str, prompt: list[int]) -> None:
    new_tokens = LONG - len(prompt)
    expected = tiny.own_text(Target(_model(kind), None, name=kind), prompt, new_tokens)
    target = Target(_model(kind), None, name=kind)
    assert target.max_positions == LONG
    drafter = tiny.ReplayDrafting([[*prompt, *expected]], wrong_from=4)
    for proposes in (None, drafter, tiny.random_drafter(target)):
        result = moaspec.generate(target, prompt, drafter=proposes, max_new_tokens=1000)
        assert result.token_ids == expected, kind
        assert result.stop_reason == "context"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ROPES)
def test_such_texts_are_judged_right(kind: str) -> None:
    target = Target(_model(kind), None, name=kind)
    for prompt in PROMPTS.values():
        got = moaspec.generate(target, prompt, max_new_tokens=60).token_ids
        assert judge(target, prompt, got, got, max_new_tokens=60).kind == "identical"


@pytest.mark.slow
def test_sessions_and_batches_do_not_mix_keys_of_prompts_of_different_lengths() -> None:
    target = Target(_model("dynamic"), None, name="dynamic")
    first, second = PROMPTS["below"], PROMPTS["beyond"]
    session = moaspec.Session(target)
    answer = session.generate(first, max_new_tokens=30).token_ids
    longer = [*first, *answer, 5, 6]
    for prompt in (longer, second, [*second, 3], first, longer[:25]):
        alone = moaspec.generate(target, prompt, max_new_tokens=20)
        assert session.generate(prompt, max_new_tokens=20).token_ids == alone.token_ids
        together = moaspec.generate(target, [prompt, second, first], max_new_tokens=20)
        assert together[0].token_ids == alone.token_ids
    assert session.result.num_reused_tokens == 0 or len(longer[:25]) <= TRAINED


def _length(kind: str, **changes: Any) -> int:
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, **changes.pop("rope", {})}
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    settings: dict[str, Any] = {"max_position_embeddings": 1024, "rope_parameters": rope}
    return context_length(LlamaConfig(**settings | changes))


def test_the_context_is_the_factor_times_the_trained_length() -> None:
    assert [_length(kind) for kind in ("linear", "dynamic", "yarn", "llama3")] == [4096] * 4
    assert _length("yarn", rope={"original_max_position_embeddings": 1000}) == 4000
    assert _length("llama3", rope={"factor": 32.0, "original_max_position_embeddings": 64}) == 1024
    extended = {"original_max_position_embeddings": 256, "factor": 4.0}
    assert _length("yarn", rope=extended) == 1024
    assert context_length(tiny.target("gemma3_text").config) == 256
    assert context_length(tiny.target("phi3").config) == 256


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_the_older_key_is_read_too(key: str) -> None:
    scaling = {key: "dynamic", "factor": 2.0}
    config: PreTrainedConfig = LlamaConfig(max_position_embeddings=64, rope_scaling=scaling)
    assert context_length(config) == 128
