"""Blocks begin where simulated rounds of the drafter do."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

import tiny
from moaspec.train.data_order import TrainBatch, fixed_blocks
from moaspec.train.dataset.examples import Example, collate
from moaspec.train.run_config import TrainConfig
from moaspec.train.students.drafter_sizes import DrafterSizes
from moaspec.train.students.losses import ExitStates
from moaspec.train.students.simulated_rounds import ROUND_DEPTH, round_blocks
from moaspec.train.trainer import Trainer

VOCABULARY = 8


def part_of(*examples: Example) -> TrainBatch:
    batch = collate(examples, range(len(examples)))
    return TrainBatch(batch, fixed_blocks(batch, 3), None)


def begins(part: TrainBatch, drafted_MV: Tensor, ids: Tensor | None = None) -> list[list[int]]:
    """Places of each row's blocks; `drafted_MV` are logits, and the head is the identity."""
    states = ExitStates(drafted_MV, drafted_MV, torch.clone)
    found = []
    for chunk in (1, 3, 512):
        blocks = round_blocks(states, part, ids, chunk=chunk)
        assert torch.equal(blocks.loss_BT, part.blocks.loss_BT)
        first_BT = (blocks.step_BT == 0) & part.batch.response_BT
        found.append([row.nonzero().flatten().tolist() for row in first_BT])
    assert found[0] == found[1] == found[2]
    return found[0]


def certain(part: TrainBatch) -> Tensor:
    """Logits that draft each next token of the text."""
    written_M = part.batch.input_ids_BT.roll(-1, dims=1)[part.blocks.loss_BT]
    return torch.nn.functional.one_hot(written_M, VOCABULARY).float() * 99


def test_rounds_of_certain_drafts_are_as_long_as_the_tree_is_deep() -> None:
    part = part_of(Example([1, 2], [3, 4] * 8))
    # The newest token, its drafts, then the bonus token, which begins the next block.
    assert begins(part, certain(part)) == [[2, 2 + ROUND_DEPTH + 1, 2 + 2 * (ROUND_DEPTH + 1)]]


def test_a_round_ends_at_a_token_that_is_not_drafted() -> None:
    part = part_of(Example([1, 2], [3, 4, 5, 6, 7]), Example([1], [2, 3, 4]))
    drafted_MV = certain(part)
    drafted_MV[1] = torch.eye(VOCABULARY)[0] * 99  # after 4 it drafts 0 where the text has 5
    drafted_MV[4] = torch.eye(VOCABULARY)[0] * 99  # after 2, the second text's first
    assert begins(part, drafted_MV) == [[2, 4], [1, 2]]


def test_a_round_ends_where_all_its_drafts_together_are_unlikely() -> None:
    """Three drafts of probability 0.25 are likely enough (-4.2), four are not (-5.5)."""
    part = part_of(Example([1, 2], [3, 4, 5, 6, 7, 3]))
    drafted_MV = torch.full((5, VOCABULARY), -99.0)
    drafted_MV[:, 3:7] = math.log(0.25)
    drafted_MV[3, :] = drafted_MV[0, :].roll(1)  # 4 to 7, so that 7 is among them
    assert begins(part, drafted_MV) == [[2, 6]]


def test_each_response_begins_a_round() -> None:
    part = part_of(Example([1, 2], [3, 4, 5], [6, 7], [1, 2, 3]))
    assert begins(part, certain(part)) == [[2, 7]]


def test_tokens_outside_the_draft_vocabulary_end_a_round() -> None:
    part = part_of(Example([1], [2, 7, 2, 5, 2, 2]))
    ids = torch.tensor([2, 5])
    drafted_MV = torch.tensor([[0.0, 0.0], [99.0, 0.0], [0.0, 99.0], [99.0, 0.0], [99.0, 0.0]])
    assert begins(part, drafted_MV, ids) == [[1, 2]]


@pytest.mark.parametrize("vocabulary", [0, 40])
def test_training_cuts_at_rounds(vocabulary: int, tmp_path: Path) -> None:
    examples = [Example(p, t) for p, t in zip(tiny.PROMPTS, tiny.own_texts("llama"), strict=True)]
    config = TrainConfig(
        target="tiny",
        data=("unused",),
        output=str(tmp_path),
        held_out=1,
        batch_size=2,
        anchors="rounds",
        sizes=DrafterSizes(draft_vocab=vocabulary),
    )
    run = Trainer(tiny.target(), examples, config)
    part = run.data.next_batch(0)
    cut = run._cut_at_rounds(part)
    assert torch.equal(cut.blocks.loss_BT, part.blocks.loss_BT)
    assert int(cut.blocks.step_BT[cut.blocks.loss_BT].max()) <= ROUND_DEPTH
    assert not torch.equal(cut.blocks.step_BT, part.blocks.step_BT)
    assert run.train_step().count > 0
