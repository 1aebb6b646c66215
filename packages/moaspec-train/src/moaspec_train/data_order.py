"""Examples and blocks of each step, and their split over processes and micro-batches.

Random numbers are drawn for the whole step and are the same in every process, so the number of
processes does not change the training data.

Legend: B batch, T tokens, N blocks of a row.
"""

from __future__ import annotations

import hashlib
import sys
from bisect import bisect_left
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from moaspec.model.moa import Queries
from moaspec_core.errors import InputError
from moaspec_train.dataset.examples import Batch, Example, collate, epoch_batches, map_tensors
from moaspec_train.run_config import TrainConfig, staircase_probability

WIDTH = 64  # of which tokens of a row are a multiple on a GPU, which plans each shape anew

T = TypeVar("T")


@dataclass(frozen=True)
class Blocks:
    """A partition of every response into blocks, per query."""

    # s(i), the last position whose target activations query i may read. In a block that begins at b
    # it is b - 1: token b plays the newest token, which has no activations when a round starts.
    # Outside the responses s(i) = i.
    last_verified_BT: Tensor
    step_BT: Tensor  # index of the draft of query i in its round, from 0
    # Bool, queries with loss: response tokens that are followed by another of theirs.
    loss_BT: Tensor


def random_blocks(
    batch: Batch, *, shortest: int, longest: int, generator: torch.Generator
) -> Blocks:
    """Draw block lengths uniformly from shortest..longest (the paper: 5..15).

    Source: arXiv 2410.03804, section 4.2 and appendix (training with T-step bounded masks).
    """
    rows = batch.input_ids_BT.shape[0]
    num = batch.input_ids_BT.shape[1] // shortest + 1
    lengths = torch.randint(shortest, longest + 1, (rows, num), generator=generator)
    # The first block is shortened randomly, so that block borders can be anywhere.
    lengths[:, 0] = (lengths[:, 0] * torch.rand(rows, generator=generator)).long() + 1
    starts_BN = torch.nn.functional.pad(lengths.cumsum(1), (1, 0))
    index_BT, start_BT = _indices_and_starts(batch.response_BT)
    offset_BT = index_BT - start_BT
    which = torch.searchsorted(starts_BN, offset_BT, right=True) - 1
    return _blocks(batch.response_BT, index_BT, offset_BT - starts_BN.gather(1, which))


def fixed_blocks(batch: Batch, length: int) -> Blocks:
    """Cut responses into blocks of one length, for evaluation."""
    index_BT, start_BT = _indices_and_starts(batch.response_BT)
    return _blocks(batch.response_BT, index_BT, (index_BT - start_BT) % length)


def _blocks(response_BT: Tensor, index_BT: Tensor, step_BT: Tensor) -> Blocks:
    last_verified_BT = torch.where(response_BT, index_BT - step_BT - 1, index_BT)
    followed_BT = torch.nn.functional.pad(response_BT[:, 1:], (0, 1))
    return Blocks(last_verified_BT.clamp(min=0), step_BT, response_BT & followed_BT)


