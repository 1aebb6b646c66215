"""Requests that say nothing get the model's own settings, from `serve` and from `edge`."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import GenerationConfig

import moaspec
import serving
import tiny
from moaspec.target.target import Target
from moaspec_core.drafting.tree_shapes import Chain
from moaspec_core.policy.policies import DraftSettings
from moaspec_serve.sources.local_source import LocalSource

DEFAULTS: dict[str, Any] = {
    "repetition_penalty": 1.2,
    "suppress_tokens": list(range(0, 200, 3)),
    "eos_token_id": serving.END,
    "do_sample": True,
    "temperature": 0.6,
    "top_k": 12,
}


@pytest.fixture(scope="module")
def target() -> Target:
    model = tiny.model("llama", vocab_size=serving.VOCAB)
    model.generation_config = GenerationConfig(**DEFAULTS)
    return Target(model, serving.tokenizer(), name="surprising")


@pytest.mark.parametrize(
    ("asked", "options"),
    [
        ({}, {"temperature": 0.6}),
        ({"temperature": 0}, {"temperature": 0.0}),
        ({"temperature": 1.5, "top_p": 0.5}, {"temperature": 1.5, "top_p": 0.5}),
        (
            {"extra_body": {"repetition_penalty": 1.0, "top_k": 0}},
            {"temperature": 0.6, "repetition_penalty": 1.0, "top_k": 0},
        ),
    ],
)
def test_requests(target: Target, asked: dict[str, Any], options: dict[str, Any]) -> None:
    tokenizer: Any = target.tokenizer
    prompt = tokenizer("one two")["input_ids"]
    expected = moaspec.generate(target, prompt, seed=3, max_new_tokens=12, **options)
    source = LocalSource(target, name=serving.MODEL, shaping=DraftSettings(Chain(2)))
    with serving.serving(source) as served:
        answer = served.openai().completions.create(
            model=serving.MODEL, prompt=prompt, seed=3, max_tokens=12, **asked
        )
    assert answer.choices[0].text == tokenizer.decode(expected.token_ids, skip_special_tokens=True)
