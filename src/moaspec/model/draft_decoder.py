"""The half of the drafter that writes drafts: SA over the text, CA over the encoder's memory.

What surrounds it (token embeddings, the reused target layers, the LM head) is the target's and is
handed in, on a server by the target itself and on a device by its bundle.

Legend: B batch, T tokens, E hidden size.
"""

from __future__ import annotations

from torch import Tensor, nn

from moaspec.model.drafter_config import DrafterConfig
from moaspec.model.layers import CrossAttend, CrossAttentionLayer, DecoderLayer, SelfAttend
from moaspec.model.rope import CosSin, Rope


class DraftDecoder(nn.Module):
    """SA and CA's query side. Source: arXiv 2410.03804, section 4.2.

    Attributes:
        self_rope: SA's rotary embeddings. They are looked up by callers, who may do so for several
            passes at once.
        cross_rope: CA's.
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
            cos_sin: what `self_rope` gives for their positions.
            attend: see `SelfAttend`.
        """
        if self.without_text:
            return embeddings_BTE
        return self.self_attention(embeddings_BTE, cos_sin, attend)

    def text_keys_values(self, embeddings_BTE: Tensor, cos_sin: CosSin) -> tuple[Tensor, Tensor]:
        """SA's keys and values of tokens from which nothing is drafted, (B, heads, T, D) each."""
        return self.self_attention.keys_values(embeddings_BTE, cos_sin)

    def run_cross_attention(self, x_BTE: Tensor, cos_sin: CosSin, attend: CrossAttend) -> Tensor:
        """CA: each token reads what the encoder wrote of the verified tokens.

        Args:
            x_BTE: what `run_self_attention` gave.
            cos_sin: what `cross_rope` gives for the tokens' positions.
            attend: see `CrossAttend`.
        """
        return self.cross_attention(x_BTE, cos_sin, attend)
