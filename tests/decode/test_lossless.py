"""Speculation never changes the text, whoever drafts."""

from __future__ import annotations

import pytest

import moaspec
import tiny
from moaspec.model import MoADrafter

SHAPES = (moaspec.Chain(3), moaspec.Tree(2, 2, 4), moaspec.Tree(3, 3, 8), moaspec.Tree(4, 2, 6))
pytestmark = [
    pytest.mark.parametrize("family", tiny.FAMILIES),
    pytest.mark.parametrize("num_target_layers", [0, 1, 2]),
    pytest.mark.parametrize("shape", SHAPES, ids=str),
]


def drafted(
    family: str, drafter: MoADrafter, shape: moaspec.Tree, layers: int
) -> list[moaspec.GenerationResult]:
    return moaspec.generate(
        tiny.target(family),
        tiny.PROMPTS,
        drafter=drafter,
        max_new_tokens=tiny.NEW_TOKENS,
        tree=shape,
        num_target_layers=layers,
    )


def test_disagreeing_drafter(family: str, num_target_layers: int, shape: moaspec.Tree) -> None:
    drafter = tiny.random_drafter(tiny.target(family))
    results = drafted(family, drafter, shape, num_target_layers)
    assert [tuple(result.token_ids) for result in results] == list(tiny.own_texts(family))


def test_disagreeing_drafter_alone(
    family: str, num_target_layers: int, shape: moaspec.Tree
) -> None:
    result = moaspec.generate(
        tiny.target(family),
        tiny.PROMPTS[1],
        drafter=tiny.random_drafter(tiny.target(family)),
        max_new_tokens=tiny.NEW_TOKENS,
        tree=shape,
        num_target_layers=num_target_layers,
    )
    assert tuple(result.token_ids) == tiny.own_texts(family)[1]


def test_agreeing_drafter(family: str, num_target_layers: int, shape: moaspec.Tree) -> None:
    drafter = tiny.agreeing_drafter(family, num_target_layers)
    results = drafted(family, drafter, shape, num_target_layers)
    assert [tuple(result.token_ids) for result in results] == list(tiny.own_texts(family))
    for result in results:
        assert result.tau is not None
        assert result.tau > 1.5
        assert sum(result.accept_lengths) == len(result.token_ids) - 1
