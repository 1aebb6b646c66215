"""The Mixture-of-Attentions drafter: three attentions and N reused layers of the target.

For drafts after the verified tokens 1 ... s, with the target's keys and values kv_t of each
verified token in each of its L layers, and its token embedding e:

    LSA  layer self-attention       a_t = W mean_l LSA(kv_t,1 ... kv_t,L)_l + b     t <= s
    SA   self-attention             x_i = SA(e_1 ... e_i)                           all i
    CA   cross-attention            y_i = CA(query x_i; keys and values of a_1 ... a_s)
    N    target layer inference     z_i = the target's last N layers and final norm over y_i
                                    (N = 0: z_i = y_i); several N: `ExitAdapter` first
         draft distribution         q_i = softmax(the target's LM head of z_i), of token i + 1

LSA runs beside the target, once per verified token (`TargetEncoder`); SA and CA run for every draft
(`DraftDecoder`). In training every query i has its own s = s(i), which CA's mask and the mask of
the reused layers enforce (T-step bound, `training_pass.py`).

Source: arXiv 2410.03804, section 4 and figure 2.

Legend: B batch, T tokens, M tokens of a batch in one axis, L target layers, E hidden size, K one
layer's key and value (for each KV head its key, then its value), C CA's KV heads, D head dim.
"""

from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from moaspec.errors import ShapeError
from moaspec.model.drafter_config import DrafterConfig
from moaspec.model.folded_positions import FoldedPositions
from moaspec.model.layers import (
    CosSin,
    CrossAttend,
    CrossAttentionLayer,
    DecoderLayer,
    KeyValueProjection,
    Rope,
    SelfAttend,
    masked_attention,
)
from moaspec.model.rope import scaled_rope
from moaspec.model.training_pass import BlockTraining

AGGREGATE_CHUNK_TOKENS = 512
"""Tokens whose layers are aggregated at once; bounds memory for long prompts."""


class TargetEncoder(nn.Module):
    """LSA, mean and projection (`aggregate`), then CA's keys and values (`project_kv`).

    It runs beside the target, once for each verified token and never for a draft.

    Source: arXiv 2410.03804, section 4.1 (layer self-attention) and 4.2 (cross-attention).
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        eps = config.rms_norm_eps
        lsa, ca = config.layer_self_attention, config.cross_attention
        self.layer_self_attention = DecoderLayer(lsa, eps=eps, hidden_act=config.hidden_act)
        self.last_layer_only = "lsa" in config.without
        self.fold = FoldedPositions(config) if config.trained_positions else None
        self.layer_rope = Rope.plain(lsa.head_dim, config.rope_theta)
        self.projection = nn.Linear(config.kv_size, config.hidden_size)
        self.memory_norm = nn.RMSNorm(config.hidden_size, eps=eps)
        self.memory_key_value = KeyValueProjection(ca)
        self.memory_rope = Rope.plain(ca.head_dim, config.rope_theta)

    def encode(self, kv_BTLK: Tensor, position_ids_BT: Tensor) -> tuple[Tensor, Tensor]:
        """CA's keys and values of verified tokens: `fold`, `aggregate`, `project_kv`."""
        kv_BTLK = self.fold(kv_BTLK, position_ids_BT) if self.fold else kv_BTLK
        return self.project_kv(self.aggregate(kv_BTLK), position_ids_BT)

    def aggregate(self, kv_BTLK: Tensor) -> Tensor:
        """LSA, mean, projection: (B, T, L, K), keys rotated -> (B, T, E) in the encoder's dtype."""
        return self.projection(self.mean_over_layers(kv_BTLK))

    def mean_over_layers(self, kv_BTLK: Tensor) -> Tensor:
        """LSA, then the mean over layers: (B, T, L, K) -> (B, T, K)."""
        if self.last_layer_only:
            kv_BTLK = kv_BTLK[:, :, -1:]
        flat_MLK = kv_BTLK.flatten(0, 1).to(self.memory_norm.weight.dtype)
        means = [self.layer_mean(chunk) for chunk in flat_MLK.split(AGGREGATE_CHUNK_TOKENS)]
        joined = torch.cat(means) if len(means) > 1 else means[0]
        return joined.unflatten(0, kv_BTLK.shape[:2])

    def layer_mean(self, x_MLK: Tensor) -> Tensor:
        """`mean_over_layers` of M tokens, (M, K); the layers are what LSA attends over."""
        cos_sin = self.layer_rope.between(0, x_MLK.shape[1])
        return self.layer_self_attention.mean(x_MLK, cos_sin, masked_attention)

    def project_kv(self, states_BTE: Tensor, position_ids_BT: Tensor) -> tuple[Tensor, Tensor]:
        """CA's key (rotated) and value of each verified token, (B, C, T, D) each.

        Args:
            states_BTE: output of `aggregate`.
            position_ids_BT: (B, T) int64, the tokens' own positions.
        """
        # Under mixed precision the projection's output has fewer bits than the norm's weight.
        states_BTE = states_BTE.to(self.memory_norm.weight.dtype)
        normed_BTE = self.memory_norm(states_BTE)
        return self.memory_key_value(normed_BTE, self.memory_rope(position_ids_BT))


