"""Fit how likely the target agrees with a draft, given its rank and margin.

`moaspec.drafting.path_scores.AGREEMENT` holds the result. The target writes answers at several
temperatures; the drafter is asked, at every token of them, for its coupled order of drafts; counted
is at which rank the target's own token was. One logistic curve is fitted per rank.

    python tools/fit_agreement.py --suite spec_bench.jsonl --limit 24
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from common import load, prompts_of, text_parser, text_setting
from torch import Tensor

import moaspec
from moaspec.drafting.path_scores import Ranking, margins
from moaspec.model.moa import MoADrafter
from moaspec_core.drafting.protocols import RequestText
from moaspec_train.data_order import fixed_blocks
from moaspec_train.dataset.examples import Example, collate

RANKS = 8
BLOCK = 4
"""Drafts per round: statistics cover the depths that small trees and chains use."""


@dataclass(frozen=True)
class Statistics:
    """One row per drafted token.

    Attributes:
        margin_NK: of the drafts of rank 0 .. RANKS - 1.
        hit_NK: whether the target chose that draft.
    """

    margin_NK: Tensor
    hit_NK: Tensor


def main() -> None:
    """Print the fitted table, then one line of JSON."""
    options = text_parser(__doc__)
    options.add_argument("--temperatures", type=float, nargs="+", default=[0.6, 0.8, 1.0])
    args = options.parse_args()
    target, drafter = load(args)
    prompts = prompts_of(args, target)
    parts = [
        _collect(target, drafter, prompts, temperature, args.max_new_tokens)
        for temperature in args.temperatures
    ]
    whole = Statistics(
        torch.cat([part.margin_NK for part in parts]), torch.cat([part.hit_NK for part in parts])
    )
    _report(whole, text_setting(args, target))


@torch.inference_mode()
def _collect(
    target: moaspec.Target,
    drafter: MoADrafter,
    prompts: Sequence[Sequence[int]],
    temperature: float,
    max_new_tokens: int,
) -> Statistics:
    """Ranks of the target's own choices in the drafter's order, over sampled answers."""
    sampling = moaspec.SamplingParams(temperature=temperature, seed=20260)
    results = moaspec.generate(
        target, prompts, max_new_tokens=max_new_tokens, temperature=temperature, seed=sampling.seed
    )
    ids = drafter.draft_token_ids
    ids = torch.arange(target.vocab_size) if ids is None else ids
    margin, hit = [], []
    for prompt, result in zip(prompts, results, strict=True):
        batch = collate([Example(tuple(prompt), tuple(result.token_ids))], [0])
        blocks = fixed_blocks(batch, BLOCK)
        ids_BT, mask_BT = batch.input_ids_BT, batch.attention_mask_BT
        states_BTE = drafter.block_states(
            target.embed(ids_BT),
            drafter.aggregate(target.capture(ids_BT, mask_BT).kv_BTLK),
            mask_BT,
            blocks.last_verified_BT,
        )
        logits_TV = target.head(drafter.adapt(states_BTE, 0))[0]
        places = blocks.loss_BT[0].nonzero()[:, 0]
        text = batch.input_ids_BT[0]
        rows = [RequestText(0, text[: int(place) + 1].tolist(), sampling) for place in places]
        log_q_N1V = logits_TV[places][:, None, ids].float().log_softmax(-1)
        perturbed_NV = Ranking(rows, ids).perturbed(log_q_N1V, 0)[:, 0]
        best_NK, order_NK = perturbed_NV.topk(RANKS + 1, dim=-1)
        margin.append(margins(best_NK)[:, :RANKS])
        hit.append(ids[order_NK[:, :RANKS]] == text[places + 1, None])
    return Statistics(torch.cat(margin), torch.cat(hit))


def fitted(margin_N: Tensor, hit_N: Tensor) -> tuple[float, float]:
    """Intercept and slope of the logistic curve of greatest likelihood.

    The weak ridge only matters where a rank was hardly ever right.
    """
    finite = margin_N.isfinite()
    design_N2 = torch.stack((torch.ones_like(margin_N), margin_N), dim=1)[finite]
    hits_N = hit_N[finite].double()
    weights = torch.zeros(2, dtype=torch.float64)
    for _ in range(50):
        p_N = (design_N2 @ weights).sigmoid()
        gradient = design_N2.T @ (hits_N - p_N) - weights
        hessian = (design_N2.T * (p_N * (1 - p_N))) @ design_N2 + torch.eye(2)
        weights = weights + torch.linalg.solve(hessian, gradient)
    return round(float(weights[0]), 2), round(float(weights[1]), 2)


def _report(statistics: Statistics, info: dict[str, Any]) -> None:
    rows = []
    for rank in range(RANKS):
        margin, hit = statistics.margin_NK[:, rank], statistics.hit_NK[:, rank]
        intercept, slope = fitted(margin, hit)
        rows.append((intercept, slope))
        print(f"rank {rank}: hit {hit.double().mean():6.1%}   P = sigmoid({intercept} + {slope} m)")
        edges = margin[margin.isfinite()].quantile(torch.linspace(0, 1, 6).double())
        for low, high in pairwise(edges.tolist()):
            inside = (margin >= low) & (margin <= high)
            p = (intercept + slope * margin[inside]).sigmoid().mean()
            observed = hit[inside].double().mean()
            print(f"    margin {low:5.2f}..{high:5.2f}: observed {observed:6.1%}, fitted {p:6.1%}")
    info["drafted"] = len(statistics.hit_NK)
    print(json.dumps(info | {"agreement": rows}))


if __name__ == "__main__":
    main()
