"""Seeded sampling: which token follows a prefix.

The next token is a function of the target's logits, the settings, the seed and the prefix, and of
nothing else. Plain decoding and verification both call it, hence their texts are the same.

Legend: N nodes, S surviving (node, token) pairs, V vocabulary.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from moaspec.sampling.kernels import SamplerParams, registered, supported
from moaspec.sampling.noise import gumbel, seed_bits
from moaspec.sampling.processors import Prefix, processed, survivors
from moaspec_core.sampling.params import SamplingParams

COLDEST = 1e-200
"""Smallest temperature that is used. Float32 logits divided by it still fit float64, and any two
different logits are too far apart for noise to swap them, so the choice is the same."""


def next_tokens(logits_NV: Tensor, prefixes: Sequence[Prefix]) -> list[int]:
    """The token that follows each prefix.

    At temperature 0 the best processed logit; otherwise the best, over the tokens that survive
    top-k, top-p and min-p, of processed logit / temperature + positional Gumbel noise, in float64.
    That is an exact sample (Gumbel-max), and needs no probabilities of any drafter.

    Args:
        logits_NV: the target's own, float32.
        prefixes: one per row of `logits_NV`.

    Raises:
        InputError: a custom processor misbehaved.
    """
    rows = [processed(logits, prefix) for logits, prefix in zip(logits_NV, prefixes, strict=True)]
    tokens = [0] * len(rows)
    for samples, pick in ((False, _best), (True, _sampled)):
        nodes = [i for i, prefix in enumerate(prefixes) if prefix.sampling.samples is samples]
        if nodes:
            chosen = pick(torch.stack([rows[i] for i in nodes]), [prefixes[i] for i in nodes])
            for node, token in zip(nodes, chosen, strict=True):
                tokens[node] = token
    return tokens


def _best(scores_NV: Tensor, _: Sequence[Prefix]) -> list[int]:
    return cast(list[int], scores_NV.argmax(-1).tolist())


def _sampled(scores_NV: Tensor, prefixes: Sequence[Prefix]) -> list[int]:
    kernels = registered()
    known = all(supported(prefix.sampling) for prefix in prefixes)
    if kernels is not None and known and kernels.can_choose(scores_NV):
        # The same, without two logarithms for each token.
        return kernels.choose(scores_NV, [_params_of(prefix) for prefix in prefixes])
    return cast(list[int], perturbed(scores_NV, prefixes).argmax(-1).tolist())


def sampler_params(
    sampling: SamplingParams, position: int, *, sharpness: float = 1.0
) -> SamplerParams:
    """The settings and the position of a sampled token, logits multiplied with `sharpness`."""
    return SamplerParams(
        max(sampling.temperature, COLDEST) / sharpness,
        sampling.top_k,
        sampling.top_p,
        sampling.min_p,
        seed_bits(sampling.seed or 0),
        sampling.choice,
        position,
    )


def perturbed(scores_NV: Tensor, prefixes: Sequence[Prefix]) -> Tensor:
    """What a sampled choice is the argmax of, float64; -inf for tokens that did not survive.

    Args:
        scores_NV: processed logits.
        prefixes: all at temperatures above 0.
    """
    settings = [prefix.sampling for prefix in prefixes]
    scaled_NV = scores_NV.double() / temperatures(settings).to(scores_NV.device)
    places = [(place.seed, place.choice, place.position) for place in map(_params_of, prefixes)]
    facts_N3 = torch.tensor(places, device=scores_NV.device)
    if not any(setting.filters for setting in settings):
        token_V = torch.arange(scaled_NV.shape[1], device=scaled_NV.device)
        seed_N1, choice_N1, position_N1 = facts_N3[..., None].unbind(1)
        return scaled_NV + gumbel(seed_N1, choice_N1, position_N1, token_V)
    node_S, token_S = survivors(scaled_NV, settings).nonzero(as_tuple=True)
    seed_S, choice_S, position_S = facts_N3[node_S].unbind(-1)
    noise_S = gumbel(seed_S, choice_S, position_S, token_S)
    result_NV = torch.full_like(scaled_NV, -torch.inf)
    result_NV[node_S, token_S] = scaled_NV[node_S, token_S] + noise_S
    return result_NV


def temperatures(settings: Sequence[SamplingParams]) -> Tensor:
    """(N, 1) float64, none below `COLDEST`."""
    values = [[max(setting.temperature, COLDEST)] for setting in settings]
    return torch.tensor(values, dtype=torch.float64)


def _params_of(prefix: Prefix) -> SamplerParams:
    """`sampler_params` for the next token of a prefix."""
    return sampler_params(prefix.sampling, len(prefix.token_ids))
