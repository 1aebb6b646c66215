"""Blocks that are filled, encoded in part, shared, freed and filled anew."""

from __future__ import annotations

import random

import numpy as np

from moaspec_vllm.paged_drafter.encoded_tokens import EncodedTokens, ranges

BLOCKS = np.array([[3, 1, 4], [3, 5, 0]])
"""Of two requests that share the first block of four tokens."""


def missing(of: EncodedTokens, row: int, length: int) -> list[int]:
    rows, positions = of.missing(BLOCKS, np.array([row]), np.array([length]))
    assert set(rows.tolist()) <= {row}
    return positions.tolist()


def encode(of: EncodedTokens, row: int, length: int) -> None:
    rows, lengths = np.array([row]), np.array([length])
    of.add(BLOCKS, *of.missing(BLOCKS, rows, lengths))
    of.complete(rows, lengths)


def test_ranges_are_joined() -> None:
    assert ranges(np.array([3, 9, 0]), np.array([2, 0, 3])).tolist() == [3, 4, 0, 1, 2]
    assert ranges(np.array([], int), np.array([], int)).tolist() == []


def test_a_token_is_missing_until_it_is_encoded() -> None:
    encoded = EncodedTokens(8, 4, 2)
    assert missing(encoded, 0, 10) == [*range(10)]
    encode(encoded, 0, 6)
    assert missing(encoded, 0, 10) == [6, 7, 8, 9]
    assert missing(encoded, 0, 5) == []
    encode(encoded, 0, 10)
    assert missing(encoded, 0, 11) == [10]


def test_a_step_may_encode_the_first_of_them() -> None:
    encoded = EncodedTokens(8, 4, 2)
    rows, positions = encoded.missing(BLOCKS, np.array([0]), np.array([10]))
    encoded.add(BLOCKS, rows[:5], positions[:5])
    assert missing(encoded, 0, 10) == [5, 6, 7, 8, 9]


def test_requests_share_encoded_blocks() -> None:
    encoded = EncodedTokens(8, 4, 2)
    encode(encoded, 0, 10)
    assert missing(encoded, 1, 7) == [4, 5, 6]
    encode(encoded, 1, 3)  # a request with fewer tokens takes nothing back
    assert missing(encoded, 0, 10) == []


def test_blocks_before_the_first_are_not_asked_for() -> None:
    encoded = EncodedTokens(8, 4, 2)
    encoded.start_at(np.array([0]), np.array([2]))
    assert missing(encoded, 0, 10) == [8, 9]
    encode(encoded, 0, 10)
    encoded.follow(np.array([-1, 0]))  # a new request takes the row
    assert missing(encoded, 0, 10) == [*range(8)]
    assert encoded.first_R.tolist() == [0, 2]


def test_requests_keep_their_state_in_other_rows() -> None:
    encoded = EncodedTokens(8, 4, 2)
    blocks = BLOCKS.copy()
    encode(encoded, 0, 10)
    encoded._counts[3] = 0  # as if it were asked for: whole blocks are not looked at again
    encoded.follow(np.array([1, 0]))
    rows, _ = encoded.missing(blocks[::-1], np.array([1]), np.array([10]))
    assert rows.tolist() == []


def test_blocks_that_are_filled_anew_are_forgotten() -> None:
    encoded = EncodedTokens(8, 4, 2)
    encode(encoded, 0, 10)
    encode(encoded, 1, 7)
    # The first request goes on within a block, the second begins a block with its next token.
    encoded.forget(BLOCKS, np.array([10, 8]), np.array([12, 9]))
    assert missing(encoded, 0, 10) == []
    assert missing(encoded, 1, 7) == []
    encoded.forget(BLOCKS, np.array([12, 2]), np.array([12, 7]))
    assert missing(encoded, 1, 7) == [4, 5, 6]
    assert missing(encoded, 0, 10) == []


def test_many_requests_are_those_one_by_one() -> None:
    """Requests that come, go on, end and take one another's blocks, against plain sets."""
    chance, size, rows = random.Random(0), 4, 5
    encoded = EncodedTokens(40, size, rows)
    known: dict[tuple[int, int], bool] = {}  # block and offset -> whether it is encoded
    free, texts = list(range(40)), [0] * rows
    table = np.zeros((rows, 8), np.int64)
    for step in range(300):
        before, starts = list(range(rows)), list(texts)
        for row in range(rows):
            if texts[row] > 24 or (step and chance.random() < 0.05):
                free += table[row, : -(-texts[row] // size)].tolist()
                texts[row] = starts[row] = 0
                before[row] = -1
            grown = texts[row] + chance.randrange(0, 5)
            for place in range(-(-texts[row] // size), -(-grown // size)):
                table[row, place] = block = free.pop(chance.randrange(len(free)))
                known |= {(block, offset): False for offset in range(size)}
            texts[row] = grown
        encoded.follow(np.array(before))
        encoded.forget(table, np.array(starts), np.array(texts))
        chosen = np.array([row for row in range(rows) if chance.random() < 0.6], int)
        got = encoded.missing(table, chosen, np.array(texts)[chosen])
        expected = [
            (row, position)
            for row in chosen.tolist()
            for position in range(texts[row])
            if not known[int(table[row, position // size]), position % size]
        ]
        assert list(zip(*(part.tolist() for part in got), strict=True)) == expected
        number = chance.choice((len(expected), len(expected) // 2))
        encoded.add(table, got[0][:number], got[1][:number])
        for row, position in expected[:number]:
            known[int(table[row, position // size]), position % size] = True
        left = {row for row, _ in expected[number:]}
        done = np.array([row for row in chosen.tolist() if row not in left], int)
        encoded.complete(done, np.array(texts)[done])
