"""What settings do to logits, against transformers' own processors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers.generation import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import moaspec.sampling.processors
from moaspec import SamplingParams
from moaspec.sampling.processors import Prefix, processed, survivors
from moaspec_core.errors import InputError

VOCAB = 200
TEXT = (5, 9, 5, 3, 3, 3)
THEIRS: dict[str, Any] = {
    "top_k": TopKLogitsWarper,
    "top_p": TopPLogitsWarper,
    "min_p": MinPLogitsWarper,
}


def logits(rows: int = 40) -> Tensor:
    return 3 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(1))


def prefix(text: Sequence[int] = TEXT, prompt_length: int = 2, **settings: Any) -> Prefix:
    return Prefix(SamplingParams(**settings), text, prompt_length)


@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": VOCAB + 5},
        {"top_p": 0.0},
        {"top_p": 0.5},
        {"top_p": 0.95},
        {"min_p": 0.05},
        {"min_p": 1.0},
        {"top_k": 20, "top_p": 0.9},
        {"top_k": 20, "top_p": 0.9, "min_p": 0.1},
    ],
    ids=str,
)
@pytest.mark.parametrize("candidates", [8, 512])
def test_survivors_are_those_of_transformers(
    settings: dict[str, Any], candidates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moaspec.sampling.processors, "CANDIDATES", candidates)
    scores: Any = logits()
    for name, value in settings.items():
        scores = THEIRS[name](value)(None, scores)
    # In float64 as sampling computes it: in float32 the mass before a token has rounding errors.
    ours = survivors(logits().double(), [SamplingParams(**settings)] * len(scores))
    assert torch.equal(ours, scores > -math.inf)


def test_each_node_has_its_own_settings() -> None:
    settings = [
        SamplingParams(),
        SamplingParams(top_k=3),
        SamplingParams(top_p=0.3),
        SamplingParams(min_p=0.4),
        SamplingParams(top_k=5, top_p=0.9),
    ]
    rows = logits(5)
    together = survivors(rows, settings)
    for i, one in enumerate(settings):
        assert torch.equal(together[i], survivors(rows[i : i + 1], [one])[0])
    assert together[0].all()


def test_ties_at_the_edge_survive_together() -> None:
    rows = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
    assert survivors(rows, [SamplingParams(top_k=2)])[0].tolist() == [True] * 4 + [False]
    assert survivors(rows, [SamplingParams(top_p=0.6)])[0].tolist() == [True] * 4 + [False]


def test_repetition_penalty_covers_prompt_and_output() -> None:
    row = logits(1)
    theirs: Any = RepetitionPenaltyLogitsProcessor(1.7)
    expected = theirs(torch.tensor([TEXT]), row.clone())[0]
    assert torch.equal(processed(row[0], prefix(repetition_penalty=1.7)), expected)


def test_presence_and_frequency_cover_output_only() -> None:
    row = torch.zeros(VOCAB)
    got = processed(row, prefix(presence_penalty=0.5, frequency_penalty=0.25))
    expected = torch.zeros(VOCAB)
    expected[5], expected[3] = -0.75, -1.25
    assert_close(got, expected)
    alone = processed(row, prefix(TEXT[:2], presence_penalty=0.5))
    assert torch.equal(alone, row)


def test_bias_comes_before_penalties_and_processors_last() -> None:
    row = torch.full((VOCAB,), 1.0)
    seen: list[tuple[tuple[int, ...], float]] = []

    def watch(text: Sequence[int], logits_V: Tensor) -> Tensor:
        seen.append((tuple(text), float(logits_V[9])))
        return logits_V.mul(2)

    got = processed(
        row, prefix(logit_bias={9: 3.0}, repetition_penalty=2.0, processors=(watch, watch))
    )
    # (1 + 3) / 2, then doubled by each processor.
    assert seen == [(TEXT, 2.0), (TEXT, 4.0)]
    assert float(got[9]) == 8.0
    assert torch.equal(row, torch.full((VOCAB,), 1.0))


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (torch.zeros(3), "shape"),
        (None, "NoneType"),
        (torch.full((VOCAB,), -math.inf), "at least one token"),
        (torch.full((VOCAB,), math.nan), "NaN"),
    ],
    ids=["shape", "none", "nothing left", "nan"],
)
def test_processors_that_misbehave(result: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        processed(logits(1)[0], prefix(processors=(lambda *_: result,)))


@pytest.mark.parametrize("text", [TEXT, TEXT[:1]], ids=["output", "prompt"])
def test_a_bias_that_leaves_no_token(text: Sequence[int]) -> None:
    """Token 0 would be the best of nothing."""
    forbidden = dict.fromkeys(range(VOCAB), -math.inf)
    with pytest.raises(InputError, match=r"logit_bias.*at least one token"):
        processed(logits(1)[0], prefix(text, logit_bias=forbidden))
    del forbidden[7]
    assert int(processed(logits(1)[0], prefix(text, logit_bias=forbidden)).argmax()) == 7