class DraftDecoder(nn.Module):
    """SA and the query side of CA, which run for every draft.

    Token embeddings, the reused target layers and the LM head are the target's; the caller applies
    them.

    Attributes:
        self_rope: SA's rotary embeddings; its output for the tokens' positions is SA's `cos_sin`.
        cross_rope: CA's rotary embeddings; its output is CA's `cos_sin`.

    Source: arXiv 2410.03804, section 4.2.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        eps, act = config.rms_norm_eps, config.hidden_act
        sa, ca = config.self_attention, config.cross_attention
        first, *further = (
            DecoderLayer(sa, eps=eps, hidden_act=act) for _ in range(config.self_attention_layers)
        )
        self.self_attention, self.further_self_attention = first, nn.ModuleList(further)
        rope = {"rope_theta": config.rope_theta, **config.rope_parameters}
        self.self_rope = scaled_rope(sa.head_dim, rope, config.max_position_embeddings)
        self.without_text = "sa" in config.without
        self.cross_attention = CrossAttentionLayer(ca, eps=eps, hidden_act=act)
        self.cross_rope = Rope.plain(ca.head_dim, config.rope_theta)

    @property
    def text_layers(self) -> list[DecoderLayer]:
        """SA's layers, in order."""
        return [self.self_attention, *cast(Iterable[DecoderLayer], self.further_self_attention)]

    def run_self_attention(
        self, embeddings_BTE: Tensor, cos_sin: CosSin, attends: Sequence[SelfAttend]
    ) -> Tensor:
        """SA, with an attention for each layer; verified tokens never need recomputing."""
        if self.without_text:
            return embeddings_BTE
        x_BTE = embeddings_BTE
        for layer, attend in zip(self.text_layers, attends, strict=True):
            x_BTE = layer(x_BTE, cos_sin, attend)
        return x_BTE

    def run_cross_attention(self, x_BTE: Tensor, cos_sin: CosSin, attend: CrossAttend) -> Tensor:
        """CA: each token attends to the encoder's keys and values of verified tokens."""
        return self.cross_attention(x_BTE, cos_sin, attend)


class ExitAdapter(nn.Module):
    """Maps CA's output to the input of the last N target layers: scale * linear(norm(y)).

    One output of CA cannot serve several N: states before the last N layers differ in direction
    with N, and by factors of tens in norm.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.linear = nn.Linear(config.hidden_size, config.hidden_size)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, states_BTE: Tensor) -> Tensor:
        return self.linear(self.norm(states_BTE)) * self.scale


class MoADrafter(BlockTraining):
    """The drafter; see the module's docstring.

    Args:
        config: sizes; the target it belongs to.
        draft_token_ids: (V',) int64 ids of a trimmed draft vocabulary, None for the full one.

    Attributes:
        reads_drafts: whether CA is replaced by a self-attention that also attends to drafts.
        head_moment: (E, E) float32 on the CPU, or None: the mean outer product of the LM head's
            inputs, measured after training. With it a quantised head drafts nearly as well.
    """

    encoder: TargetEncoder
    decoder: DraftDecoder

    def __init__(self, config: DrafterConfig, draft_token_ids: Tensor | None = None) -> None:
        super().__init__()
        self.config = config
        self.encoder = TargetEncoder(config)
        self.decoder = DraftDecoder(config)
        # CA normalises its queries and its keys with one weight; each half holds it.
        self.encoder.memory_norm = self.decoder.cross_attention.input_layernorm
        adapted = config.num_target_layers if config.adapts else ()
        self.exits = nn.ModuleDict({str(n): ExitAdapter(config) for n in adapted})
        self.draft_token_ids: Tensor | None
        self.register_buffer("draft_token_ids", draft_token_ids, persistent=False)
        self.head_moment: Tensor | None = None
        self.reads_drafts = "ca" in config.without

    @property
    def num_parameters(self) -> int:
        """Trainable parameters; embedding, head and reused layers are the target's."""
        return sum(p.numel() for p in self.parameters())

    def aggregate(self, kv_BTLK: Tensor) -> Tensor:
        """As `TargetEncoder.aggregate`; ShapeError where the last axis is not this drafter's K."""
        self._check_width(kv_BTLK)
        return self.encoder.aggregate(kv_BTLK)

    def project_kv(self, states_BTE: Tensor, position_ids_BT: Tensor) -> tuple[Tensor, Tensor]:
        """CA's key (after rotary embedding) and value, each (B, C, T, D)."""
        return self.encoder.project_kv(states_BTE, position_ids_BT)

    def encode(self, kv_BTLK: Tensor, position_ids_BT: Tensor) -> tuple[Tensor, Tensor]:
        """CA's keys and values of verified tokens: `aggregate`, then `project_kv`."""
        self._check_width(kv_BTLK)
        return self.encoder.encode(kv_BTLK, position_ids_BT)

    def _check_width(self, kv_BTLK: Tensor) -> None:
        if kv_BTLK.ndim != 4 or kv_BTLK.shape[-1] != self.config.kv_size:
            raise ShapeError(
                f"Expected keys and values of shape (B, T, L, {self.config.kv_size}), got "
                f"{tuple(kv_BTLK.shape)}. Is this drafter used with another target?"
            )

    def adapt(self, states_BTE: Tensor, num_target_layers: int) -> Tensor:
        """CA's output as input of the last N target layers (N = 0: of the head); see `adapter`."""
        adapter = self.adapter(num_target_layers)
        return states_BTE if adapter is None else adapter(states_BTE)

    def adapter(self, num_target_layers: int) -> ExitAdapter | None:
        """The adapter of CA's output for this N, or None. ShapeError: only other N have one."""
        if not self.exits:
            return None
        if str(num_target_layers) not in self.exits:
            raise ShapeError(
                f"This drafter was trained for num_target_layers in "
                f"{self.config.num_target_layers}, got {num_target_layers}."
            )
        return cast(ExitAdapter, self.exits[str(num_target_layers)])
