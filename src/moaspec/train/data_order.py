"""Examples and blocks of each step, and their split over processes and micro-batches.

Random numbers are drawn for the whole step and are the same in every process, so the number of
processes does not change the training data.

Legend: B batch, T tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moaspec.errors import InputError
from moaspec.train.dataset.examples import Batch, Example, collate, epoch_batches
from moaspec.train.run_config import TrainConfig
from moaspec.train.schedule import staircase_probability
from moaspec.train.students.blocks import Blocks, random_blocks


@dataclass(frozen=True)
class TrainBatch:
    """Rows of a step: all of them, or those of one pass of one process.

    Attributes:
        staircase_B: bool, rows whose SA sees its own block only; None for none.
    """

    batch: Batch
    blocks: Blocks
    staircase_B: Tensor | None

    def to(self, device: torch.device) -> TrainBatch:
        staircase_B = None if self.staircase_B is None else self.staircase_B.to(device)
        return TrainBatch(self.batch.to(device), self.blocks.to(device), staircase_B)


class DataOrder:
    """The examples of a run, shuffled once: held-out examples first, then training examples.

    Raises:
        InputError: no example is left to train on.
    """

    def __init__(self, examples: Sequence[Example], config: TrainConfig) -> None:
        if len(examples) <= config.held_out:
            raise InputError(
                f"{len(examples)} examples are too few for held_out={config.held_out}, which sets "
                f"as many aside: give more data, or set held_out below {len(examples)}."
            )
        order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(config.seed))
        self.examples = [examples[i] for i in order.tolist()]
        self.held_out_ids = list(range(config.held_out))
        self.train_ids = list(range(config.held_out, len(examples)))
        self._config = config
        self._generator = torch.Generator().manual_seed(config.seed + 1)
        self._queue: list[list[int]] = []

    def next_batch(self, step: int) -> TrainBatch:
        batch = collate(self.examples, self._next_ids())
        blocks = random_blocks(
            batch,
            shortest=self._config.shortest_block,
            longest=self._config.longest_block,
            generator=self._generator,
        )
        if not self._config.staircase:
            return TrainBatch(batch, blocks, None)
        drawn_B = torch.rand(len(batch.example_ids), generator=self._generator)
        return TrainBatch(batch, blocks, drawn_B < staircase_probability(self._config, step))

    def _next_ids(self) -> list[int]:
        if not self._queue:
            batches = epoch_batches(
                [self.examples[i] for i in self.train_ids],
                batch_size=self._config.batch_size,
                batch_tokens=self._config.batch_tokens,
                generator=self._generator,
            )
            self._queue = [[self.train_ids[i] for i in ids] for ids in batches]
        return self._queue.pop()

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for example in self.examples:
            digest.update(repr(example.pieces).encode())
        return digest.hexdigest()[:16]

    def state(self) -> dict[str, Any]:
        """The position in the epoch, as JSON."""
        return {"generator": self._generator.get_state().tolist(), "queue": self._queue}

    def restore(self, state: dict[str, Any]) -> None:
        self._generator.set_state(torch.tensor(state["generator"], dtype=torch.uint8))
        queue = [list(map(int, ids)) for ids in state["queue"]]
        if not {i for ids in queue for i in ids} <= set(self.train_ids):
            raise ValueError("the order names examples that are not there")
        self._queue = queue


def split_batch(part: TrainBatch, number: int) -> list[TrainBatch]:
    """Split rows into `number` passes, sorted by length to reduce padding.

    Passes without rows get one row without loss, because every process must take part in every
    pass.
    """
    lengths = part.batch.attention_mask_BT.sum(1).tolist()
    rows = sorted(range(len(lengths)), key=lengths.__getitem__)
    # If passes are unequal, the larger ones hold the shortest rows.
    ends = [-(-len(rows) * (i + 1) // number) for i in range(number)]
    groups = [rows[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    return [
        _select_rows(part, group) if group else _without_loss(_select_rows(part, rows[:1]))
        for group in groups
    ]


def _select_rows(part: TrainBatch, rows: list[int]) -> TrainBatch:
    """Select rows and cut padding that only the other rows needed."""
    batch, blocks = part.batch, part.blocks
    longest = int(batch.attention_mask_BT[rows].sum(1).max())
    return TrainBatch(
        Batch(
            batch.input_ids_BT[rows, :longest],
            batch.attention_mask_BT[rows, :longest],
            batch.response_BT[rows, :longest],
            tuple(batch.example_ids[row] for row in rows),
        ),
        Blocks(
            blocks.block_start_BT[rows, :longest],
            blocks.step_BT[rows, :longest],
            blocks.loss_BT[rows, :longest],
        ),
        None if part.staircase_B is None else part.staircase_B[rows],
    )


def _without_loss(part: TrainBatch) -> TrainBatch:
    blocks = part.blocks
    silent = Blocks(blocks.block_start_BT, blocks.step_BT, torch.zeros_like(blocks.loss_BT))
    return TrainBatch(part.batch, silent, part.staircase_B)
