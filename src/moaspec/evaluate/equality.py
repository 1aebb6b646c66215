"""Is this the target's own text?

Each of its tokens must be what the law chooses there, up to rounding, and it must end where it
should. A pass over eight tokens and one over a single token round differently in the last bits, so
two correct decodings may part where the target's two best tokens are (nearly) tied. This module
tells such a tie from a fault. It trusts nothing of what decodes: logits are those of one pass of
transformers' own model over the whole text, without cache, trees or masks of ours, and a token's
noise is that of its place in the text.

Legend: V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
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


@dataclass(frozen=True)
class Equality:
    """What became of a text.

    Attributes:
        kind: "identical" to plain decoding's, parted from it at a "near_tie" where the target
            itself is undecided, or "different": not the target's text.
        position: generated index of the first wrong token, or of the first that differs.
        gap: how many logits the token there is from being the right one (see `gaps`), of the worse
            of the two at a tie; None where no change of logits explains it.
        reason: what is wrong with a text that is "different".
    """

    kind: Literal["identical", "near_tie", "different"]
    position: int | None = None
    gap: float | None = None
    reason: str = ""

    @property
    def lossless(self) -> bool:
        return self.kind != "different"


@dataclass(frozen=True)
class Audited:
    """A decoded text, held against one trusted pass.

    Attributes:
        token_ids: what was generated.
        gaps: of each token.
        wrong_end: why the text should have ended elsewhere; "" where it ends rightly.
    """

    token_ids: Sequence[int]
    gaps: Sequence[float]
    wrong_end: str = ""


def audit(
    target: Target,
    prompt_ids: Sequence[int],
    token_ids: Sequence[int],
    sampling: SamplingParams = GREEDY,
    *,
    max_new_tokens: int,
    stop_token_ids: Collection[int] | None = None,
) -> Audited:
    """Ask the target about every token of a text, and about its end.

    Args:
        target: whose `model` is trusted.
        prompt_ids: of the text.
        token_ids: what was generated.
        sampling: how, with a seed where noise took part.
        max_new_tokens: what was asked for.
        stop_token_ids: ids that end a text; None takes the target's own.
    """
    full = min(max_new_tokens, target.max_positions - len(prompt_ids))
    stops = target.stop_token_ids if stop_token_ids is None else stop_token_ids
    wrong_end = _wrong_end(token_ids, full, stops)
    return Audited(token_ids, gaps(target, prompt_ids, token_ids, sampling), wrong_end)


def compare(text: Audited, plain: Audited, limit: float) -> Equality:
    """Is this the target's own text, and is it the one that plain decoding wrote?

    Args:
        text: what is judged.
        plain: of the same prompt and sampling.
        limit: largest gap that rounding explains, see `NEAR_TIE`.
    """
    for position, gap in enumerate(text.gaps):
        if not gap <= limit:  # NaN too
            reason = f"token {text.token_ids[position]} is not the target's choice"
            known = gap if math.isfinite(gap) else None
            return Equality("different", position, known, reason)
    if text.wrong_end:
        return Equality("different", len(text.token_ids), reason=text.wrong_end)
    parting = first_difference(plain.token_ids, text.token_ids)
    if parting is None:
        return Equality("identical")
    gap = max(one.gaps[parting] for one in (plain, text) if parting < len(one.gaps))
    return Equality("near_tie", parting, gap if math.isfinite(gap) else None)


def judge(
    target: Target,
    prompt_ids: Sequence[int],
    expected: Sequence[int],
    got: Sequence[int],
    sampling: SamplingParams = GREEDY,
    *,
    max_new_tokens: int,
    stop_token_ids: Collection[int] | None = None,
) -> Equality:
    """`audit` two texts of one prompt and `compare` the second with the first."""
    plain, text = (
        audit(
            target,
            prompt_ids,
            ids,
            sampling,
            max_new_tokens=max_new_tokens,
            stop_token_ids=stop_token_ids,
        )
        for ids in (expected, got)
    )
    return compare(text, plain, NEAR_TIE[target.dtype])


def _wrong_end(token_ids: Sequence[int], full: int, stops: Collection[int]) -> str:
    """Why a text should have ended elsewhere."""
    if any(token in stops for token in token_ids[:-1]):
        return "it goes on after a stop token"
    if len(token_ids) > full:
        return f"it has {len(token_ids)} tokens instead of at most {full}"
    if len(token_ids) < full and not (token_ids and token_ids[-1] in stops):
        return f"it ends after {len(token_ids)} tokens, without a stop token"
    return ""


def up_to_stop(token_ids: Sequence[int], stops: Collection[int]) -> list[int]:
    """A text up to and with its first stop token."""
    ends = (i + 1 for i, token in enumerate(token_ids) if token in stops)
    return list(token_ids[: next(ends, len(token_ids))])


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
) -> list[float]:
    """How far each token of a text is from being the one that the law chooses.

    Args:
        target: whose `model` is trusted.
        prompt_ids: of the text.
        token_ids: what was generated.
        sampling: how, with a seed where noise took part.

    Returns:
        For each token the smallest change of logits that explains it; 0 where it is the choice.
    """
    text = [*prompt_ids, *token_ids]
    return [
        _gap(logits_V, Prefix(sampling, text[:position], len(prompt_ids)), text[position])
        for position, logits_V in _logits(target, text, len(prompt_ids))
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
