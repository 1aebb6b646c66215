"""T-step bounded blocks."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from moaspec_train.data_order import Blocks, fixed_blocks, random_blocks
from moaspec_train.dataset.examples import Batch, Example, collate


def test_fixed_blocks_written_out() -> None:
    batch = collate([Example((1, 2, 3), (4, 5, 6, 7, 8)), Example((1,), (2, 3, 4))], [0, 1])
    blocks = fixed_blocks(batch, 2)
    # Responses begin at 3 and 1: blocks {3, 4}, {5, 6}, {7} and {1, 2}, {3}.
    assert blocks.last_verified_BT[0].tolist() == [0, 1, 2, 2, 2, 4, 4, 6]
    assert blocks.last_verified_BT[1, :4].tolist() == [0, 0, 0, 2]
    assert blocks.step_BT[0, 3:].tolist() == [0, 1, 0, 1, 0]
    assert blocks.step_BT[1, 1:4].tolist() == [0, 1, 0]
    assert blocks.loss_BT.int().tolist() == [[0, 0, 0, 1, 1, 1, 1, 0], [0, 1, 1, 0, 0, 0, 0, 0]]


def test_every_response_has_blocks_of_its_own() -> None:
    """Responses at 2..4 and 7..9: blocks {2, 3}, {4}, {7, 8}, {9}; the rest is verified."""
    batch = collate([Example((1, 2), (3, 4, 5), (6, 7), (8, 9, 1))], [0])
    blocks = fixed_blocks(batch, 2)
    assert blocks.last_verified_BT.tolist() == [[0, 1, 1, 1, 3, 5, 6, 6, 6, 8]]
    assert blocks.step_BT[blocks.loss_BT].tolist() == [0, 1, 0, 1]
    assert blocks.loss_BT.int().tolist() == [[0, 0, 1, 1, 0, 0, 0, 1, 1, 0]]


def block_lengths(blocks: Blocks, batch: Batch, row: int) -> list[int]:
    """Lengths of the row's blocks, as its steps tell them."""
    start, *_ = batch.response_BT[row].nonzero().flatten().tolist()
    stop = int(batch.attention_mask_BT[row].sum())
    lengths: list[int] = []
    for step in blocks.step_BT[row, start:stop].tolist():
        if step == 0:
            lengths.append(0)
        assert step == lengths[-1]
        lengths[-1] += 1
    return lengths


@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(2, 40)), min_size=1, max_size=4),
    st.integers(1, 6),
    st.integers(0, 6),
    st.integers(0, 1000),
)
def test_random_blocks_partition_each_response(
    sizes: list[tuple[int, int]], shortest: int, extra: int, seed: int
) -> None:
    examples = [Example((1,) * prompt, (2,) * response) for prompt, response in sizes]
    batch = collate(examples, range(len(examples)))
    longest = shortest + extra
    generator = torch.Generator().manual_seed(seed)
    blocks = random_blocks(batch, shortest=shortest, longest=longest, generator=generator)
    for row, (prompt, response) in enumerate(sizes):
        lengths = block_lengths(blocks, batch, row)
        assert sum(lengths) == response
        assert all(shortest <= length <= longest for length in lengths[1:-1])
        assert 1 <= lengths[0] <= longest
        assert lengths[-1] <= longest
        begin = prompt
        for length in lengths:
            inside = blocks.last_verified_BT[row, begin : begin + length]
            assert inside.tolist() == [begin - 1] * length
            begin += length
        loss = blocks.loss_BT[row].nonzero().flatten().tolist()
        assert loss == list(range(prompt, prompt + response - 1))


def test_the_same_seed_gives_the_same_blocks() -> None:
    batch = collate([Example((1,), (2,) * 50)], [0])
    made = [
        random_blocks(
            batch, shortest=2, longest=9, generator=torch.Generator().manual_seed(seed)
        ).last_verified_BT.tolist()
        for seed in (3, 3, 4)
    ]
    assert made[0] == made[1]
    assert made[0] != made[2]


def test_borders_fall_anywhere() -> None:
    """The first block may be cut short, so no position is always a block's first."""
    batch = collate([Example((1,), (2,) * 20)] * 200, range(200))
    generator = torch.Generator().manual_seed(0)
    blocks = random_blocks(batch, shortest=5, longest=5, generator=generator)
    second = (blocks.step_BT[:, 2:7] == 0).sum(0)
    assert bool((second > 0).all())
