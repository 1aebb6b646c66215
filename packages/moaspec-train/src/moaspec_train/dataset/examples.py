"""Training examples and batches of them.

Legend: B batch, T tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import accumulate, islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Tokens = npt.NDArray[np.int32]
COUNTED_AT_ONCE = 1024  # examples


class Example:
    """One conversation as token ids: prompts and the target's responses in turn.

    Args:
        *pieces: prompt, response, prompt, response, ...: `Example(prompt_ids, response_ids)` is one
            turn. Only responses carry loss.

    Attributes:
        tokens: (T,) int32, all of them; it may be in a file that is mapped into memory.
        ends: the end of each piece in `tokens`.
    """

    __slots__ = ("ends", "tokens")

    def __init__(self, *pieces: Sequence[int] | Tokens) -> None:
        arrays = [np.asarray(piece, np.int32) for piece in pieces]
        self.tokens: Tokens = np.concatenate(arrays) if arrays else np.zeros(0, np.int32)
        self.ends = tuple(accumulate(map(len, arrays)))

    @classmethod
    def of(cls, tokens: Tokens, ends: Iterable[int]) -> Example:
        """The example of these attributes; `tokens` is not copied."""
        one = cls.__new__(cls)
        one.tokens, one.ends = tokens, tuple(ends)
        return one

    def __len__(self) -> int:
        return len(self.tokens)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Example):
            return NotImplemented
        return self.ends == other.ends and np.array_equal(self.tokens, other.tokens)

    def __hash__(self) -> int:
        return hash((self.ends, self.tokens.tobytes()))

    def __repr__(self) -> str:
        return f"Example{self.pieces}"

    @property
    def pieces(self) -> tuple[tuple[int, ...], ...]:
        starts = (0, *self.ends)
        return tuple(
            tuple(self.tokens[start:end].tolist())
            for start, end in zip(starts, self.ends, strict=False)
        )

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        return tuple(self.tokens[: self.ends[0]].tolist())

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(self.tokens.tolist())

    @property
    def response_ids(self) -> tuple[int, ...]:
        return tuple(self.tokens[self.response_mask].tolist())

    @property
    def response_mask(self) -> npt.NDArray[np.bool_]:
        """(T,) bool."""
        mask = np.zeros(len(self.tokens), np.bool_)
        for start, end in self.responses:
            mask[start:end] = True
        return mask

    @property
    def responses(self) -> list[tuple[int, int]]:
        """Start and end of each response in `tokens`."""
        return list(zip(self.ends[::2], self.ends[1::2], strict=False))

    @property
    def num_response_tokens(self) -> int:
        return sum(end - start for start, end in self.responses)

    @classmethod
    def from_mask(
        cls,
        token_ids: Sequence[int] | Tokens,
        written: Sequence[bool | int] | npt.NDArray[np.bool_],
    ) -> Example:
        """Build an example whose responses are the runs of marked tokens.

        Tokens after the last response are dropped.
        """
        tokens, mask = np.asarray(token_ids, np.int32), np.asarray(written, np.bool_)
        borders = np.flatnonzero(np.diff(mask, prepend=False, append=False)).tolist()
        return cls.of(tokens[: borders[-1] if borders else 0], borders)

    def cut(self, max_length: int) -> Example | None:
        """The first `max_length` tokens; None if no response of two tokens is left.

        A response of one token carries no loss, because no token follows it.
        """
        kept = Example.from_mask(self.tokens[:max_length], self.response_mask[:max_length])
        return kept if any(end - start >= 2 for start, end in kept.responses) else None


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
    shape = (len(chosen), max(map(len, chosen)))
    ids, real, response = (np.zeros(shape, kind) for kind in (np.int64, np.int64, np.bool_))
    for row, example in enumerate(chosen):
        ids[row, : len(example)] = example.tokens
        real[row, : len(example)] = 1
        for start, end in example.responses:
            response[row, start:end] = True
    return Batch(
        torch.from_numpy(ids),
        torch.from_numpy(real),
        torch.from_numpy(response),
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
    """Count the response tokens; the first one to occur comes first."""
    counts, first = np.zeros(0, np.int64), np.zeros(0, np.int64)  # by token
    place = 0
    for some in batched(examples, COUNTED_AT_ONCE):
        tokens = np.concatenate([one.tokens[one.response_mask] for one in some])
        more = max(0, int(tokens.max(initial=-1)) + 1 - len(counts))
        counts, first = np.pad(counts, (0, more)), np.pad(first, (0, more))
        new = counts == 0
        counts += np.bincount(tokens, minlength=len(counts))
        # Of a token that occurs several times the last assignment holds: here its first place.
        places = np.zeros_like(first)
        places[tokens[::-1]] = np.arange(place, place + len(tokens))[::-1]
        first[new] = places[new]
        place += len(tokens)
    found = np.flatnonzero(counts)
    ids = found[first[found].argsort()]
    return Counter(dict(zip(ids.tolist(), counts[ids].tolist(), strict=True)))


def batched(examples: Iterable[Example], size: int) -> Iterator[tuple[Example, ...]]:
    """As `itertools.batched`, which Python 3.11 lacks."""
    rest = iter(examples)
    while some := tuple(islice(rest, size)):
        yield some
