"""Masks, written out."""

from __future__ import annotations

import torch
from torch import Tensor

from block_drafts import last_known
from moaspec.model.masks import (
    memory_mask,
    reused_layer_mask,
    staircase_mask,
    text_mask,
    window_mask,
)
from moaspec.model.moa import positions

PADDED = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
BLOCK_START = torch.tensor([[0, 0, 0, 2], [0, 1, 1, 1]])


def literal(mask_B1TS: Tensor) -> list[list[list[int]]]:
    assert mask_B1TS.dtype == torch.bool
    assert mask_B1TS.shape[1] == 1
    return mask_B1TS[:, 0].int().tolist()


def test_text_mask_is_causal_and_hides_pads() -> None:
    assert literal(text_mask(PADDED)) == [
        [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]],
        [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1]],
    ]


def test_text_mask_with_pads_before_the_text() -> None:
    assert literal(text_mask(torch.tensor([[0, 1, 1]]))) == [[[1, 0, 0], [0, 1, 0], [0, 1, 1]]]


def test_staircase_sees_only_its_own_block() -> None:
    assert literal(staircase_mask(text_mask(PADDED), BLOCK_START)) == [
        [[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 1]],
        [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]],
    ]


def test_a_window_keeps_the_last_keys_of_each_text() -> None:
    assert literal(window_mask(text_mask(PADDED), 2)) == [
        [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]],
        [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 1, 0, 1]],
    ]
    assert literal(window_mask(text_mask(torch.tensor([[0, 1, 1, 1]])), 2)) == [
        [[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    ]


def test_a_window_follows_each_nodes_own_path() -> None:
    """Two verified tokens, then nodes 0 - 1 - 3 and 0 - 2: slots are not positions."""
    tree = torch.tensor(
        [[[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 1, 0], [1, 1, 1, 1, 0, 1]]]
    )
    assert literal(window_mask(tree.bool()[None], 3)) == [
        [[1, 1, 1, 0, 0, 0], [0, 1, 1, 1, 0, 0], [0, 1, 1, 0, 1, 0], [0, 0, 1, 1, 0, 1]]
    ]


def test_a_window_over_true_and_drafted_keys() -> None:
    mask = reused_layer_mask(text_mask(PADDED[:1]), BLOCK_START[:1])
    assert literal(window_mask(mask, 2)) == [
        [
            [1, 0, 0, 0, 0, 0, 0, 0],
            [1, 0, 0, 0, 0, 1, 0, 0],
            [0, 0, 0, 0, 0, 1, 1, 0],
            [0, 0, 1, 0, 0, 0, 0, 1],
        ]
    ]


def test_a_window_wider_than_the_text_changes_nothing() -> None:
    mask = text_mask(PADDED)
    assert window_mask(mask, 4) is mask


def test_memory_mask_ends_at_the_block_start() -> None:
    assert literal(memory_mask(PADDED, BLOCK_START)) == [
        [[1, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0]],
        [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0]],
    ]


def test_memory_mask_hides_pads_before_the_block_start() -> None:
    mask = memory_mask(torch.tensor([[0, 1, 1]]), torch.tensor([[2, 2, 1]]))
    assert literal(mask) == [[[0, 1, 1], [0, 1, 1], [0, 1, 0]]]


def test_reused_layers_see_true_keys_then_the_drafters_own() -> None:
    assert literal(reused_layer_mask(text_mask(PADDED[:1]), BLOCK_START[:1])) == [
        [
            [1, 0, 0, 0, 0, 0, 0, 0],
            [1, 0, 0, 0, 0, 1, 0, 0],
            [1, 0, 0, 0, 0, 1, 1, 0],
            [1, 1, 1, 0, 0, 0, 0, 1],
        ]
    ]


def test_last_known() -> None:
    index = torch.arange(6)[None]
    known = torch.tensor([[1, 1, 0, 0, 1, 0]])
    assert last_known(index, known).tolist() == [[0, 1, 1, 1, 4, 4]]
    assert last_known(index, torch.zeros(1, 6)).tolist() == [[0] * 6]


def test_positions_count_real_tokens() -> None:
    mask = torch.tensor([[1, 1, 1, 0], [0, 0, 1, 1]])
    assert positions(mask).tolist() == [[0, 1, 2, 2], [0, 0, 0, 1]]
