"""Statistics of training data."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from moaspec.model.drafter_config import TargetIdentity
from moaspec.train.dataset.examples import (
    Example,
    epoch_batches,
    frequent_tokens,
    padding_share,
    response_counts,
)
from moaspec.train.students.target_activations import activation_widths, bytes_per_token

VOCABULARIES = (2048, 4096, 8192, 16384, 32768)
PERCENTILES = (50, 90, 99, 100)
BATCH_SIZE = 8


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """Statistics of a list of examples.

    Attributes:
        examples, responses, tokens, response_tokens: total numbers.
        distinct_tokens: number of different response tokens.
        lengths: tokens of an example, by percentile.
        coverage: fraction of response tokens in a draft vocabulary, by its size.
        padding: fraction of pads in batches of 8 examples, and in batches of the same size by
            tokens.
        bytes_per_token: of the activation cache.
    """

    examples: int
    responses: int
    tokens: int
    response_tokens: int
    distinct_tokens: int
    lengths: dict[int, int]
    coverage: dict[int, float]
    padding: dict[str, float]
    bytes_per_token: int

    @property
    def cache_bytes(self) -> int:
        return self.tokens * self.bytes_per_token


def statistics(
    examples: Sequence[Example], identity: TargetIdentity, *, always: Collection[int]
) -> Statistics:
    """Compute the statistics."""
    lengths = sorted(map(len, examples))
    counts = response_counts(examples)
    return Statistics(
        examples=len(examples),
        responses=sum(len(example.pieces) // 2 for example in examples),
        tokens=sum(lengths),
        response_tokens=counts.total(),
        distinct_tokens=len(counts),
        lengths={p: lengths[(len(lengths) - 1) * p // 100] for p in PERCENTILES},
        coverage={size: _coverage(examples, size, always) for size in VOCABULARIES},
        padding=_padding(examples),
        bytes_per_token=bytes_per_token(activation_widths(identity)),
    )


def _coverage(examples: Sequence[Example], size: int, always: Collection[int]) -> float:
    kept = frequent_tokens(examples, size=size, always=always)
    counts = response_counts(examples)
    inside = set() if kept is None else set(kept.tolist())
    return sum(n for token, n in counts.items() if token in inside) / counts.total()


def _padding(examples: Sequence[Example]) -> dict[str, float]:
    mean = sum(map(len, examples)) / len(examples)
    tokens = int(BATCH_SIZE * mean)
    shares = {}
    for name, batch_tokens in ((f"batch_size={BATCH_SIZE}", 0), (f"batch_tokens={tokens}", tokens)):
        batches = epoch_batches(
            examples,
            batch_size=BATCH_SIZE,
            batch_tokens=batch_tokens,
            generator=torch.Generator().manual_seed(0),
        )
        shares[name] = padding_share(examples, batches)
    return shares
