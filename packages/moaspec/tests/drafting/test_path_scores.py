"""Coupled drafts: the order of drafts, and what is expected of them."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import tiny
from moaspec import Chain, SamplingParams, Tree
from moaspec.drafting.path_scores import AGREEMENT, Ranking, agreement, margins
from moaspec.sampling.choose import next_tokens
from moaspec.sampling.processors import Prefix
from moaspec_core.drafting.draft_noise import SHARPNESS
from moaspec_core.drafting.draft_tree import ancestor_matrix
from moaspec_core.drafting.protocols import RequestText

pytestmark = pytest.mark.kernels

VOCAB = 50
SAMPLED = [
    SamplingParams(temperature=0.8, seed=3),
    SamplingParams(temperature=1.5, seed=4, top_p=0.8, choice=2),
    SamplingParams(temperature=1.0, seed=2**64 - 3, top_k=4),
]


def some_log_q(rows: int, width: int, scale: float = 2.0) -> Tensor:
    drawn = torch.randn(rows, width, VOCAB, generator=torch.Generator().manual_seed(0))
    return (scale * drawn).log_softmax(-1)


def rows_of(settings: list[SamplingParams], lengths: list[int]) -> list[RequestText]:
    return [
        RequestText(i, [1] * length, one)
        for i, (one, length) in enumerate(zip(settings, lengths, strict=True))
    ]


def test_a_drafter_that_knows_the_target_proposes_its_choice() -> None:
    """Where q is p, but as flat as drafters are: its first draft is what sampling will choose."""
    log_p = some_log_q(3, 4)
    rows = rows_of(SAMPLED, [7, 20, 1])
    for depth in range(3):
        _, tokens = Ranking(rows, torch.arange(VOCAB)).children(log_p / SHARPNESS, 2, depth)
        for row, beam in itertools.product(range(3), range(4)):
            text = [*rows[row].token_ids, *[0] * depth]
            (chosen,) = next_tokens(log_p[row, beam, None], [Prefix(SAMPLED[row], text, 1)])
            assert int(tokens[row, beam, 0]) == chosen


def test_noise_belongs_to_the_targets_ids_not_to_places_in_the_draft_vocabulary() -> None:
    ids = torch.tensor([40, 3, 17, 8])
    log_p = some_log_q(1, 1)
    rows = rows_of(SAMPLED[:1], [9])
    whole = Ranking(rows, torch.arange(VOCAB)).perturbed(log_p, 1)
    trimmed = Ranking(rows, ids).perturbed(log_p[..., ids], 1)
    assert torch.equal(trimmed, whole[..., ids])


def test_greedy_rows_keep_the_likeliest_drafts_in_any_company() -> None:
    log_q = some_log_q(4, 2)
    settings = [SamplingParams(), SAMPLED[0], SamplingParams(repetition_penalty=2.0), SAMPLED[1]]
    scores, tokens = Ranking(rows_of(settings, [3, 4, 5, 6]), torch.arange(VOCAB)).children(
        log_q, 3, 0
    )
    expected = log_q.topk(3, dim=-1)
    for row in (0, 2):
        assert torch.equal(scores[row], expected.values[row])
        assert torch.equal(tokens[row], expected.indices[row])
    alone, own = Ranking(rows_of(settings[1:2], [4]), torch.arange(VOCAB)).children(
        log_q[1:2], 3, 0
    )
    assert torch.equal(scores[1], alone[0])
    assert torch.equal(tokens[1], own[0])


def test_margins() -> None:
    best = torch.tensor([[5.0, 4.0, 1.0], [2.0, 2.0, -torch.inf]])
    expected = torch.tensor([[1.0, 1.0, 4.0], [0.0, 0.0, torch.inf]])
    assert_close(margins(best), expected, rtol=0, atol=0)
    assert margins(torch.tensor([[3.0]])).tolist() == [[torch.inf]]


def test_agreement_is_a_probability_that_rises_with_the_lead() -> None:
    margin = torch.tensor([0.0, 0.5, 2.0, 5.0]).repeat(12, 1).T
    p = agreement(margin).exp()
    assert bool(((p > 0) & (p < 1)).all())
    assert bool((p[1:, 0] > p[:-1, 0]).all())
    assert bool((p[1:, 1:] < p[:-1, 1:]).all())
    # Of one order only one can be right: what is claimed for the ranks of the table fits that.
    assert bool((p[:, : len(AGREEMENT)].sum(1) < 1).all())


@pytest.mark.parametrize("shape", [Chain(4), Tree(3, 3, 8)], ids=str)
def test_trees_at_a_temperature_keep_parents_and_sizes(shape: Tree) -> None:
    target = tiny.target()
    drafter = tiny.random_drafter(target)
    sampling = SamplingParams(temperature=1.0, seed=5)
    trees = [
        tiny.draft(target, drafter, tiny.PROMPTS[0], shape, sampling=sampling) for _ in range(2)
    ]
    assert trees[0] == trees[1]
    tree = trees[0][1]
    assert len(tree.tokens) == shape.total_tokens
    assert ancestor_matrix(tree.parents).sum(1).tolist() == tree.depths
    greedy = tiny.draft(target, drafter, tiny.PROMPTS[0], shape)[1]
    assert tree.tokens != greedy.tokens


def test_coupling_gains_acceptance() -> None:
    """A drafter that is near the target agrees more often when it uses the same noise."""
    log_p = some_log_q(60, 1)
    error = torch.randn(log_p.shape, generator=torch.Generator().manual_seed(1))
    log_q = (log_p + 0.5 * error).log_softmax(-1) / SHARPNESS
    lengths = list(range(1, 61))
    distribution = SamplingParams(temperature=0.8, seed=0)
    prefixes = [Prefix(distribution, [1] * length, 1) for length in lengths]
    wanted = torch.tensor(next_tokens(log_p[:, 0], prefixes))

    def share(params: SamplingParams) -> float:
        rows = rows_of([params] * 60, lengths)
        _, tokens = Ranking(rows, torch.arange(VOCAB)).children(log_q, 1, 0)
        return float((tokens[:, 0, 0] == wanted).double().mean())

    # 60 draws, so a standard error of at most 0.065: the difference is four of them.
    assert share(distribution) > share(SamplingParams(temperature=0.8, seed=1)) + 0.26
