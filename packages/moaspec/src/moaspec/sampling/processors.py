"""Changes of the target's logits by the sampling settings, before a token is chosen.

Every function here is a pure function of the logits and of one prefix's own tokens, so a drafted
node is treated as the same prefix would be in plain decoding.

Legend: N nodes, V vocabulary, K candidates.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moaspec_core.errors import InputError
from moaspec_core.sampling.params import SamplingParams

CANDIDATES = 512
"""Number of best tokens that top-p sorts first; sorting the whole vocabulary is slow and rarely
needed."""


@dataclass(frozen=True)
class Prefix:
    """One place where a token is to be chosen."""

    sampling: SamplingParams  # the row's settings, with a seed where noise takes part
    token_ids: Sequence[int]  # all tokens before it: prompt, output, and the path to a drafted node
    prompt_length: int  # how many of them are the prompt
    # Seconds of processor time that its custom processors took are appended.
    spent_s: list[float] = field(default_factory=list)


def processed(logits_V: Tensor, prefix: Prefix) -> Tensor:
    """Logits after bias, penalties, rules and custom processors; the argument stays as it is.

    Raises:
        InputError: a processor returned another shape, or no token is left.
    """
    sampling = prefix.sampling
    if not sampling.changes_logits:
        return logits_V
    logits_V = _biased(logits_V.clone(), sampling)
    _penalise_repetition(logits_V, prefix)
    _penalise_output(logits_V, prefix)
    if sampling.rules:
        logits_V = sampling.rules.apply(prefix.token_ids, prefix.prompt_length, logits_V)
    started_s = time.thread_time()
    for processor in sampling.processors:
        logits_V = _called(processor(tuple(prefix.token_ids), logits_V), logits_V)
    prefix.spent_s.append(time.thread_time() - started_s)
    if not bool(torch.isfinite(logits_V.max())):
        raise InputError(
            "logit_bias, penalties, rules and logits processors must leave at least one token with "
            "a finite logit, and no NaN."
        )
    return logits_V


def _biased(logits_V: Tensor, sampling: SamplingParams) -> Tensor:
    if sampling.logit_bias:
        ids = torch.tensor(list(sampling.logit_bias), device=logits_V.device)
        values = [float(value) for value in sampling.logit_bias.values()]
        logits_V[ids] += torch.tensor(values, device=logits_V.device)
    return logits_V


def _penalise_repetition(logits_V: Tensor, prefix: Prefix) -> None:
    """Source: CTRL, arXiv 1909.05858, section 4.1; over prompt and output, as in transformers."""
    penalty = prefix.sampling.repetition_penalty
    if penalty != 1.0:
        ids = torch.tensor(prefix.token_ids, device=logits_V.device).unique()
        seen = logits_V[ids]
        logits_V[ids] = torch.where(seen < 0, seen * penalty, seen / penalty)


def _penalise_output(logits_V: Tensor, prefix: Prefix) -> None:
    """Over generated tokens only, as OpenAI's and vLLM's."""
    presence, frequency = prefix.sampling.presence_penalty, prefix.sampling.frequency_penalty
    output = prefix.token_ids[prefix.prompt_length :]
    if output and (presence or frequency):
        ids, counts = torch.tensor(output, device=logits_V.device).unique(return_counts=True)
        logits_V[ids] -= float(presence) + float(frequency) * counts


def _called(result: Tensor, logits_V: Tensor) -> Tensor:
    """Check the logits that a custom processor returned."""
    if not isinstance(result, Tensor) or result.shape != logits_V.shape:
        got = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
        raise InputError(
            f"A logits processor must return logits of shape {tuple(logits_V.shape)}, got {got}."
        )
    return result.to(logits_V)


def survivors(scaled_NV: Tensor, settings: Sequence[SamplingParams]) -> Tensor:
    """Which tokens remain after top-k, top-p and min-p, in this order; bool (N, V).

    Each of the three keeps the tokens above a threshold of the logits, so the three together are
    one threshold per node. The best token always remains.

    Args:
        scaled_NV: logits divided by the temperature.
    """
    best_N = scaled_NV.amax(-1)
    threshold_N = torch.full_like(best_N, -torch.finfo(scaled_NV.dtype).max)
    if any(setting.top_k for setting in settings):
        threshold_N = _top_k_threshold(scaled_NV, settings)
    if any(setting.top_p < 1.0 for setting in settings):
        remaining_NV = scaled_NV.masked_fill(scaled_NV < threshold_N[:, None], -math.inf)
        threshold_N = threshold_N.maximum(_top_p_threshold(remaining_NV, settings))
    if any(setting.min_p for setting in settings):
        shares_N = torch.tensor([setting.min_p for setting in settings], dtype=best_N.dtype).to(
            best_N
        )
        threshold_N = threshold_N.maximum(best_N + shares_N.log())
    return scaled_NV >= threshold_N[:, None]


def _top_k_threshold(scaled_NV: Tensor, settings: Sequence[SamplingParams]) -> Tensor:
    """The k-th best logit of each node."""
    vocabulary = scaled_NV.shape[1]
    ranks = [min(setting.top_k or vocabulary, vocabulary) for setting in settings]
    limited = [rank for rank in ranks if rank < vocabulary]
    best_NK = scaled_NV.topk(max(limited, default=1), dim=-1).values
    index_N1 = torch.tensor(ranks, device=scaled_NV.device)[:, None] - 1
    threshold_N = best_NK.gather(1, index_N1.clamp(max=best_NK.shape[1] - 1))[:, 0]
    unlimited_N = index_N1[:, 0] == vocabulary - 1
    return threshold_N.masked_fill(unlimited_N, -torch.finfo(scaled_NV.dtype).max)


def _top_p_threshold(scaled_NV: Tensor, settings: Sequence[SamplingParams]) -> Tensor:
    """The smallest logit before which less than top_p of the mass lies."""
    vocabulary = scaled_NV.shape[1]
    masses = [setting.top_p for setting in settings]
    mass_N1 = torch.tensor(masses, dtype=scaled_NV.dtype).to(scaled_NV)[:, None]
    total_N1 = scaled_NV.logsumexp(-1, keepdim=True)
    for num in (min(CANDIDATES, vocabulary), vocabulary):
        best_NK = scaled_NV.topk(num, dim=-1).values
        share_NK = (best_NK - total_N1).exp()
        before_NK = share_NK.cumsum(-1) - share_NK
        enough_N1 = before_NK[:, -1:] >= mass_N1
        if num == vocabulary or bool((enough_N1 | (mass_N1 >= 1.0)).all()):
            break
    kept_N = (before_NK < mass_N1).sum(-1).clamp(min=1)
    threshold_N = best_NK.gather(1, kept_N[:, None] - 1)[:, 0]
    return threshold_N.masked_fill(mass_N1[:, 0] >= 1.0, -torch.finfo(scaled_NV.dtype).max)
