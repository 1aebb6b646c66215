"""Simulated tau counts the agreeing prefix of whole blocks."""

from __future__ import annotations

import torch

from moaspec.train.measure import MEASURED_BLOCK, agreeing_prefixes


def test_prefixes_of_whole_blocks_by_hand() -> None:
    blocks = [
        [1, 1, 0, 1, 1, 1, 1, 1],  # two agree, whatever comes after
        [0, 1, 1, 1, 1, 1, 1, 1],
        [1, 1, 1],  # cut short by the response's end: not counted
        [1] * MEASURED_BLOCK,
    ]
    agreed = torch.tensor([one for block in blocks for one in block], dtype=torch.bool)
    steps = torch.tensor([i for block in blocks for i in range(len(block))])
    assert agreeing_prefixes(agreed, steps).tolist() == [2, 0, MEASURED_BLOCK]


def test_no_queries() -> None:
    empty = torch.zeros(0, dtype=torch.long)
    assert agreeing_prefixes(empty.bool(), empty).tolist() == []
