"""The order of a drafter's candidates, and the estimated probability that each is accepted.

At temperature 0 candidates are ordered by q, and a path's score is its log q. Above it the target
adds noise to its logits, and drafts are ordered by the *same* noise plus sharpened log q /
temperature. The acceptance of a candidate is then estimated from its rank in that order and its
distance from the best, not from q.

Legend: B rows, S rows that sample, W beams, V draft vocabulary, C children, K ranks.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from moaspec.sampling.choose import temperatures
from moaspec.sampling.noise import gumbel, seed_bits
from moaspec.sampling.processors import survivors
from moaspec_core.drafting.draft_noise import SHARPNESS
from moaspec_core.drafting.protocols import RequestText

AGREEMENT = (
    (-1.84, 0.42),
    (-1.65, -0.29),
    (-2.40, -0.13),
    (-2.15, -0.26),
    (-2.55, -0.20),
    (-2.28, -0.34),
    (-2.65, -0.27),
    (-2.78, -0.26),
)
"""P(the target chooses this token, given that it chose the path to it) for rank 0, 1, ..., as
sigmoid(a + b * margin); deeper ranks take the last line. Fitted by `tools/fit_agreement.py` on
1,316 tokens that SmolLM2-135M-Instruct wrote at temperatures 0.7 and 1.0, with its bundled drafter:
of the drafts of rank 0 it chose 12% in the lowest fifth of margins, 60% in the highest."""


class Ranking:
    """Orders and scores the children of one round's beams.

    Args:
        token_ids_V: the draft vocabulary's ids in the target's.
    """

    def __init__(self, rows: Sequence[RequestText], token_ids_V: Tensor) -> None:
        self._sampled = [i for i, row in enumerate(rows) if row.sampling.samples]
        self._settings = [rows[i].sampling for i in self._sampled]
        self._next = [len(rows[i].token_ids) for i in self._sampled]
        self._token_ids_V = token_ids_V

    def children(self, log_q_BWV: Tensor, breadth: int, depth: int) -> tuple[Tensor, Tensor]:
        """The best `breadth` children of every beam.

        Args:
            log_q_BWV: float32.
            breadth: C, at most V.
            depth: 0 for children of the root, 1 for theirs, ...

        Returns:
            (B, W, C) estimated log-probability that the target chooses the child, and its index in
            the draft vocabulary.
        """
        scores_BWC, tokens_BWC = log_q_BWV.topk(breadth, dim=-1)
        if self._sampled:
            perturbed_SWV = self.perturbed(log_q_BWV[self._sampled], depth)
            log_p_SWC, tokens_BWC[self._sampled] = coupled(perturbed_SWV, breadth)
            scores_BWC[self._sampled] = log_p_SWC.to(scores_BWC.dtype)
        return scores_BWC, tokens_BWC

    def perturbed(self, log_q_SWV: Tensor, depth: int) -> Tensor:
        """The drafter's estimate of the scores whose argmax the target chooses, float64."""
        device, width = log_q_SWV.device, log_q_SWV.shape[1]
        temperature_S11 = temperatures(self._settings).to(device)[..., None]
        scaled_SWV = log_q_SWV.double() * SHARPNESS / temperature_S11
        settings = [setting for setting in self._settings for _ in range(width)]
        alive_SWV = survivors(scaled_SWV.flatten(0, 1), settings).view_as(scaled_SWV)
        noise_SV = self._noise(depth)
        return (scaled_SWV + noise_SV[:, None]).masked_fill(~alive_SWV, -torch.inf)

    def _noise(self, depth: int) -> Tensor:
        """Noise of the draft vocabulary at the position of this depth, the same for all beams."""
        info = [
            (seed_bits(sampling.seed or 0), sampling.choice, position + depth)
            for sampling, position in zip(self._settings, self._next, strict=True)
        ]
        facts_S3 = torch.tensor(info, device=self._token_ids_V.device)
        seed_S1, choice_S1, position_S1 = facts_S3[..., None].unbind(1)
        return gumbel(seed_S1, choice_S1, position_S1, self._token_ids_V)


def coupled(perturbed_V: Tensor, breadth: int) -> tuple[Tensor, Tensor]:
    """The best tokens of perturbed scores and the estimated log-probability of each.

    Args:
        perturbed_V: (..., V).

    Returns:
        Log-probabilities and indices, each (..., C).
    """
    best_K, tokens_K = perturbed_V.topk(min(breadth + 1, perturbed_V.shape[-1]), dim=-1)
    return agreement(margins(best_K)[..., :breadth]), tokens_K[..., :breadth]


def margins(best_K: Tensor) -> Tensor:
    """How far each of the best scores (descending) is from the best other one, never negative."""
    behind_K = best_K[..., :1] - best_K
    behind_K[..., :1] = behind_K[..., 1:2] if best_K.shape[-1] > 1 else torch.inf
    return behind_K


def agreement(margin_C: Tensor) -> Tensor:
    """Estimated log-probability that the target chooses the child of rank 0, 1, ... (last axis)."""
    ranks = [min(rank, len(AGREEMENT) - 1) for rank in range(margin_C.shape[-1])]
    weights_C2 = torch.tensor([AGREEMENT[rank] for rank in ranks]).to(margin_C)
    return F.logsigmoid(weights_C2[:, 0] + weights_C2[:, 1] * margin_C)
