"""Is this the target's own text?

A pass over eight tokens and one over a single token round differently in the last bits, so two
correct decodings may part where the target's two best tokens are (nearly) tied. This module tells
such a tie from a fault. It trusts nothing of what decodes: logits are those of one pass of
transformers' own model over the whole text, without cache, trees or masks of ours, and a token's
noise is that of its place in the text.

Legend: V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from moaspec.decode import GREEDY, SamplingParams
from moaspec.decode.law import temperatures
from moaspec.decode.noise import gumbel, seed_bits
from moaspec.decode.processors import Prefix, processed, survivors
from moaspec.target import Target

NEAR_TIE = {torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float16: 0.0625}
"""Largest difference of logits that rounding explains. float32: 1e-3, twenty times the 5e-5 that
passes of different width were measured to differ by. bf16: logits near 20 are 0.125 apart, and
errors of a few such steps add up over the layers; float16 has three more bits."""

MAX_TIES = 3
"""How often two decodings may part at ties before they count as different."""


@dataclass(frozen=True)
class Equality:
    """Outcome of comparing two decodings.

    Attributes:
        kind: "identical", "near_tie" (parted where the target itself is undecided) or "different".
        position: generated index of the first difference.
        gap: of the worse of the two tokens there, see `gaps`.
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
    """Compare a greedy decoding with the plain one.

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
        gap = max(
            gaps(target, prompt_ids, [*expected[:position], token], since=position)[0]
            for token in (expected[position], got[offset])
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
def gaps(
    target: Target,
    prompt_ids: Sequence[int],
    token_ids: Sequence[int],
    sampling: SamplingParams = GREEDY,
    *,
    since: int = 0,
) -> list[float]:
    """How far each token of a text is from being the one that the law chooses.

    Args:
        target: whose `model` is trusted.
        prompt_ids: of the text.
        token_ids: what was generated.
        sampling: how, with a seed where noise took part.
        since: look at `token_ids` from this index on.

    Returns:
        For each token the smallest change of logits that explains it; 0 where it is the choice.
    """
    text = [*prompt_ids, *token_ids]
    return [
        _gap(logits_V, Prefix(sampling, text[:position], len(prompt_ids)), text[position])
        for position, logits_V in _logits(target, text, len(prompt_ids) + since)
    ]


def _logits(target: Target, text: Sequence[int], start: int) -> Iterator[tuple[int, Tensor]]:
    """Logits for the token at every position from `start` on, from transformers' own model.

    LongRoPE goes by the length of a call, so what was chosen on either side of its switch takes a
    pass each.
    """
    for end in (*target.rope_switches, len(text)):
        length = min(end, len(text) - 1)
        if length < start:
            continue
        ids_1T = torch.tensor([text[:length]], device=target.device)
        output = target.model(ids_1T, use_cache=False, logits_to_keep=length - start + 1)
        yield from zip(range(start, length + 1), output.logits[0].float(), strict=True)
        start = length + 1


def _gap(logits_V: Tensor, prefix: Prefix, token: int) -> float:
    """The smallest change of logits that lets the law choose this token."""
    scores_V = processed(logits_V, prefix).double()
    if scores_V[token] == -torch.inf:
        return math.inf
    sampling = prefix.sampling
    if not sampling.samples:
        return float(scores_V.max() - scores_V[token])
    temperature = float(temperatures([sampling]))
    scaled_V = scores_V / temperature
    threshold = scaled_V[survivors(scaled_V[None], [sampling])[0]].min()
    ids_V = torch.arange(len(scaled_V), device=scaled_V.device)
    seed, choice, position = (
        torch.tensor(fact, device=scaled_V.device)
        for fact in (seed_bits(sampling.seed or 0), sampling.choice, len(prefix.token_ids))
    )
    perturbed_V = scaled_V + gumbel(seed, choice, position, ids_V)
    # A rival is out of the way as soon as it is behind, or no longer survives top-k, top-p, min-p.
    rivals_V = torch.minimum(perturbed_V - perturbed_V[token], scaled_V - threshold)
    needed = torch.maximum(rivals_V.max(), threshold - scaled_V[token])
    return temperature * max(0.0, float(needed))
