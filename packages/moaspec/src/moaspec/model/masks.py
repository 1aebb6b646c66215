"""Attention masks, True where a query may attend.

s(i) is the last token whose target activations query i may read (`last_verified`): at inference the
last verified token, in training the one before the query's block (T-step bound).

Legend: B batch, T queries, S keys.
"""

import torch
from torch import Tensor


def text_mask(attention_mask_BT: Tensor) -> Tensor:
    """Causal mask over real tokens, (B, 1, T, T); a pad sees only itself, so no row is empty."""
    tokens = attention_mask_BT.shape[1]
    index = torch.arange(tokens, device=attention_mask_BT.device)
    causal = index[:, None] >= index
    diagonal = index[:, None] == index
    return ((causal & attention_mask_BT.bool()[:, None]) | diagonal)[:, None]


def staircase_mask(text_mask_B1TT: Tensor, last_verified_BT: Tensor) -> Tensor:
    """`text_mask` restricted to the query's own block: keys after s(i), and the query itself."""
    index = torch.arange(last_verified_BT.shape[1], device=last_verified_BT.device)
    own_block = (index > last_verified_BT[..., None]) | (index[:, None] == index)
    return text_mask_B1TT & own_block[:, None]


def window_mask(mask_B1TS: Tensor, window: int) -> Tensor:
    """Cut every query down to the last `window` keys that it may see.

    Where a query sees one key of each position up to its own, in ascending order, this is the
    sliding window by position: key position > query position - window. That holds for a text with
    pads on either side, for a node of a tree (whose slots of other branches are hidden), and for
    true keys followed by drafted ones.
    """
    if mask_B1TS.shape[-1] <= window:
        return mask_B1TS
    seen = mask_B1TS.cumsum(-1, dtype=torch.int32)
    return mask_B1TS & (seen > seen[..., -1:] - window)


def memory_mask(attention_mask_BS: Tensor, last_verified_BT: Tensor) -> Tensor:
    """T-step bounded mask of CA, (B, 1, T, S): query i sees the real keys j <= s(i).

    Source: arXiv 2410.03804, section 4.2.
    """
    index = torch.arange(attention_mask_BS.shape[1], device=attention_mask_BS.device)
    visible = index <= last_verified_BT[..., None]
    return (visible & attention_mask_BS.bool()[:, None])[:, None]


def reused_layer_mask(text_mask_B1TT: Tensor, last_verified_BT: Tensor) -> Tensor:
    """Mask of the reused target layers in training, (B, 1, T, 2 T).

    The first T keys are the target's true ones (seen up to s(i)), the rest the drafter's own (seen
    after s(i)): exactly what a draft attends to at inference.
    """
    index = torch.arange(last_verified_BT.shape[1], device=last_verified_BT.device)
    verified = (index <= last_verified_BT[..., None])[:, None]
    return torch.cat((text_mask_B1TT & verified, text_mask_B1TT & ~verified), dim=-1)
