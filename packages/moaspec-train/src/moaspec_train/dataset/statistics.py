"""Statistics of training data."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from moaspec_core.checkpoint.drafter_config import TargetIdentity
from moaspec_train.dataset.examples import (
    Example,
    coverage,
    frequent_tokens,
    response_counts,
)
from moaspec_train.students.target_activations import activation_widths
from moaspec_train.text_store import bytes_per_token

VOCABULARIES = (2048, 4096, 8192, 16384, 32768)
PERCENTILES = (50, 90, 99, 100)
HELD_OUT_PART = 10


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """Statistics of a list of examples."""

    examples: int
    responses: int
    tokens: int
    response_tokens: int
    distinct_tokens: int  # number of different response tokens
    lengths: dict[int, int]  # tokens of an example, by percentile
    coverage: dict[int, float]  # fraction of response tokens in a draft vocabulary, by its size
    # The same of a random tenth of the examples, for vocabularies counted on the others; empty with
    # fewer than ten examples.
    held_out_coverage: dict[int, float]
    bytes_per_token: int  # of the activation cache

    @property
    def cache_bytes(self) -> int:
        return self.tokens * self.bytes_per_token


def statistics(
    examples: Sequence[Example], identity: TargetIdentity, *, always: Collection[int]
) -> Statistics:
    """Compute the statistics."""
    lengths = sorted(map(len, examples))
    counts = response_counts(examples)
    held_out, others = _split(examples)
    return Statistics(
        examples=len(examples),
        responses=sum(len(example.responses) for example in examples),
        tokens=sum(lengths),
        response_tokens=counts.total(),
        distinct_tokens=len(counts),
        lengths={p: lengths[(len(lengths) - 1) * p // 100] for p in PERCENTILES},
        coverage=_coverage(examples, examples, always),
        held_out_coverage=_coverage(others, held_out, always),
        bytes_per_token=bytes_per_token(activation_widths(identity)),
    )


def _coverage(
    counted: Sequence[Example], covered: Sequence[Example], always: Collection[int]
) -> dict[int, float]:
    """Share of the response tokens of `covered` in vocabularies of `counted`, by size."""
    shares = {
        size: coverage(covered, frequent_tokens(counted, size=size, always=always))
        for size in VOCABULARIES
    }
    return {size: share for size, share in shares.items() if share is not None}


def _split(examples: Sequence[Example]) -> tuple[list[Example], list[Example]]:
    """A random tenth of the examples, and the others."""
    order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(0)).tolist()
    num = len(examples) // HELD_OUT_PART
    return [examples[i] for i in order[:num]], [examples[i] for i in order[num:]]
