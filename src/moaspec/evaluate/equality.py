"""Is this the target's own text?

A pass over eight tokens and one over a single token round differently in the last bits, so two
correct decodings may part where the target's two best tokens are (nearly) tied. This module tells
such a tie from a fault.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from moaspec.target import Target

NEAR_TIE = {torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float16: 0.0625}
"""Largest difference of logits that rounding explains. float32: DESIGN's bound, twenty times the
5e-5 that passes of different width differ by. bf16: logits near 20 are 0.125 apart, and errors of
a few such steps add up over the layers; float16 has three more bits."""

MAX_TIES = 3
"""How often two decodings may part at ties before they count as different."""


@dataclass(frozen=True)
class Equality:
    """Outcome of comparing two decodings.

    Attributes:
        kind: "identical", "near_tie" (parted where the target itself is undecided) or "different".
        position: generated index of the first difference.
        gap: how far the worse of the two tokens is from the target's best logit there.
    """

    kind: Literal["identical", "near_tie", "different"]
    position: int | None = None
    gap: float | None = None

    @property
    def lossless(self) -> bool:
        return self.kind != "different"


Continue = Callable[[list[int], int], Sequence[int]]
"""(ids to start from, how many tokens) -> generated ids."""


def compare(
    target: Target,
    prompt_ids: Sequence[int],
    expected: Sequence[int],
    got: Sequence[int],
    *,
    resume: Continue | None = None,
) -> Equality:
    """Compare a decoding with the plain one.

    Args:
        target: to look at the logits where they part.
        prompt_ids: of both.
        expected: the plain decoding.
        got: the other one.
        resume: decodes on from given ids as `got` was; after a tie it must then agree with
            `expected`. Only float32 is held to that.
    """
    first: Equality | None = None
    done = 0
    for _ in range(MAX_TIES):
        offset = first_difference(expected[done:], got)
        if offset is None:
            return first or Equality("identical")
        position = done + offset
        if max(position, done) >= len(expected) or offset >= len(got):
            return Equality("different", position)
        gap = logit_gap(
            target, [*prompt_ids, *expected[:position]], expected[position], got[offset]
        )
        if gap > NEAR_TIE[target.dtype]:
            return Equality("different", position, gap)
        first = first or Equality("near_tie", position, gap)
        done = position + 1
        if resume is None or target.dtype != torch.float32 or done >= len(expected):
            return first
        got = resume([*prompt_ids, *expected[:done]], len(expected) - done)
    return Equality("different", done)


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first difference, a missing token included; None when equal."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


@torch.inference_mode()
def logit_gap(target: Target, ids: Sequence[int], a: int, b: int) -> float:
    """The target's best logit after `ids` minus the smaller of those of a and b."""
    ids_1T = torch.tensor([list(ids)], device=target.device)
    hidden = target.encode(ids_1T, torch.ones_like(ids_1T)).hidden_BTE[0, -1]
    logits = target.head(hidden)
    return float(logits.max() - torch.minimum(logits[a], logits[b]))