def _indices_and_starts(response_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Index of each token, and start of its response, or of the last response before it."""
    index_BT = torch.arange(response_BT.shape[1], device=response_BT.device).expand_as(response_BT)
    before_BT = torch.nn.functional.pad(response_BT[:, :-1], (1, 0))
    return index_BT, torch.where(response_BT & ~before_BT, index_BT, 0).cummax(1)[0]


@dataclass(frozen=True)
class TrainBatch:
    """Rows of a step: all of them, or those of one pass of one process."""

    batch: Batch
    blocks: Blocks
    staircase_B: Tensor | None  # bool, rows whose SA sees its own block only; None for none
    found: Places | None = None  # see `places`

    @cached_property
    def num_loss_tokens(self) -> int:
        return int(self.blocks.loss_BT.sum())

    @cached_property
    def num_tokens(self) -> int:
        """Without pads."""
        return int(self.batch.attention_mask_BT.sum())

    @property
    def places(self) -> Places:
        """Of a batch `with_places`."""
        assert self.found is not None
        return self.found

    def with_places(self) -> TrainBatch:
        """With the places of its tokens, which waits for a GPU that has the batch."""
        if self.found is not None:
            return self
        queries = Queries.chosen(self.blocks.loss_BT)
        real_T = self.batch.attention_mask_BT.flatten().nonzero()[:, 0]
        return replace(self, found=Places(queries, real_T))

    def prepared(self, device: torch.device) -> TrainBatch:
        """The batch as `to` moves it without a wait: with places, for a GPU in pinned memory."""
        if device.type != "cuda":
            return self.with_places()
        few_shapes = map_tensors(self, lambda x: _padded(x) if x.ndim == 2 else x)
        return map_tensors(few_shapes.with_places(), Tensor.pin_memory)

    def to(self, device: torch.device) -> TrainBatch:
        return map_tensors(self, lambda tensor: tensor.to(device, non_blocking=True))


@dataclass(frozen=True)
class Places:
    """Where tokens of a pass are, found on the CPU.

    Attributes:
        queries: those with loss.
        real_T: int64, those that are no pads, in (B, T), flattened.
    """

    queries: Queries
    real_T: Tensor


class DataOrder:
    """The examples of a run, held-out ones first.

    Args:
        examples: to train on.
        held_out: to measure on; none takes `config.held_out` of `examples` after a seeded shuffle.

    Raises:
        InputError: all examples are held out.
    """

    def __init__(
        self, examples: Sequence[Example], config: TrainConfig, held_out: Sequence[Example] = ()
    ) -> None:
        if not held_out:
            config.require_enough(len(examples))
            generator = torch.Generator().manual_seed(config.seed)
            shuffled = [examples[i] for i in torch.randperm(len(examples), generator=generator)]
            held_out, examples = shuffled[: config.held_out], shuffled[config.held_out :]
        self._config = config
        self._generator = torch.Generator().manual_seed(config.seed + 1)
        self._digest = hashlib.sha256()
        self._queue: list[list[int]] = []  # batches of this epoch, the next one last
        self._held_out = {one.tokens.tobytes() for one in held_out}
        examples = [one for one in examples if one.tokens.tobytes() not in self._held_out]
        self.examples = list[Example]()
        self.held_out_ids = self._append(held_out)
        self.train_ids = self._append(examples)
        if not self.train_ids:
            raise InputError(
                "All examples of data are also in held_out_data: give more of the former."
            )

    def add(self, examples: Sequence[Example]) -> None:
        """Train on more examples, before the rest of this epoch; not on those that are held out."""
        ids = self._append([one for one in examples if one.tokens.tobytes() not in self._held_out])
        self.train_ids += ids
        self._queue += self._batches(ids)

    def _append(self, examples: Sequence[Example]) -> list[int]:
        """Number examples."""
        first = len(self.examples)
        self.examples += examples
        for example in examples:
            self._digest.update(_bytes(example))
        return list(range(first, len(self.examples)))

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
            self._queue = self._batches(self.train_ids)
        return self._queue.pop()

    def _batches(self, ids: Sequence[int]) -> list[list[int]]:
        batches = epoch_batches(
            [self.examples[i] for i in ids],
            batch_size=self._config.batch_size,
            batch_tokens=self._config.batch_tokens,
            generator=self._generator,
        )
        return [[ids[i] for i in batch] for batch in batches]

    def fingerprint(self, count: int | None = None) -> str:
        """A hash of the first `count` examples, or of all."""
        digest = self._digest
        if count is not None:
            digest = hashlib.sha256()
            for one in self.examples[:count]:
                digest.update(_bytes(one))
        return "2:" + digest.hexdigest()[:16]  # 2: the form of the hash

    def state(self) -> dict[str, Any]:
        """The position in the epoch, as JSON."""
        return {
            "generator": self._generator.get_state().tolist(),
            "queue": list(self._queue),
            "examples": len(self.examples),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a saved state; examples that were added since come first."""
        self._generator.set_state(torch.tensor(state["generator"], dtype=torch.uint8))
        queue = [list(map(int, ids)) for ids in state["queue"]]
        if not {i for ids in queue for i in ids} <= set(self.train_ids):
            raise ValueError("the order names examples that are not there")
        added = self.train_ids[bisect_left(self.train_ids, state.get("examples", sys.maxsize)) :]
        self._queue = queue + (self._batches(added) if added else [])


def _bytes(example: Example) -> bytes:
    return np.asarray([len(example.ends), *example.ends], np.int32).tobytes() + bytes(
        example.tokens.data
    )


class NextBatch(Generic[T]):
    """Takes batches of an order; the next one is prepared in a thread while a device computes.

    Args:
        prepare: makes of a step's rows what a step needs.
        ahead: False prepares nothing before it is asked for.
    """

    def __init__(
        self, order: DataOrder, prepare: Callable[[TrainBatch], T], *, ahead: bool
    ) -> None:
        self._order, self._prepare = order, prepare
        self._pool = ThreadPoolExecutor(1, "batches") if ahead else None
        self._waiting: tuple[int, Future[T], dict[str, Any]] | None = None

    def take(self, step: int) -> T:
        """What the batch of this step is prepared to."""
        if self._waiting is None or self._waiting[0] != step:
            self.give_back()
            found = self._make(step)
        else:
            found, self._waiting = self._waiting[1].result(), None
        if self._pool is not None:
            before = self._order.state()
            self._waiting = (step + 1, self._pool.submit(self._make, step + 1), before)
        return found

    def give_back(self) -> None:
        """Set the order to what follows the last batch that was taken."""
        if self._waiting is not None:
            _, future, before = self._waiting
            self._waiting = None
            future.result()
            self._order.restore(before)

    def _make(self, step: int) -> T:
        return self._prepare(self._order.next_batch(step))


def _padded(x_BT: Tensor) -> Tensor:
    return torch.nn.functional.pad(x_BT, (0, -x_BT.shape[1] % WIDTH))


def split_batch(part: TrainBatch, number: int) -> list[TrainBatch]:
    """Split rows into `number` passes of similar size, pads included, by length.

    Passes without rows get one row without loss, because every process must take part in every
    pass.
    """
    lengths = part.batch.attention_mask_BT.sum(1).tolist()
    rows = sorted(range(len(lengths)), key=lengths.__getitem__)
    groups = split_rows(rows, lengths, number)
    return [
        _select_rows(part, group) if group else _without_loss(_select_rows(part, rows[:1]))
        for group in groups
    ]


def split_rows(rows: Sequence[int], lengths: Sequence[int], number: int) -> list[Sequence[int]]:
    """Split rows, shortest first, into `number` groups whose largest has as few tokens as can be.

    Pads count. Groups are empty where there are fewer rows.
    """
    sizes = [lengths[row] for row in rows]
    low, high = max(sizes, default=0), sum(sizes) + len(sizes) * max(sizes, default=0)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_cuts(sizes, middle)) <= number else (middle + 1, high)
    cuts = _cuts(sizes, low)
    while len(cuts) < number and (wide := [c for c in cuts if c[1] - c[0] > 1]):
        start, end = max(wide, key=lambda cut: (cut[1] - cut[0]) * sizes[cut[1] - 1])
        at = cuts.index((start, end))
        cuts[at : at + 1] = [(start, (start + end + 1) // 2), ((start + end + 1) // 2, end)]
    cuts += [(len(rows), len(rows))] * (number - len(cuts))
    return [rows[start:end] for start, end in cuts]


def _cuts(sizes: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Ends of groups of at most so many tokens, the longest filled first."""
    cuts, end = list[tuple[int, int]](), len(sizes)
    while end:
        start = max(0, end - max(1, most // max(1, sizes[end - 1])))
        cuts.append((start, end))
        end = start
    return cuts[::-1]


def _select_rows(part: TrainBatch, rows: Sequence[int]) -> TrainBatch:
    """Select rows and cut padding that only the other rows needed."""
    rows = list(rows)
    longest = int(part.batch.attention_mask_BT[rows].sum(1).max())
    chosen = map_tensors(part, lambda x: x[rows, :longest] if x.ndim == 2 else x[rows])
    example_ids = tuple(part.batch.example_ids[row] for row in rows)
    return replace(chosen, batch=replace(chosen.batch, example_ids=example_ids))


def _without_loss(part: TrainBatch) -> TrainBatch:
    silent = torch.zeros_like(part.blocks.loss_BT)
    return replace(part, blocks=replace(part.blocks, loss_BT=silent))
