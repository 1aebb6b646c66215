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
the reused layers enforce (T-step bound, `MoADrafter.forward`).

Source: arXiv 2410.03804, section 4 and figure 2.

Legend: B batch, T tokens, M tokens of a batch in one axis, L target layers, E hidden size, K one
layer's key and value (for each KV head its key, then its value), C CA's KV heads, D head dim, Q
tokens of a row whose states are wanted.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from moaspec.model.layers import (
    CosSin,
    CrossAttend,
    CrossAttentionLayer,
    DecoderLayer,
    FoldedPositions,
    KeyValueProjection,
    Rope,
    SelfAttend,
    attention_among_few,
    masked_attention,
    merge_heads,
    scaled_rope,
)
from moaspec.model.masks import memory_mask, reused_layer_mask, staircase_mask, text_mask
from moaspec_core.checkpoint.drafter_config import DrafterConfig
from moaspec_core.errors import ShapeError

AGGREGATE_CHUNK_TOKENS = 512
"""Tokens whose layers are aggregated at once; bounds memory for long prompts."""
LEARNING_CHUNK_TOKENS = 128
"""The same with gradients on a CPU, whose caches hold the layers of so many."""

MOMENT_DAMPING = 0.01
"""Added to the diagonal of `MoADrafter.head_moment`, relative to its mean, because other texts vary
in other directions."""


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
        learns = flat_MLK.device.type == "cpu" and torch.is_grad_enabled()
        size = LEARNING_CHUNK_TOKENS if learns else AGGREGATE_CHUNK_TOKENS
        means = [self.layer_mean(chunk) for chunk in flat_MLK.split(size)]
        joined = torch.cat(means) if len(means) > 1 else means[0]
        return joined.unflatten(0, kv_BTLK.shape[:2])

    def layer_mean(self, x_MLK: Tensor) -> Tensor:
        """`mean_over_layers` of M tokens, (M, K); the layers are what LSA attends over."""
        cos_sin = self.layer_rope.between(0, x_MLK.shape[1])
        return self.layer_self_attention.mean(x_MLK, cos_sin, attention_among_few)

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


@dataclass(frozen=True)
class Queries:
    """Some tokens of each row of a batch, padded to the row with most of them: (B, Q).

    Made on the CPU and then moved, they cost no wait for a GPU, which alone knows their number.

    Attributes:
        index_BQ: int64, the place of each in its row.
        among_M: int64, where those that are no pads are in (B, Q), flattened.
        text_M: int64, where the same are in (B, T), flattened.
    """

    index_BQ: Tensor
    among_M: Tensor
    text_M: Tensor

    @classmethod
    def chosen(cls, chosen_BT: Tensor) -> "Queries":
        """The marked tokens."""
        counts_B1 = chosen_BT.sum(1, keepdim=True)
        width = max(1, int(counts_B1.max()))
        index_BQ = (~chosen_BT).byte().argsort(dim=1, stable=True)[:, :width]
        real_BQ = torch.arange(width, device=chosen_BT.device) < counts_B1
        return cls(index_BQ, _places(real_BQ), _places(chosen_BT))

    def of(self, x_BTE: Tensor) -> Tensor:
        """The values of these tokens, (B, Q, E)."""
        index_BQE = self.index_BQ[..., None].expand(-1, -1, x_BTE.shape[-1])
        return x_BTE.expand(len(self.index_BQ), -1, -1).gather(1, index_BQE)

    def of_mask(self, mask_B1TS: Tensor) -> Tensor:
        """The rows of a mask, (B, 1, Q, S)."""
        return self.of(mask_B1TS[:, 0])[:, None]

    def flat(self, x_BQE: Tensor) -> Tensor:
        """Without pads, row after row, as `x_BTE[chosen_BT]`: (M, E)."""
        return x_BQE.flatten(0, 1).index_select(0, self.among_M)

    def of_text(self, x_BTE: Tensor) -> Tensor:
        """`x_BTE[chosen_BT]`, (M, E)."""
        return x_BTE.flatten(0, 1).index_select(0, self.text_M)


