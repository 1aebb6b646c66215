"""Training examples and batches of them.

Legend: B batch, T tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


@dataclass(frozen=True, init=False)
class Example:
    """One conversation as token ids: prompts and the target's responses in turn.

    Args:
        *pieces: prompt, response, prompt, response, ...: `Example(prompt_ids, response_ids)` is one
            turn. Only responses carry loss.
    """

    pieces: tuple[tuple[int, ...], ...]

    def __init__(self, *pieces: Sequence[int]) -> None:
        object.__setattr__(self, "pieces", tuple(map(tuple, pieces)))

    def __len__(self) -> int:
        return sum(map(len, self.pieces))

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        return self.pieces[0]

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token for piece in self.pieces for token in piece)

    @property
    def response_ids(self) -> tuple[int, ...]:
        return tuple(token for piece in self.pieces[1::2] for token in piece)

    @property
    def response_mask(self) -> tuple[bool, ...]:
        return tuple(i % 2 == 1 for i, piece in enumerate(self.pieces) for _ in piece)

    @classmethod
    def from_mask(cls, token_ids: Sequence[int], written: Sequence[bool | int]) -> Example:
        """Build an example whose responses are the runs of marked tokens.

        Tokens after the last response are dropped.
        """
        pieces: list[list[int]] = [[]]
        for token, mark in zip(token_ids, written, strict=True):
            if bool(mark) != (len(pieces) % 2 == 0):
                pieces.append([])
            pieces[-1].append(token)
        return cls(*pieces[: len(pieces) // 2 * 2])

    def cut(self, max_length: int) -> Example | None:
        """The first `max_length` tokens; None if no response of two tokens is left.

        A response of one token carries no loss, because no token follows it.
        """
        kept = Example.from_mask(self.token_ids[:max_length], self.response_mask[:max_length])
        return kept if any(len(piece) >= 2 for piece in kept.pieces[1::2]) else None


@dataclass(frozen=True)
class Batch:
    """Examples, padded to one length."""

    input_ids_BT: Tensor  # int64, pads are 0
    attention_mask_BT: Tensor  # 1 for real tokens
    response_BT: Tensor  # bool, response tokens
    example_ids: tuple[int, ...]

    def to(self, device: torch.device) -> Batch:
        return map_tensors(self, lambda tensor: tensor.to(device))


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Copy a dataclass with every tensor changed, also those of dataclasses in it."""
    if isinstance(value, Tensor):
        return change(value)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    found = {field.name: map_tensors(getattr(value, field.name), change) for field in fields(value)}
    return replace(value, **found)


def collate(examples: Sequence[Example], example_ids: Sequence[int]) -> Batch:
    """Right-pad examples into one batch."""
    chosen = [examples[i] for i in example_ids]
    ids = [torch.tensor(example.token_ids) for example in chosen]
    masks = [torch.tensor(example.response_mask) for example in chosen]
    return Batch(
        pad_sequence(ids, batch_first=True),
        pad_sequence([torch.ones_like(one) for one in ids], batch_first=True),
        pad_sequence(masks, batch_first=True),
        tuple(example_ids),
    )


def epoch_batches(
    examples: Sequence[Example],
    *,
    batch_size: int,
    batch_tokens: int = 0,
    generator: torch.Generator,
) -> list[list[int]]:
    """Group an epoch's example ids by similar length into batches, in random order.

    Args:
        batch_tokens: if not 0, the largest number of tokens of a batch, pads included, instead of
            `batch_size`. A longer example is a batch of its own.
    """
    lengths = [len(example) for example in examples]
    order = torch.randperm(len(examples), generator=generator).tolist()
    mean = max(1, sum(lengths) // max(1, len(lengths)))
    pool = 16 * (max(1, batch_tokens // mean) if batch_tokens else batch_size)
    batches = []
    for start in range(0, len(order), pool):
        by_length = sorted(order[start : start + pool], key=lengths.__getitem__)
        if batch_tokens:
            batches += _filled(by_length, lengths, batch_tokens)
        else:
            batches += [by_length[i : i + batch_size] for i in range(0, len(by_length), batch_size)]
    shuffle = torch.randperm(len(batches), generator=generator).tolist()
    return [batches[i] for i in shuffle]


def _filled(by_length: Sequence[int], lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Split examples, shortest first, into batches of at most `tokens` tokens, pads included."""
    batches: list[list[int]] = [[]]
    for i in by_length:
        if batches[-1] and (len(batches[-1]) + 1) * lengths[i] > tokens:
            batches.append([])
        batches[-1].append(i)
    return batches


def frequent_tokens(
    examples: Sequence[Example], *, size: int, always: Iterable[int]
) -> Tensor | None:
    """Ids of a trimmed draft vocabulary: the most frequent response tokens, sorted.

    Args:
        size: number of ids to keep; 0 means no trimming.
        always: ids that are kept in any case, such as stop tokens.

    Returns:
        (at most `size`,) int64, or None for no trimming. Fewer ids when the responses have fewer.
    """
    if size == 0:
        return None
    kept = set(always)
    for token, _ in response_counts(examples).most_common():
        if len(kept) >= size:
            break
        kept.add(token)
    return torch.tensor(sorted(kept))


def coverage(examples: Iterable[Example], vocabulary: Tensor | None) -> float | None:
    """Share of response tokens in a vocabulary (None: all ids); None without responses."""
    counts = response_counts(examples)
    inside = counts.keys() if vocabulary is None else set(vocabulary.tolist())
    total = counts.total()
    return sum(n for token, n in counts.items() if token in inside) / total if total else None


def response_counts(examples: Iterable[Example]) -> Counter[int]:
    """Count the response tokens."""
    return Counter(token for example in examples for token in example.response_ids)
