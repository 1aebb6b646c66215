"""What a step trains on, and each process's part of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moaspec_core.errors import InputError
from moaspec_train.data_order import DataOrder, split_batch
from moaspec_train.dataset.examples import Example
from moaspec_train.run_config import TrainConfig

EXAMPLES = [Example(range(3), range(10 + i)) for i in range(7)]


def config(**changes: Any) -> TrainConfig:
    settings: dict[str, Any] = {"target": "t", "data": ("d",), "output": "o", "held_out": 0}
    return TrainConfig(**settings | changes)


def order(**changes: Any) -> DataOrder:
    return DataOrder(EXAMPLES, config(**changes))


@pytest.mark.parametrize("number", [1, 2, 3, 7, 9])
def test_parts_hold_every_query_of_the_step_once(number: int) -> None:
    whole = order(batch_size=7, staircase=True).next_batch(0)
    parts = split_batch(whole, number)
    assert len(parts) == number
    assert sum(int(p.blocks.loss_BT.sum()) for p in parts) == int(whole.blocks.loss_BT.sum())
    for part in parts:
        assert part.batch.input_ids_BT.shape[0] >= 1
        # No column is a pad in every row.
        assert bool(part.batch.attention_mask_BT.any(0).all())
        for row, example in enumerate(part.batch.example_ids):
            at = whole.batch.example_ids.index(example)
            width = part.blocks.last_verified_BT.shape[1]
            expected = whole.blocks.last_verified_BT[at, :width]
            assert torch.equal(part.blocks.last_verified_BT[row], expected)


def test_a_restored_order_goes_on_in_the_middle_of_an_epoch() -> None:
    first, second = order(batch_size=2), order(batch_size=2)
    for step in range(2):
        first.next_batch(step)
    second.restore(first.state())
    for step in range(2, 12):
        a, b = first.next_batch(step), second.next_batch(step)
        assert a.batch.example_ids == b.batch.example_ids
        assert torch.equal(a.blocks.last_verified_BT, b.blocks.last_verified_BT)


def test_named_examples_are_held_out_whatever_else_there_is() -> None:
    """A run over more data measures on the same; none of it is trained on."""
    for examples in (EXAMPLES, EXAMPLES[1:]):
        order = DataOrder(examples, config(), EXAMPLES[:2])
        assert [order.examples[i] for i in order.held_out_ids] == EXAMPLES[:2]
        trained = [order.examples[i] for i in order.train_ids]
        assert {*trained} == {*EXAMPLES[2:]}
    with pytest.raises(InputError, match="held_out_data"):
        DataOrder(EXAMPLES[:2], config(), EXAMPLES[:2])


def test_examples_that_are_added_come_first_also_after_a_restart() -> None:
    """And an order that was saved before more were added is gone on with; its epoch is not lost."""
    held_out, first, more = EXAMPLES[:1], EXAMPLES[1:4], [*EXAMPLES[4:], EXAMPLES[0]]
    order = DataOrder(first, config(batch_size=1), held_out)
    seen = [order.next_batch(0).batch.example_ids[0]]
    saved = order.state()
    order.add(more)
    again = DataOrder([*first, *more], config(batch_size=1), held_out)
    assert again.fingerprint() == order.fingerprint()
    assert again.fingerprint(4) == DataOrder(first, config(), held_out).fingerprint()
    again.restore(saved)
    for one in (order, again):
        ids = [one.next_batch(step).batch.example_ids[0] for step in range(1, 6)]
        assert set(ids[:3]) == {4, 5, 6}
        assert sorted([*seen, *ids]) == [1, 2, 3, 4, 5, 6]


def test_an_epoch_has_every_example_once(tmp_path: Path) -> None:
    data = order(batch_size=2, output=str(tmp_path), held_out=1)
    seen = [i for step in range(3) for i in data.next_batch(step).batch.example_ids]
    assert sorted(seen) == data.train_ids