def _places(chosen: Tensor) -> Tensor:
    return chosen.flatten().nonzero()[:, 0]


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
        first, *others = (
            DecoderLayer(sa, eps=eps, hidden_act=act) for _ in range(config.self_attention_layers)
        )
        self.self_attention, self.further_self_attention = first, nn.ModuleList(others)
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

    def self_attention_at(
        self, queries: Queries, embeddings_BTE: Tensor, cos_sin: CosSin, mask_B1TT: Tensor
    ) -> Tensor:
        """`run_self_attention` of some tokens, (B, Q, E): the last layer does no more than it must.

        Args:
            mask_B1TT: what each token attends to, in all layers.
        """
        if self.without_text:
            return queries.of(embeddings_BTE)
        *before, last = self.text_layers
        x_BTE = embeddings_BTE
        for layer in before:
            x_BTE = layer(x_BTE, cos_sin, lambda q, k, v: masked_attention(q, k, v, mask_B1TT))
        normed_BTE = last.input_layernorm(x_BTE)
        key, value = last.key_value(normed_BTE, cos_sin)
        angles = [queries.of(angle.squeeze(1))[:, None] for angle in cos_sin]
        query = last.self_attn.query(queries.of(normed_BTE), (angles[0], angles[1]))
        attended = masked_attention(query, key, value, queries.of_mask(mask_B1TT))
        return last.finish(queries.of(x_BTE), merge_heads(attended))

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


class MoADrafter(nn.Module):
    """The drafter; see the module's docstring.

    Args:
        config: sizes; the target it belongs to.
        draft_token_ids: (V',) int64 ids of a trimmed draft vocabulary, None for the full one.

    Attributes:
        reads_drafts: whether CA is replaced by a self-attention that also attends to drafts.
        head_moment: (E, E) float32 on the CPU, or None: the mean outer product of the LM head's
            inputs, measured after training. With it a quantised head drafts nearly as well.
    """

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

    def block_states(
        self,
        embeddings_BTE: Tensor,
        aggregated_BTE: Tensor,
        attention_mask_BT: Tensor,
        last_verified_BT: Tensor,
        *,
        staircase_B: Tensor | None = None,
        wanted: Queries | None = None,
    ) -> Tensor:
        """SA, then CA, of every token i; CA sees the aggregates of tokens up to s(i): (B, T, E).

        Args:
            embeddings_BTE: the target's token embeddings.
            aggregated_BTE: output of `aggregate` for the same tokens.
            attention_mask_BT: 1 for real tokens.
            last_verified_BT: s(i), an index into T, see `moaspec.model.masks`.
            staircase_B: bool per sequence; True lets SA see only the query's own block.
            wanted: the tokens whose states are wanted, which are then returned as (M, E). That
                saves the others' queries and MLPs.
        """
        if wanted is not None and self.reads_drafts:  # all states are needed
            states_BTE = self.block_states(
                embeddings_BTE,
                aggregated_BTE,
                attention_mask_BT,
                last_verified_BT,
                staircase_B=staircase_B,
            )
            return wanted.of_text(states_BTE)
        position_ids_BT = positions(attention_mask_BT)
        sa_mask = text_mask(attention_mask_BT)
        if staircase_B is not None:
            narrow = staircase_mask(sa_mask, last_verified_BT)
            sa_mask = torch.where(staircase_B[:, None, None, None], narrow, sa_mask)
        key, value = self.project_kv(aggregated_BTE, position_ids_BT)
        ca_mask = memory_mask(attention_mask_BT, last_verified_BT)
        decoder = self.decoder
        self_angles = decoder.self_rope(position_ids_BT)
        if wanted is not None:
            x_BQE = decoder.self_attention_at(wanted, embeddings_BTE, self_angles, sa_mask)
            cross_mask = wanted.of_mask(ca_mask)
            states_BQE = decoder.run_cross_attention(
                x_BQE,
                decoder.cross_rope(wanted.of(position_ids_BT[..., None])[..., 0]),
                lambda q: masked_attention(q, key, value, cross_mask),
            )
            return wanted.flat(states_BQE)
        x_BTE = decoder.run_self_attention(
            embeddings_BTE,
            self_angles,
            [lambda q, k, v: masked_attention(q, k, v, sa_mask)] * len(decoder.text_layers),
        )
        if self.reads_drafts:
            own_key, own_value = self.project_kv(x_BTE, position_ids_BT)
            key, value = torch.cat((key, own_key), dim=2), torch.cat((value, own_value), dim=2)
            ca_mask = reused_layer_mask(text_mask(attention_mask_BT), last_verified_BT)
        return decoder.run_cross_attention(
            x_BTE,
            decoder.cross_rope(position_ids_BT),
            lambda q: masked_attention(q, key, value, ca_mask),
        )

    def forward(
        self,
        embeddings_BTE: Tensor,
        kv_or_means: Tensor,
        attention_mask_BT: Tensor,
        last_verified_BT: Tensor,
        *,
        staircase_B: Tensor | None = None,
        wanted: Queries | None = None,
    ) -> tuple[Tensor, ...]:
        """The training pass of all exits, see `block_states`.

        Args:
            embeddings_BTE: the target's token embeddings.
            kv_or_means: keys and values of all layers, (B, T, L, K), or the output of
                `mean_over_layers` for them, (B, T, K), where LSA is frozen.

        Returns:
            The aggregate of every token, then the output of each exit in the order of
            `config.num_target_layers`: (B, T, E) each, or (M, E) for exits with `wanted`.
        """
        aggregate = self.aggregate if kv_or_means.ndim == 4 else self.encoder.projection
        aggregated_BTE = aggregate(kv_or_means)
        states_BTE = self.block_states(
            embeddings_BTE,
            aggregated_BTE,
            attention_mask_BT,
            last_verified_BT,
            staircase_B=staircase_B,
            wanted=wanted,
        )
        layers = self.config.num_target_layers
        return aggregated_BTE, *(self.adapt(states_BTE, n) for n in layers)


