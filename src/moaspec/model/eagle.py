"""EAGLE's draft head, a baseline: one layer that predicts the target's next final state.

It reads pairs: the target's final state of a token and the embedding of the token after it. For a
token that the target has not processed yet, the head's own prediction replaces the state.

Legend: B batch, T tokens, E hidden size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moaspec.model.layers import DecoderLayer, SelfAttend, masked_attention
from moaspec.model.masks import text_mask
from moaspec.model.stack import StackConfig


class EagleDrafter(nn.Module):
    """The draft head of EAGLE and EAGLE-2.

    Args:
        config: sizes; one layer.
        draft_token_ids: (V',) int64 ids of a trimmed draft vocabulary, None for the full one.

    Source: arXiv 2401.15077, section 4; arXiv 2406.16858.
    """

    kind = "eagle"

    def __init__(self, config: StackConfig, draft_token_ids: Tensor | None = None) -> None:
        super().__init__()
        self.config = config
        width = config.layer.hidden_size
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.layer = DecoderLayer(
            config.layer, eps=config.rms_norm_eps, hidden_act=config.hidden_act
        )
        self.rope = config.rope()
        self.draft_token_ids: Tensor | None
        self.register_buffer("draft_token_ids", draft_token_ids, persistent=False)

    def read(
        self,
        embeddings_BTE: Tensor,
        hidden_BTE: Tensor,
        position_ids_BT: Tensor,
        attend: SelfAttend,
    ) -> Tensor:
        """Predict the target's final state of each pair's second token, (B, T, E).

        Args:
            embeddings_BTE: of the second tokens.
            hidden_BTE: the target's final states of the first ones, or predictions of them.
            position_ids_BT: of the first ones.
        """
        pairs_BTE = self.fc(torch.cat((embeddings_BTE, hidden_BTE), dim=-1))
        return self.layer(pairs_BTE, self.rope(position_ids_BT), attend)

    def forward(
        self,
        embeddings_BTE: Tensor,
        hidden_BTE: Tensor,
        position_ids_BT: Tensor,
        attention_mask_BT: Tensor,
    ) -> Tensor:
        """The training pass: predictions of each token's final state, (B, T, E).

        The first token has no predecessor: its row means nothing.
        """
        mask = text_mask(attention_mask_BT)
        next_BTE = F.pad(embeddings_BTE[:, 1:], (0, 0, 0, 1))
        states_BTE = self.read(
            next_BTE, hidden_BTE, position_ids_BT, lambda q, k, v: masked_attention(q, k, v, mask)
        )
        return F.pad(states_BTE[:, :-1], (0, 0, 1, 0))
