"""The Mixture-of-Attentions drafter: three attentions and N reused layers of the target.

For drafts after the verified tokens 1 ... s, with the target's keys and values kv_t of each
verified token in each of its L layers, and its token embedding e:

    LSA  layer self-attention       a_t = W mean_l LSA(kv_t,1 ... kv_t,L)_l + b     t <= s
    SA   self-attention             x_i = SA(e_1 ... e_i)                           all i
    CA   cross-attention            y_i = CA(query x_i; keys and values of a_1 ... a_s)
    N    target layer inference     z_i = the target's last N layers and final norm over y_i
                                    (N = 0: z_i = y_i)
         draft distribution         q_i = softmax(the target's LM head of z_i)

LSA runs on the server beside the target (`target_encoder.py`), SA and CA run for every draft
(`draft_decoder.py`). In training every token i is drafted for some s(i) <= i, which CA's mask and
the mask of the reused layers enforce (T-step bound).

Source: arXiv 2410.03804, section 4 and figure 2.

Legend: B batch, T tokens, L target layers, E hidden size, V vocabulary, K one layer's key and
value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from moaspec.errors import ShapeError
from moaspec.model.draft_decoder import DraftDecoder
from moaspec.model.drafter_config import DrafterConfig
from moaspec.model.layers import masked_attention
from moaspec.model.masks import memory_mask, reused_layer_mask, staircase_mask, text_mask
from moaspec.model.target_encoder import TargetEncoder


@dataclass(frozen=True)
class TargetPass:
    """The result of one uncached pass of the frozen target.

    Attributes:
        kv_BTLK: keys and values of all layers, as `layer_features` lays them out.
        hidden_BTE: states after the final norm, the input of the LM head.
        before: by N, the states that enter the last N layers, (B, T, E) each, where asked for.
    """

    kv_BTLK: Tensor
    hidden_BTE: Tensor
    before: Mapping[int, Tensor] = field(default_factory=dict)


class TrainingTarget(Protocol):
    """The methods of a target that the training pass calls (see `moaspec.target.target.Target`)."""

    def embed(self, input_ids_BT: Tensor) -> Tensor: ...

    def encode(self, input_ids_BT: Tensor, attention_mask_BT: Tensor) -> TargetPass: ...

    def reuse_layers(
        self,
        states_BTE: Tensor,
        position_ids_BT: Tensor,
        *,
        mask: Tensor,
        kv_BTLK: Tensor,
        num: int,
    ) -> Tensor: ...

    def head(self, states_BTE: Tensor, token_ids: Tensor | None = None) -> Tensor: ...


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

    @property
    def reads_drafts(self) -> bool:
        """Whether CA is replaced by a self-attention that also attends to drafted tokens."""
        return "ca" in self.config.without

    @property
    def num_parameters(self) -> int:
        """Trainable parameters; embedding, head and reused layers are the target's."""
        return sum(p.numel() for p in self.parameters())

    def aggregate(self, kv_BTLK: Tensor) -> Tensor:
        """LSA, mean over layers and projection.

        Args:
            kv_BTLK: (B, T, L, K) keys (after rotary embedding) and values of verified tokens; per
                KV head, key and value joined along the head dim, then heads flattened.

        Returns:
            (B, T, E).

        Raises:
            ShapeError: the last axis is not this drafter's K.
        """
        self._check_width(kv_BTLK)
        return self.encoder.aggregate(kv_BTLK)

    def project_kv(self, states_BTE: Tensor, position_ids_BT: Tensor) -> tuple[Tensor, Tensor]:
        """CA's key (after rotary embedding) and value, each (B, ca_kv_heads, T, D)."""
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

    def block_states(
        self,
        embeddings_BTE: Tensor,
        aggregated_BTE: Tensor,
        attention_mask_BT: Tensor,
        block_start_BT: Tensor,
        *,
        staircase_B: Tensor | None = None,
    ) -> Tensor:
        """SA, then CA, of every token, where token i attends to aggregates up to s(i): (B, T, E).

        Args:
            embeddings_BTE: the target's token embeddings.
            aggregated_BTE: output of `aggregate` for the same tokens.
            attention_mask_BT: 1 for real tokens.
            block_start_BT: s(i), an index into T; the last verified token as query i sees it.
            staircase_B: bool per sequence; True lets SA see only the query's own block.
        """
        position_ids_BT = positions(attention_mask_BT)
        sa_mask = text_mask(attention_mask_BT)
        if staircase_B is not None:
            narrow = staircase_mask(sa_mask, block_start_BT)
            sa_mask = torch.where(staircase_B[:, None, None, None], narrow, sa_mask)
        key, value = self.project_kv(aggregated_BTE, position_ids_BT)
        ca_mask = memory_mask(attention_mask_BT, block_start_BT)
        decoder = self.decoder
        x_BTE = decoder.run_self_attention(
            embeddings_BTE,
            decoder.self_rope(position_ids_BT),
            lambda q, k, v: masked_attention(q, k, v, sa_mask),
        )
        if self.reads_drafts:
            own_key, own_value = self.project_kv(x_BTE, position_ids_BT)
            key, value = torch.cat((key, own_key), dim=2), torch.cat((value, own_value), dim=2)
            ca_mask = reused_layer_mask(text_mask(attention_mask_BT), block_start_BT)
        return decoder.run_cross_attention(
            x_BTE,
            decoder.cross_rope(position_ids_BT),
            lambda q: masked_attention(q, key, value, ca_mask),
        )

    def exit(self, states_BTE: Tensor, num_target_layers: int) -> Tensor:
        """CA's output as input of the last N target layers (N = 0: of the head).

        Raises:
            ShapeError: the drafter has exits, and none for this N.
        """
        adapter = self.adapter(num_target_layers)
        return states_BTE if adapter is None else adapter(states_BTE)

    def adapter(self, num_target_layers: int) -> ExitAdapter | None:
        """The adapter of CA's output for this N, or None.

        Raises:
            ShapeError: see `exit`.
        """
        if not self.exits:
            return None
        if str(num_target_layers) not in self.exits:
            raise ShapeError(
                f"This drafter was trained for num_target_layers in "
                f"{self.config.num_target_layers}, got {num_target_layers}."
            )
        return cast(ExitAdapter, self.exits[str(num_target_layers)])

    def forward(
        self,
        embeddings_BTE: Tensor,
        read: Tensor,
        attention_mask_BT: Tensor,
        block_start_BT: Tensor,
        *,
        staircase_B: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """The training pass of all exits.

        Args:
            embeddings_BTE: the target's token embeddings.
            read: keys and values of all layers, (B, T, L, K), or their means over layers from a
                frozen LSA, (B, T, K).
            attention_mask_BT: see `block_states`.
            block_start_BT: see `block_states`.
            staircase_B: see `block_states`.

        Returns:
            The aggregate of every token, then the output of each exit in the order of
            `config.num_target_layers`: (B, T, E) each.
        """
        aggregated_BTE = self.aggregate(read) if read.ndim == 4 else self.encoder.projection(read)
        states_BTE = self.block_states(
            embeddings_BTE,
            aggregated_BTE,
            attention_mask_BT,
            block_start_BT,
            staircase_B=staircase_B,
        )
        layers = self.config.num_target_layers
        return aggregated_BTE, *(self.exit(states_BTE, n) for n in layers)

    def block_logits(
        self,
        target: TrainingTarget,
        input_ids_BT: Tensor,
        attention_mask_BT: Tensor,
        block_start_BT: Tensor,
        num_target_layers: int = 0,
        *,
        staircase_B: Tensor | None = None,
    ) -> Tensor:
        """Draft logits of a whole batch in one pass, as in training.

        Args:
            target: the frozen target.
            input_ids_BT: (B, T) int64.
            attention_mask_BT: (B, T), 1 for real tokens.
            block_start_BT: (B, T) int64, s(i): token i reads the target's activations of tokens
                j <= s(i) and, with N > 0, drafts of its own after that.
            num_target_layers: N, target layers reused after CA.
            staircase_B: see `block_states`.

        Returns:
            (B, T, V) float32; -inf for tokens outside a trimmed draft vocabulary.
        """
        kv_BTLK = target.encode(input_ids_BT, attention_mask_BT).kv_BTLK
        states_BTE = self.block_states(
            target.embed(input_ids_BT),
            self.aggregate(kv_BTLK),
            attention_mask_BT,
            block_start_BT,
            staircase_B=staircase_B,
        )
        states_BTE = self.exit(states_BTE, num_target_layers)
        if num_target_layers:
            states_BTE = target.reuse_layers(
                states_BTE,
                positions(attention_mask_BT),
                mask=reused_layer_mask(text_mask(attention_mask_BT), block_start_BT),
                kv_BTLK=kv_BTLK,
                num=num_target_layers,
            )
        logits_BTV = target.head(states_BTE)
        if self.draft_token_ids is None:
            return logits_BTV
        outside = torch.ones(logits_BTV.shape[-1], dtype=torch.bool, device=logits_BTV.device)
        outside[self.draft_token_ids] = False
        return logits_BTV.masked_fill(outside, float("-inf"))


def positions(attention_mask_BT: Tensor) -> Tensor:
    """Positions of real tokens, pads before the first get 0: (B, T) int64."""
    return (attention_mask_BT.long().cumsum(1) - 1).clamp(min=0)