@dataclass(frozen=True)
class TargetPass:
    """Results of a pass of the frozen target over whole texts."""

    # Keys and values of all layers, as `LayerFeatures` lays them out; of the last N layers only,
    # where `LayerMeanCache` read them.
    kv_BTLK: Tensor
    hidden_BTE: Tensor  # states after the final norm, the input of the LM head
    # For each N asked for, the states that enter the last N layers, (B, T, E).
    before: Mapping[int, Tensor] = field(default_factory=dict)


def positions(attention_mask_BT: Tensor) -> Tensor:
    """Positions of real tokens; pads before the first have 0: (B, T) int64."""
    return (attention_mask_BT.long().cumsum(1) - 1).clamp(min=0)


class LayerFeatures:
    """The target's keys and values as LSA reads them, filled layer by layer during a pass.

    Per KV head, key and value are joined along D, then heads are flattened: (B, T, L, K).

    Args:
        num_layers: L.

    Source: arXiv 2410.03804, section 4.1.
    """

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._kv_BTLHX: Tensor | None = None

    def write(self, layer: int, key_BHTD: Tensor, value_BHTD: Tensor) -> None:
        if self._kv_BTLHX is None:
            rows, heads, tokens, size = key_BHTD.shape
            shape = (rows, tokens, self._num_layers, heads, 2 * size)
            self._kv_BTLHX = key_BHTD.new_empty(shape)
        key_BTHD, value_BTHD = self._kv_BTLHX[:, :, layer].chunk(2, dim=-1)
        key_BTHD.copy_(key_BHTD.transpose(1, 2))
        value_BTHD.copy_(value_BHTD.transpose(1, 2))

    def read(self) -> Tensor:
        """(B, T, L, K), same dtype; every layer must have been written."""
        assert self._kv_BTLHX is not None
        return self._kv_BTLHX.flatten(3)


def damped(moment_EE: Tensor) -> np.ndarray:
    """`MoADrafter.head_moment` in float64 with `MOMENT_DAMPING`.

    A NumPy array, because MKL's factorisations, which PyTorch calls, keep about ten megabytes.
    """
    moment = moment_EE.double().numpy()
    return moment + MOMENT_DAMPING * moment.diagonal().mean() * np.eye(len(moment))


def is_moment(moment_EE: Tensor) -> bool:
    """Whether a square matrix can be a mean outer product: positive definite once damped."""
    try:
        factor = np.linalg.cholesky(damped(moment_EE))
    except np.linalg.LinAlgError:
        return False
    return bool(np.isfinite(factor).all())
