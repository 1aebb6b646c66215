"""Drafts without PyTorch are those of `Ranking`, where all tokens are candidates."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moaspec import SamplingParams
from moaspec.drafting.path_scores import Ranking
from moaspec_core.drafting.draft_noise import best_draft
from moaspec_core.drafting.protocols import RequestText

VOCAB = 50
SETTINGS = [
    SamplingParams(),
    SamplingParams(temperature=0.8, seed=3),
    SamplingParams(temperature=1.5, seed=4, top_p=0.8, choice=2),
    SamplingParams(temperature=1.0, seed=2**64 - 3, top_k=4),
    SamplingParams(temperature=0.7, seed=9, min_p=0.2, top_k=20, top_p=0.99),
]


@pytest.mark.parametrize("sampling", SETTINGS)
def test_the_first_draft_is_the_same(sampling: SamplingParams) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randperm(1000, generator=generator)[:VOCAB]
    for length in range(1, 60):
        log_q = (2.0 * torch.randn(1, 1, VOCAB, generator=generator)).log_softmax(-1)
        row = RequestText(0, [1] * length, sampling)
        _, found = Ranking([row], ids).children(log_q, 1, 0)
        values, order = log_q[0, 0].sort(descending=True)
        drafted = best_draft(ids[order].numpy(), values.numpy(), sampling, length)
        assert drafted == int(ids[found[0, 0, 0]])


def test_one_candidate_is_enough() -> None:
    only = np.array([7]), np.array([-0.1], np.float32)
    assert best_draft(*only, SamplingParams(temperature=1.0, seed=1, top_p=0.1, top_k=5), 3) == 7
