"""Training examples on disk and in batches.

The format is JSON lines, optionally gzipped: `prompt_ids` and `response_ids`, both in the target's
own vocabulary, where the response was written by the target.

Legend: B batch, T tokens.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from moaspec.errors import DataError


@dataclass(frozen=True)
class Example:
    """One turn: what the target was given and what it answered, as token ids."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass(frozen=True)
class Batch:
    """Right-padded examples.

    Attributes:
        input_ids_BT: int64, pads are 0.
        attention_mask_BT: 1 for real tokens.
        response_start_B: index of each example's first response token.
        example_ids: which examples these are.
    """

    input_ids_BT: Tensor
    attention_mask_BT: Tensor
    response_start_B: Tensor
    example_ids: tuple[int, ...]


def read_examples(
    paths: Iterable[str | Path], *, vocab_size: int, max_length: int
) -> list[Example]:
    """Read every file, cutting responses so that an example has at most `max_length` tokens.

    Examples whose prompt alone fills `max_length`, or whose response has fewer than two tokens,
    teach nothing and are left out.

    Raises:
        DataError: a file is missing, or a line is malformed; the message names file and line.
    """
    examples = []
    for path in map(Path, paths):
        for number, line in _numbered_lines(path):
            example = _parse(line, where=f"{path}:{number}", vocab_size=vocab_size)
            cut = example.response_ids[: max(0, max_length - len(example.prompt_ids))]
            if len(cut) >= 2:
                examples.append(Example(example.prompt_ids, cut))
    if not examples:
        raise DataError(
            "No usable training examples: every file was empty or its prompts too long."
        )
    return examples


def _numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with _open_text(path) as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise DataError(f"Cannot read training data {path}: {error}") from error


def _open_text(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8")


def _parse(line: str, *, where: str, vocab_size: int) -> Example:
    try:
        row: dict[str, Any] = json.loads(line)
        example = Example(tuple(row["prompt_ids"]), tuple(row["response_ids"]))
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise DataError(
            f"{where}: expected a JSON object with lists 'prompt_ids' and 'response_ids', "
            f"got {line[:80]!r} ({error})."
        ) from error
    for token in example.prompt_ids + example.response_ids:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise DataError(f"{where}: token id {token!r} is outside 0..{vocab_size - 1}.")
    if not example.prompt_ids:
        raise DataError(f"{where}: 'prompt_ids' is empty; a response needs something before it.")
    return example


def collate(examples: Sequence[Example], example_ids: Sequence[int]) -> Batch:
    """Right-pad examples into one batch."""
    chosen = [examples[i] for i in example_ids]
    longest = max(map(len, chosen))
    input_ids_BT = torch.zeros(len(chosen), longest, dtype=torch.long)
    attention_mask_BT = torch.zeros(len(chosen), longest, dtype=torch.long)
    for row, example in enumerate(chosen):
        tokens = torch.tensor(example.prompt_ids + example.response_ids)
        input_ids_BT[row, : len(tokens)] = tokens
        attention_mask_BT[row, : len(tokens)] = 1
    starts = torch.tensor([len(example.prompt_ids) for example in chosen])
    return Batch(input_ids_BT, attention_mask_BT, starts, tuple(example_ids))


def epoch_batches(
    examples: Sequence[Example], *, batch_size: int, generator: torch.Generator
) -> list[list[int]]:
    """Example ids of one epoch's batches: like lengths within one, batches in random order."""
    order = torch.randperm(len(examples), generator=generator).tolist()
    pool = batch_size * 16
    batches = []
    for start in range(0, len(order), pool):
        by_length = sorted(order[start : start + pool], key=lambda i: len(examples[i]))
        batches += [by_length[i : i + batch_size] for i in range(0, len(by_length), batch_size)]
    shuffle = torch.randperm(len(batches), generator=generator).tolist()
    return [batches[i] for i in shuffle]


def frequent_tokens(
    examples: Sequence[Example], *, size: int, always: Iterable[int]
) -> Tensor | None:
    """Ids of a trimmed draft vocabulary: the most frequent response tokens, sorted.

    Args:
        examples: where to count.
        size: how many ids to keep; 0 means no trimming.
        always: ids that are kept however rare (those that end a turn).

    Returns:
        (at most `size`,) int64, or None for no trimming. Fewer ids when the responses have fewer.
    """
    if size == 0:
        return None
    counts = Counter(token for example in examples for token in example.response_ids)
    kept = set(always)
    for token, _ in counts.most_common():
        if len(kept) >= size:
            break
        kept.add(token)
    return torch.tensor(sorted(kept))
