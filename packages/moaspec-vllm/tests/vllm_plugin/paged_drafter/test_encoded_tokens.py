"""Blocks that are filled, encoded in part, shared, freed and filled anew."""

from __future__ import annotations

import numpy as np

from moaspec_vllm.paged_drafter.encoded_tokens import EncodedTokens

BLOCKS = np.array([[3, 1, 4], [3, 5, 0]])
"""Of two requests that share the first block of four tokens."""


def missing(of: EncodedTokens, row: int, length: int, first: int = 0) -> list[int]:
    return of.missing(BLOCKS[row], first, length).tolist()


def test_a_token_is_missing_until_it_is_encoded() -> None:
    encoded = EncodedTokens(8, 4)
    assert missing(encoded, 0, 10) == [*range(10)]
    encoded.add(BLOCKS[0], 0, 6)
    assert missing(encoded, 0, 10) == [6, 7, 8, 9]
    assert missing(encoded, 0, 5) == []
    encoded.add(BLOCKS[0], 0, 10)
    assert missing(encoded, 0, 11) == [10]


def test_requests_share_encoded_blocks() -> None:
    encoded = EncodedTokens(8, 4)
    encoded.add(BLOCKS[0], 0, 10)
    assert missing(encoded, 1, 7) == [4, 5, 6]
    encoded.add(BLOCKS[1], 0, 3)  # a request with fewer tokens takes nothing back
    assert missing(encoded, 0, 10) == []


def test_blocks_before_the_first_are_not_asked_for() -> None:
    encoded = EncodedTokens(8, 4)
    assert missing(encoded, 0, 10, first=2) == [8, 9]
    encoded.add(BLOCKS[0], 2, 10)
    assert missing(encoded, 0, 10, first=2) == []
    assert missing(encoded, 0, 10) == [*range(8)]


def test_blocks_that_are_filled_anew_are_forgotten() -> None:
    encoded = EncodedTokens(8, 4)
    encoded.add(BLOCKS[0], 0, 10)
    encoded.add(BLOCKS[1], 0, 7)
    # The first request goes on within a block, the second begins a block with its next token.
    encoded.forget(BLOCKS, np.array([10, 8]), np.array([12, 9]))
    assert missing(encoded, 0, 10) == []
    assert missing(encoded, 1, 7) == []
    encoded.forget(BLOCKS, np.array([12, 2]), np.array([12, 7]))
    assert missing(encoded, 1, 7) == [4, 5, 6]
    assert missing(encoded, 0, 10) == []
