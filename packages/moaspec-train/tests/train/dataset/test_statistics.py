"""Counts, coverage and the cache's size."""

from __future__ import annotations

import pytest

import tiny
from moaspec_train.dataset import statistics as module
from moaspec_train.dataset.examples import Example
from moaspec_train.dataset.statistics import statistics


def test_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "VOCABULARIES", (2, 8))
    examples = [Example((1, 2), (5, 5, 5, 6)), Example((1,), (7, 5), (3,), (6, 9))]
    data = statistics(examples, tiny.target().identity, always=[9])
    assert (data.examples, data.responses) == (2, 3)
    assert (data.tokens, data.response_tokens, data.distinct_tokens) == (12, 8, 4)
    assert data.lengths == {50: 6, 90: 6, 99: 6, 100: 6}
    # 9 is always kept, and 5 is the most frequent: five of eight.
    assert data.coverage == {2: 5 / 8, 8: 1.0}
    # Two bytes for each of 3 layers x 2 heads x (key and value of 8), and for a state of 48.
    assert data.bytes_per_token == 2 * (3 * 2 * 2 * 8 + 48)
    assert data.cache_bytes == 12 * data.bytes_per_token


def test_coverage_of_held_out_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half the examples have tokens of their own, so few held-out tokens are in a vocabulary."""
    monkeypatch.setattr(module, "VOCABULARIES", (1, 64))
    examples = [Example((1,), (2, i)) for i in range(3, 43)]
    data = statistics(examples, tiny.target().identity, always=[])
    assert data.held_out_coverage == {1: 0.5, 64: 0.5}
    assert data.coverage[64] == 1.0
    few = statistics(examples[:9], tiny.target().identity, always=[])
    assert few.held_out_coverage == {}
