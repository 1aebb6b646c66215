"""Simulated tau counts the agreeing prefix of whole blocks."""

from __future__ import annotations

from unittest.mock import Mock

import torch

from moaspec_train.data_order import TrainBatch, fixed_blocks
from moaspec_train.dataset.examples import Example, collate
from moaspec_train.students.held_out import BLOCK_LENGTH, agreeing_prefix_lengths, measure_held_out
from moaspec_train.students.losses import ExitStates
from moaspec_train.students.students import Student, StudentOutput


def test_prefixes_of_whole_blocks_by_hand() -> None:
    blocks = [
        [1, 1, 0, 1, 1, 1, 1, 1],  # two agree, whatever comes after
        [0, 1, 1, 1, 1, 1, 1, 1],
        [1, 1, 1],  # cut short by the response's end: not counted
        [1] * BLOCK_LENGTH,
    ]
    agreed = torch.tensor([one for block in blocks for one in block], dtype=torch.bool)
    steps = torch.tensor([i for block in blocks for i in range(len(block))])
    assert agreeing_prefix_lengths(agreed, steps).tolist() == [2, 0, BLOCK_LENGTH]


def test_no_queries() -> None:
    empty = torch.zeros(0, dtype=torch.long)
    assert agreeing_prefix_lengths(empty.bool(), empty).tolist() == []


def test_without_drafts_there_is_no_moment() -> None:
    """A moment of nothing would say that all states are zero."""
    states = ExitStates(torch.zeros(0, 4), torch.zeros(0, 4), torch.clone)
    batch = collate([Example([1, 2], [3])], [0])
    part = TrainBatch(batch, fixed_blocks(batch, BLOCK_LENGTH), None)
    assert not part.blocks.loss_BT.any()
    student = Mock(spec=Student, draft_token_ids=None, full_head=torch.clone)
    student.target = Mock(device=torch.device("cpu"))
    student.module = torch.nn.Identity()
    student.run.return_value = StudentOutput([states])
    strategy = Mock(accelerator=Mock(num_processes=1, process_index=0))
    examples = [Example([1, 2], [3])]
    (found,) = measure_held_out(student, strategy, examples, [0], step=0, batch_size=1)
    assert found.moment_EE is None
    assert found.tau is None
