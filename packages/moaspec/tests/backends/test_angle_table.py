"""Tables of rotary embeddings hold the same bits as the computed ones."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

import tiny
from moaspec.backends.fast_drafter import TabulatedRope
from moaspec.backends.fast_target import TabulatedRotary
from moaspec.model.layers import Rope, scaled_rope
from moaspec.target.families import RotaryEmbeddings


def test_a_table_has_the_same_bits_and_grows() -> None:
    rope = Rope.plain(16, 5000.0)
    tabulated = TabulatedRope.of(rope)
    for positions in ([0, 5], [1023, 7], [1024, 3], [9000, 0]):
        ids_BT = torch.tensor([positions])
        for found, expected in zip(tabulated(ids_BT), rope(ids_BT), strict=True):
            assert torch.equal(found, expected)


def test_neighbouring_positions_of_a_text() -> None:
    rope = Rope.plain(16, 5000.0)
    tabulated = TabulatedRope.of(rope)
    for start, stop in ((0, 1), (0, 30), (7, 9), (1000, 1024), (1020, 1025), (9000, 9001)):
        expected = rope(torch.arange(start, stop)[None])
        for found, wanted in zip(tabulated.between(start, stop), expected, strict=True):
            assert torch.equal(found, wanted)


def test_frequencies_that_depend_on_the_text_are_not_tabulated() -> None:
    parameters = {
        "rope_type": "longrope",
        "rope_theta": 5000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [1.5] * 8,
        "original_max_position_embeddings": 64,
        "factor": 8.0,
    }
    rope = scaled_rope(16, parameters, 512)
    assert TabulatedRope.of(rope) is rope


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_rotary_embeddings_that_are_looked_up_are_the_computed_ones(family: str) -> None:
    model = tiny.model(family)
    rotary = RotaryEmbeddings(model.model.rotary_emb, model.config)
    states, lengths = torch.zeros(2, 3, 48), torch.tensor([3, 5000])
    positions = torch.tensor([[0, 1, 2], [7, 4999, 12]])  # beyond the first table
    computed = rotary(states, positions, lengths)
    tabulated = TabulatedRotary(rotary)
    for _ in range(2):
        found = tabulated(states, positions, lengths)
        assert set(found) == set(computed)
        for kind in found:
            assert_close(found[kind], computed[kind], rtol=0, atol=0)
