"""The drafter's decoder, which writes drafts: SA over the text, CA over the encoder's memory.

Token embeddings, the reused target layers and the LM head belong to the target; the caller applies
them.

Legend: B batch, T tokens, E hidden size.
"""

from __future__ import annotations

from torch import Tensor, nn

from moaspec.model.drafter_config import DrafterConfig
from moaspec.model.layers import CrossAttend, CrossAttentionLayer, DecoderLayer, SelfAttend
from moaspec.model.rope import CosSin, Rope


class DraftDecoder(nn.Module):
    """SA and the query side of CA.

        x_i = SA(e_1 ... e_i),  y_i = CA(x_i; memory)

    Attributes:
        self_rope: SA's rotary embeddings; callers look up cosines and sines.
        cross_rope: CA's rotary embeddings.

    Source: arXiv 2410.03804, section 4.2.
    """

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
        self.cross_attention = CrossAttentionLayer(ca, eps=eps, hidden_act=act)
        self.cross_rope = Rope.plain(ca.head_dim, config.rope_theta)

    def run_self_attention(
        self, embeddings_BTE: Tensor, cos_sin: CosSin, attend: SelfAttend
    ) -> Tensor:
        """SA: depends on the tokens alone, so verified tokens never need recomputing.

        Args:
            embeddings_BTE: of the tokens.
            cos_sin: output of `self_rope` for their positions.
            attend: see `SelfAttend`.
        """
        if self.without_text:
            return embeddings_BTE
        return self.self_attention(embeddings_BTE, cos_sin, attend)

    def text_keys_values(self, embeddings_BTE: Tensor, cos_sin: CosSin) -> tuple[Tensor, Tensor]:
        """SA's keys and values alone, of tokens without drafts, (B, heads, T, D) each."""
        return self.self_attention.keys_values(embeddings_BTE, cos_sin)

    def run_cross_attention(self, x_BTE: Tensor, cos_sin: CosSin, attend: CrossAttend) -> Tensor:
        """CA: each token attends to the encoder's keys and values of verified tokens.

        Args:
            x_BTE: output of `run_self_attention`.
            cos_sin: output of `cross_rope` for the tokens' positions.
            attend: see `CrossAttend`.
        """
        return self.cross_attention(x_BTE, cos_sin, attend)
