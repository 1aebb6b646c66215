"""The one law: with any settings and seed, speculation never changes the text."""

from __future__ import annotations

from typing import Any

import pytest

import moaspec
import tiny

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 1.0},
    "top_k": {"temperature": 0.8, "top_k": 5},
    "top_p": {"temperature": 1.3, "top_p": 0.9},
    "min_p": {"temperature": 1.2, "min_p": 0.1},
    "repetition": {"repetition_penalty": 1.5},
    "everything": {"temperature": 0.9, "top_k": 30, "top_p": 0.95, "min_p": 0.02,
                   "repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2,
                   "logit_bias": {3: -2.0, 9: 1.5}},
}  # fmt: skip
SHAPES = (moaspec.Chain(3), moaspec.Tree(3, 3, 8))


def texts(family: str, prompts: Any = tiny.PROMPTS, **options: Any) -> list[list[int]]:
    defaults: dict[str, Any] = {"max_new_tokens": 16, "seed": 11}
    results: Any = moaspec.generate(tiny.target(family), prompts, **defaults | options)
    return [result.token_ids for result in results]


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("name", SETTINGS)
def test_a_disagreeing_drafter(family: str, name: str) -> None:
    settings = SETTINGS[name]
    plain = texts(family, **settings)
    drafter = tiny.random_drafter(tiny.target(family))
    for shape in SHAPES:
        for layers in (0, 1, 2):
            drafted = texts(
                family, drafter=drafter, tree=shape, num_target_layers=layers, **settings
            )
            assert drafted == plain
