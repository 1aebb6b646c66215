"""The half of the drafter that writes drafts: SA over the text, CA over the encoder's memory.

What surrounds it (token embeddings, the reused target layers, the LM head) is the target's and is
handed in, on a server by the target itself and on a device by its bundle.

Legend: B batch, T tokens, E hidden size.
"""

from __future__ import annotations

from torch import Tensor, nn

from moaspec.model.config import DrafterConfig
from moaspec.model.layers import CrossAttend, CrossLayer, DecoderLayer, SelfAttend
from moaspec.model.rope import Rope


class Speaker(nn.Module):
    """SA and CA's query side. Source: arXiv 2410.03804, section 4.2."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        eps, act = config.rms_norm_eps, config.hidden_act
        sa, ca = config.self_attention, config.cross_attention
        self.self_attention = DecoderLayer(sa, eps=eps, hidden_act=act)
        self.self_rope = Rope.scaled(
            sa.head_dim,
            {"rope_theta": config.rope_theta, **config.rope_parameters},
            config.max_position_embeddings,
        )
        self.without_text = "sa" in config.without
        self.cross_attention = CrossLayer(ca, eps=eps, hidden_act=act)
        self.cross_rope = Rope.plain(ca.head_dim, config.rope_theta)

    def read_text(
        self, embeddings_BTE: Tensor, position_ids_BT: Tensor, attend: SelfAttend
    ) -> Tensor:
        """SA: depends on the tokens alone, so verified tokens never need recomputing."""
        if self.without_text:
            return embeddings_BTE
        return self.self_attention(embeddings_BTE, self.self_rope(position_ids_BT), attend)

    def remember_text(
        self, embeddings_BTE: Tensor, position_ids_BT: Tensor
    ) -> tuple[Tensor, Tensor]:
        """SA's keys and values of tokens from which nothing is drafted, (B, heads, T, D) each."""
        return self.self_attention.remember(embeddings_BTE, self.self_rope(position_ids_BT))

    def read_memory(self, x_BTE: Tensor, position_ids_BT: Tensor, attend: CrossAttend) -> Tensor:
        """CA: each token reads what the encoder wrote of the verified tokens."""
        return self.cross_attention(x_BTE, self.cross_rope(position_ids_BT), attend)
