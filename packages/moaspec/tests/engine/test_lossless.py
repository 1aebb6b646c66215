"""Speculation never changes the text, whoever drafts."""

from __future__ import annotations

import pytest

import moaspec
import tiny
from moaspec.model.moa import MoADrafter

SHAPES = (moaspec.Chain(3), moaspec.Tree(2, 2, 4), moaspec.Tree(3, 3, 8), moaspec.Tree(4, 2, 6))
LENGTH = 16
"""Enough for every prompt to leave the sliding window, and LongRoPE's short regime, behind."""
pytestmark = [
    pytest.mark.parametrize("num_target_layers", [0, 1, 2]),
    pytest.mark.parametrize("shape", SHAPES, ids=str),
]
every_family = pytest.mark.parametrize("family", tiny.FAMILIES)


def own_texts(family: str, length: int = LENGTH) -> list[list[int]]:
    return [list(text[:length]) for text in tiny.own_texts(family)]


def drafted(
    family: str, drafter: MoADrafter, shape: moaspec.Tree, layers: int, length: int = LENGTH
) -> list[moaspec.GenerationResult]:
    return moaspec.generate(
        tiny.target(family),
        tiny.PROMPTS,
        drafter=drafter,
        max_new_tokens=length,
        tree=shape,
        num_target_layers=layers,
    )


@every_family
def test_disagreeing_drafter(family: str, num_target_layers: int, shape: moaspec.Tree) -> None:
    drafter = tiny.random_drafter(tiny.target(family))
    results = drafted(family, drafter, shape, num_target_layers)
    assert [result.token_ids for result in results] == own_texts(family)


@every_family
def test_disagreeing_drafter_alone(
    family: str, num_target_layers: int, shape: moaspec.Tree
) -> None:
    result = moaspec.generate(
        tiny.target(family),
        tiny.PROMPTS[1],
        drafter=tiny.random_drafter(tiny.target(family)),
        max_new_tokens=LENGTH,
        tree=shape,
        num_target_layers=num_target_layers,
    )
    assert result.token_ids == own_texts(family)[1]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_agreeing_drafter(family: str, num_target_layers: int, shape: moaspec.Tree) -> None:
    drafter = tiny.agreeing_drafter(family, num_target_layers)
    results = drafted(family, drafter, shape, num_target_layers, tiny.NEW_TOKENS)
    assert [result.token_ids for result in results] == own_texts(family, tiny.NEW_TOKENS)
    for result in results:
        assert result.tau is not None
        assert result.tau > 1.5
        assert sum(result.accept_lengths) == len(result.token_ids) - 1
