"""`check` and `eval` hold texts against transformers under the model's own defaults."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import GenerationConfig

import tiny
from moaspec.evaluate.correctness.check_target import Check
from moaspec.target.target import Target

DEFAULTS: dict[str, dict[str, Any]] = {
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "do_sample": True},
    "forbidden": {
        "suppress_tokens": list(range(0, 40, 2)),
        "begin_suppress_tokens": list(range(1, 40, 2)),
        "bad_words_ids": [[41], [43, 44], [45]],
        "sequence_bias": [[[47], 3.0]],
        "top_k": 10,
        "do_sample": True,
    },
    "ends": {
        "eos_token_id": list(range(0, 64, 3)),
        "min_new_tokens": 4,
        "min_length": 9,
        "forced_eos_token_id": 9,
        "exponential_decay_length_penalty": (5, 1.1),
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DEFAULTS)
def test_every_text_is_right(name: str) -> None:
    model = tiny.model("llama")
    model.generation_config = GenerationConfig(**DEFAULTS[name])
    target = Target(model, None, name=name)
    check = Check(target, tiny.PROMPTS[:2], max_new_tokens=10, alone=0)
    found = list(check.run())
    assert [one for one in found if not one.lossless] == []
    assert {one.method for one in found} >= {"hf", "plain", "stop tokens, tree"}
