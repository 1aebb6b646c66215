"""Check whether a text is the target's own.

Each token must be the choice of seeded sampling at its position, up to rounding, and the text must
end correctly. Passes of different widths round differently in the last bits, so two correct
decodings may differ where the target's two best tokens are nearly tied. This module distinguishes
such ties from faults. It does not use the code under test: logits come from one pass of
transformers' own model over the whole text, without our cache, trees or masks, and noise from the
position in the text.

A target in bf16 or float16 makes two passes: in float32 with the same weights, for the expected
tokens, and in its own dtype, to measure how much rounding moves the scores in this text. Faults
smaller than that rounding are visible in float32 only.

Legend: T text, V vocabulary, R rivals of a choice.
"""

import inspect
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, zip_longest
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from moaspec.sampling.choose import temperatures
from moaspec.sampling.noise import gumbel, seed_bits
from moaspec.sampling.processors import Prefix, processed, survivors
from moaspec.target.families import forget_growth
from moaspec.target.generic.hybrid_layers import mixers
from moaspec.target.generic.rules import has_states
from moaspec.target.target import Target
from moaspec_core.sampling.params import GREEDY, SamplingParams

FLOAT32_TIE = 1e-3
"""Largest gap that float32 rounding explains: ten times the measured difference of two logits in
passes of different width, 5e-5 each. Smallest tolerance of any dtype."""

RIVALS, DEVIATIONS = 16, 6
"""Number of best tokens of a position on which the rounding error of their distance from the best
one is measured, and number of its standard deviations that explain a gap. (Of 11,730 distances of
SmolLM2 in bf16 one in 12,000 was beyond five, none beyond six.)"""

RULE = (
    "Every token is compared with one pass of the target in float32: it must be the best there "
    "(where it is sampled: the best with its noise), or as near to it as the target's own rounding "
    "explains, measured on the same text. Texts that "
    "part from the baseline's at such a tie are the target's own too, as two plain decodings are "
    "whose passes have different widths."
)
"""Explanation of the check; stored with results."""


@dataclass(frozen=True)
class Equality:
    """Result of comparing a text with plain decoding."""

    # "identical" to plain decoding's text, different from it at a "near_tie" of the target's
    # scores, or "different": not the target's text.
    kind: Literal["identical", "near_tie", "different"]
    # Generated index of the first wrong token, or of the first difference.
    position: int | None = None
    # Of that token (see `AuditedText`), at a tie of the worse text; None if no change of logits
    # explains it.
    gap: float | None = None
    limit: float | None = None  # largest gap that rounding explains there; None if there is no gap
    reason: str = ""  # why a text is "different"

    @property
    def lossless(self) -> bool:
        return self.kind != "different"


@dataclass(frozen=True)
class AuditedText:
    """A decoded text with the result of trusted passes."""

    token_ids: Sequence[int]
    # For each token, the smallest change of logits that makes it the choice of seeded sampling: 0
    # for the choice itself, infinite if there is none.
    gaps: Sequence[float]
    limit: float = FLOAT32_TIE
    wrong_end: str = ""  # why the end of the text is wrong, or ""


def audit(
    target: Target,
    prompt_ids: Sequence[int],
    token_ids: Sequence[int],
    sampling: SamplingParams = GREEDY,
    *,
    max_new_tokens: int,
    stop_token_ids: Collection[int] | None = None,
) -> AuditedText:
    """Check every token of a text and its end with trusted passes of the target.

    Args:
        target: its `model` is trusted; not packed, unless it is in float32.
        sampling: parameters of the text, with a seed if it was sampled.
        stop_token_ids: ids that end a text; None takes the target's own.

    Raises:
        ValueError: the target is packed and cannot compute in float32.
    """
    full = min(max_new_tokens, target.max_positions - len(prompt_ids))
    stops = target.stop_token_ids if stop_token_ids is None else stop_token_ids
    sampling = sampling.bound(stops, max_new_tokens)
    text, gaps, errors = [*prompt_ids, *token_ids], [], [torch.empty(0)]
    for position, right_V, rounded_V in trusted_logits(target, text, len(prompt_ids)):
        prefix = Prefix(sampling, text[:position], len(prompt_ids))
        scores_V = processed(right_V, prefix)
        gaps.append(_gap(scores_V, prefix, text[position]))
        errors.append(rounding_errors(scores_V, processed(rounded_V, prefix)))
    deviation = float(torch.cat(errors).square().mean().sqrt())
    # `max` drops a NaN limit, of NaN logits.
    limit = max(FLOAT32_TIE, DEVIATIONS * deviation)
    return AuditedText(token_ids, gaps, limit, _wrong_end(token_ids, full, stops))


def compare(text: AuditedText, plain: AuditedText) -> Equality:
    """Judge a text, and compare it with plain decoding's."""
    for position, gap in enumerate(text.gaps):
        if not _right(text, position):
            reason = f"token {text.token_ids[position]} is not the target's choice"
            known = gap if math.isfinite(gap) else None
            return Equality("different", position, known, text.limit, reason)
    if text.wrong_end:
        return Equality("different", len(text.token_ids), reason=text.wrong_end)
    parting = first_difference(plain.token_ids, text.token_ids)
    if parting is None:
        return Equality("identical")
    # The plain text may be wrong there itself; its own judgement reports that.
    right = [x for x in (text, plain) if parting < len(x.gaps) and _right(x, parting)]
    gap, limit = max(((x.gaps[parting], x.limit) for x in right), default=(0.0, text.limit))
    return Equality("near_tie", parting, gap, limit)


def _right(text: AuditedText, position: int) -> bool:
    """Whether rounding explains the gap; False for NaN."""
    return text.gaps[position] <= text.limit


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
    limits: Any = {"max_new_tokens": max_new_tokens, "stop_token_ids": stop_token_ids}
    plain, text = (audit(target, prompt_ids, ids, sampling, **limits) for ids in (expected, got))
    return compare(text, plain)


