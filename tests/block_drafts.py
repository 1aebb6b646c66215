"""Drafts of whole batches in one pass, as in training: what cached drafting must agree with.

Legend: B batch, T tokens, L target layers, H target KV heads, D head dim, K = 2 * H * D, V
vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moaspec.model.masks import reused_layer_mask, text_mask
from moaspec.model.moa import MoADrafter, positions


def block_logits(
    drafter: MoADrafter,
    target: Any,
    input_ids_BT: Tensor,
    attention_mask_BT: Tensor,
    last_verified_BT: Tensor,
    *,
    num_target_layers: int = 0,
    staircase_B: Tensor | None = None,
) -> Tensor:
    """Draft logits of a whole batch in one pass, as in training.

    Args:
        drafter: a `MoADrafter`.
        target: the frozen target.
        input_ids_BT: (B, T) int64.
        attention_mask_BT: (B, T), 1 for real tokens.
        last_verified_BT: (B, T) int64, s(i): token i reads the target's activations of tokens
            j <= s(i) and, with N > 0, drafts of its own after that.
        num_target_layers: N, target layers reused after CA.
        staircase_B: see `MoADrafter.block_states`.

    Returns:
        (B, T, V) float32; -inf for tokens outside a trimmed draft vocabulary.
    """
    kv_BTLK = target.capture(input_ids_BT, attention_mask_BT).kv_BTLK
    states_BTE = drafter.block_states(
        target.embed(input_ids_BT),
        drafter.aggregate(kv_BTLK),
        attention_mask_BT,
        last_verified_BT,
        staircase_B=staircase_B,
    )
    states_BTE = drafter.adapt(states_BTE, num_target_layers)
    if num_target_layers:
        states_BTE = target.reuse_layers(
            states_BTE,
            positions(attention_mask_BT),
            mask=reused_layer_mask(text_mask(attention_mask_BT), last_verified_BT),
            kv_BTLK=kv_BTLK,
            num=num_target_layers,
        )
    logits_BTV = target.head(states_BTE)
    if drafter.draft_token_ids is None:
        return logits_BTV
    outside = torch.ones(logits_BTV.shape[-1], dtype=torch.bool, device=logits_BTV.device)
    outside[drafter.draft_token_ids] = False
    return logits_BTV.masked_fill(outside, float("-inf"))


def layer_features(key_LBHTD: Tensor, value_LBHTD: Tensor) -> Tensor:
    """Lay out the target's keys and values as LSA's input.

    Per KV head, key and value are joined along D, then heads are flattened.

    Returns:
        (B, T, L, K), same dtype.

    Source: arXiv 2410.03804, section 4.1.
    """
    joined_LBHTD = torch.cat((key_LBHTD, value_LBHTD), dim=-1)
    return joined_LBHTD.permute(1, 3, 0, 2, 4).flatten(3)


def last_known(positions_BT: Tensor, known_BT: Tensor) -> Tensor:
    """s(i) = the largest j <= i that is known (0 where there is none): index space, (B, T)."""
    return torch.where(known_BT.bool(), positions_BT, torch.zeros_like(positions_BT)).cummax(1)[0]
