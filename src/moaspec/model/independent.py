"""An independent small language model, a baseline: it sees the text, and no target activations.

Token embeddings and head are the target's, frozen; the layers between them are its own.

Legend: B batch, T tokens, E hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from moaspec.model.layers import DecoderLayer, SelfAttend, masked_attention
from moaspec.model.masks import text_mask
from moaspec.model.stack import StackConfig


class IndependentDrafter(nn.Module):
    """A stack of decoder layers between the target's embeddings and its head.

    Args:
        config: sizes.
        draft_token_ids: (V',) int64 ids of a trimmed draft vocabulary, None for the full one.
    """

    kind = "independent"

    def __init__(self, config: StackConfig, draft_token_ids: Tensor | None = None) -> None:
        super().__init__()
        self.config = config
        eps, act = config.rms_norm_eps, config.hidden_act
        self.layers = nn.ModuleList(
            DecoderLayer(config.layer, eps=eps, hidden_act=act) for _ in range(config.num_layers)
        )
        self.norm = nn.RMSNorm(config.layer.hidden_size, eps=eps)
        self.rope = config.rope()
        self.draft_token_ids: Tensor | None
        self.register_buffer("draft_token_ids", draft_token_ids, persistent=False)

    def read(
        self, embeddings_BTE: Tensor, position_ids_BT: Tensor, attends: Sequence[SelfAttend]
    ) -> Tensor:
        """Final states for the target's head, (B, T, E); one attention operation per layer."""
        cos_sin = self.rope(position_ids_BT)
        for layer, attend in zip(self.layers, attends, strict=True):
            embeddings_BTE = layer(embeddings_BTE, cos_sin, attend)
        return self.norm(embeddings_BTE)

    def forward(
        self, embeddings_BTE: Tensor, position_ids_BT: Tensor, attention_mask_BT: Tensor
    ) -> Tensor:
        """The training pass, (B, T, E)."""
        mask = text_mask(attention_mask_BT)

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return masked_attention(query, key, value, mask)

        return self.read(embeddings_BTE, position_ids_BT, [attend] * len(self.layers))