def _wrong_end(token_ids: Sequence[int], full: int, stops: Collection[int]) -> str:
    """Why the end of a text is wrong, or ""."""
    if any(token in stops for token in token_ids[:-1]):
        return "it goes on after a stop token"
    if len(token_ids) > full:
        return f"it has {len(token_ids)} tokens instead of at most {full}"
    if len(token_ids) < full and not (token_ids and token_ids[-1] in stops):
        return f"it ends after {len(token_ids)} tokens, without a stop token"
    return ""


def up_to_stop(token_ids: Sequence[int], stops: Collection[int]) -> list[int]:
    """Cut a text after its first stop token."""
    ends = (i + 1 for i, token in enumerate(token_ids) if token in stops)
    return list(token_ids[: next(ends, len(token_ids))])


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first difference, a missing token included; None when equal."""
    pairs = enumerate(zip_longest(a, b))
    return next((i for i, (x, y) in pairs if x != y), None)


@torch.inference_mode()
def trusted_logits(
    target: Target, text: Sequence[int], start: int
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield position, float32 and rounded logits for every position from `start` on.

    LongRoPE depends on the length of a call, so either side of its switch takes a pass. With
    dynamic NTK cached keys keep their rotation, and layers with states may compute one token in
    another way than several, so there each token takes a pass, as in `generate` of transformers.
    """
    ids_1T = torch.tensor([text], device=target.device)
    grown = target.rope_growth is not None and len(text) > target.rope_growth
    if grown or has_states(target.config):
        stepped = partial(_stepped, target.model, ids_1T, start)
        yield from _both(target, stepped, range(start, len(text)))
        return
    for end in (*target.rope_switches, len(text)):
        length = min(end, len(text) - 1)
        if length < start:
            continue
        one_pass = partial(_one_pass, target.model, ids_1T[:, :length], length - start + 1)
        yield from _both(target, one_pass, range(start, length + 1))
        start = length + 1


def _both(
    target: Target, logits: Callable[[], Sequence[Tensor]], positions: Sequence[int]
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Compute the logits at these positions in the target's dtype and in float32."""
    rounded = right = logits()
    if target.dtype != torch.float32:
        with _in_float32(target):
            right = logits()
    yield from zip(positions, right, rounded, strict=True)


def _stepped(model: nn.Module, ids_1T: Tensor, start: int) -> list[Tensor]:
    """Logits for the token at every position from `start` on, (V,) each."""
    forget_growth(model)
    # The name since transformers 5.24.
    new_name = "cache" in inspect.signature(model.forward).parameters
    own = DynamicCache(config=getattr(model, "config", None))
    cache: dict[str, Any] = {"cache" if new_name else "past_key_values": own}
    logits = []
    for first, stop in pairwise([0, *range(start, ids_1T.shape[1])]):
        cache["position_ids"] = torch.arange(first, stop, device=ids_1T.device)[None]
        output = model(ids_1T[:, first:stop], use_cache=True, logits_to_keep=1, **cache)
        logits.append(output.logits[0, -1].float())
    return logits


def _one_pass(model: nn.Module, ids_1T: Tensor, num_logits: int) -> Sequence[Tensor]:
    output = model(ids_1T, use_cache=False, logits_to_keep=num_logits)
    return list(output.logits[0].float())


@contextmanager
def _in_float32(target: Target) -> Iterator[None]:
    """Compute in float32 with the same weights, converting one module at a time."""
    if target.packed:
        raise ValueError("A packed target cannot compute in float32; load it with packed=False.")
    own: dict[nn.Parameter, Tensor] = {}
    whole = set(mixers(target.model))  # they use weights of their parts without calling these
    parts = {part for one in whole for part in one.modules()} - whole

    def widen(module: nn.Module, _: Any) -> None:
        for parameter in module.parameters(recurse=module in whole):
            own[parameter] = parameter.data
            parameter.data = parameter.data.float()

    def restore(module: nn.Module, *_: Any) -> None:
        for parameter in module.parameters(recurse=module in whole):
            parameter.data = own.pop(parameter)

    modules = [m for m in target.model.modules() if m not in parts]
    modules = [m for m in modules if m in whole or any(True for _ in m.parameters(False))]
    hooks = [module.register_forward_pre_hook(widen) for module in modules]
    hooks += [module.register_forward_hook(restore) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for parameter, data in own.items():  # of an interrupted pass
            parameter.data = data


def rounding_errors(right_V: Tensor, rounded_V: Tensor) -> Tensor:
    """Rounding error of the distances of the best tokens from the best score, (R,)."""
    rivals_R = right_V.topk(min(RIVALS, len(right_V))).indices
    rivals_R = rivals_R[right_V[rivals_R].isfinite()]
    error_R = (rounded_V - right_V)[rivals_R].float().cpu()
    return error_R[1:] - error_R[:1]


def _gap(scores_V: Tensor, prefix: Prefix, token: int) -> float:
    """The smallest change of processed logits that makes this token the choice."""
    scores_V = scores_V.double()
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
        torch.tensor(entry, device=scaled_V.device)
        for entry in (seed_bits(sampling.seed or 0), sampling.choice, len(prefix.token_ids))
    )
    perturbed_V = scaled_V + gumbel(seed, choice, position, ids_V)
    # A rival loses if its score is lower, or if it does not survive top-k, top-p, min-p.
    rivals_V = torch.minimum(perturbed_V - perturbed_V[token], scaled_V - threshold)
    needed = torch.maximum(rivals_V.max(), threshold - scaled_V[token])
    return temperature * max(0.0, float(needed))
