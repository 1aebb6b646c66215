"""Log-probabilities of a given text under the target.

Legend: T tokens, E hidden size, V vocabulary.
"""

from collections.abc import Sequence

import torch

from moaspec.engine.accept import alternatives
from moaspec.target.target import Target, plain_torch
from moaspec_core.sampling.params import Alternatives, TextLogprobs

HEAD_TOKENS = 128
"""Tokens in one call of the head; bounds the memory of its logits."""


@torch.inference_mode()
def text_logprobs(target: Target, token_ids: Sequence[int], num_top: int) -> TextLogprobs:
    """Run the target once over a text, without a cache.

    Args:
        num_top: number of alternatives at each place; 0 gives none.
    """
    logprobs, top = list[float](), list[Alternatives]()
    if len(token_ids) < 2:
        return TextLogprobs((), ())
    with plain_torch(), target.limited_threads():
        ids_1T = torch.tensor([token_ids[:-1]], device=target.device)
        positions_1T = torch.arange(ids_1T.shape[1], device=target.device)[None]
        hidden_TE = target.run(
            ids_1T, positions_1T, mask_B1TS=None, write=lambda _, key, value: (key, value)
        )[0]
        for start in range(0, len(hidden_TE), HEAD_TOKENS):
            part_TE = hidden_TE[start : start + HEAD_TOKENS]
            log_p_TV = target.head(part_TE).log_softmax(-1)
            own = token_ids[start + 1 : start + 1 + len(part_TE)]
            own_T1 = torch.tensor(own, device=target.device)[:, None]
            logprobs += log_p_TV.gather(1, own_T1)[:, 0].tolist()
            top += alternatives(log_p_TV, num_top) or [()] * len(part_TE)
    return TextLogprobs(tuple(logprobs), tuple(top))
