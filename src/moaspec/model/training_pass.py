"""Passes of target and drafter over whole texts, without caches: training, and tests of drafts.

Legend: B batch, T tokens, L target layers, H target KV heads, D head dim, E hidden size,
K = 2 * H * D, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from moaspec.model.drafter_config import DrafterConfig
from moaspec.model.layers import masked_attention
from moaspec.model.masks import memory_mask, reused_layer_mask, staircase_mask, text_mask


@dataclass(frozen=True)
class TargetPass:
    """Results of a pass of the frozen target over whole texts."""

    # Keys and values of all layers, as `LayerFeatures` lays them out; of the last N layers only,
    # where `LayerMeanCache` read them.
    kv_BTLK: Tensor
    hidden_BTE: Tensor  # states after the final norm, the input of the LM head
    # For each N asked for, the states that enter the last N layers, (B, T, E).
    before: Mapping[int, Tensor] = field(default_factory=dict)


class BlockTraining(nn.Module):
    """The part of `MoADrafter` that only training uses: all blocks of a batch in one pass."""

    config: DrafterConfig
    encoder: Any
    decoder: Any
    aggregate: Any
    project_kv: Any
    adapt: Any
    reads_drafts: bool

    def block_states(
        self,
        embeddings_BTE: Tensor,
        aggregated_BTE: Tensor,
        attention_mask_BT: Tensor,
        last_verified_BT: Tensor,
        *,
        staircase_B: Tensor | None = None,
    ) -> Tensor:
        """SA, then CA, of every token i; CA sees the aggregates of tokens up to s(i): (B, T, E).

        Args:
            embeddings_BTE: the target's token embeddings.
            aggregated_BTE: output of `aggregate` for the same tokens.
            attention_mask_BT: 1 for real tokens.
            last_verified_BT: s(i), an index into T, see `moaspec.model.masks`.
            staircase_B: bool per sequence; True lets SA see only the query's own block.
        """
        position_ids_BT = positions(attention_mask_BT)
        sa_mask = text_mask(attention_mask_BT)
        if staircase_B is not None:
            narrow = staircase_mask(sa_mask, last_verified_BT)
            sa_mask = torch.where(staircase_B[:, None, None, None], narrow, sa_mask)
        key, value = self.project_kv(aggregated_BTE, position_ids_BT)
        ca_mask = memory_mask(attention_mask_BT, last_verified_BT)
        decoder = self.decoder
        x_BTE = decoder.run_self_attention(
            embeddings_BTE,
            decoder.self_rope(position_ids_BT),
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
    ) -> tuple[Tensor, ...]:
        """The training pass of all exits, see `block_states`.

        Args:
            embeddings_BTE: the target's token embeddings.
            kv_or_means: keys and values of all layers, (B, T, L, K), or the output of
                `mean_over_layers` for them, (B, T, K), where LSA is frozen.

        Returns:
            The aggregate of every token, then the output of each exit in the order of
            `config.num_target_layers`: (B, T, E) each.
        """
        aggregate = self.aggregate if kv_or_means.ndim == 4 else self.encoder.projection
        aggregated_BTE = aggregate(kv_or_means)
        states_BTE = self.block_states(
            embeddings_BTE,
            aggregated_BTE,
            attention_mask_BT,
            last_verified_BT,
            staircase_B=staircase_B,
        )
        layers = self.config.num_target_layers
        return aggregated_BTE, *(self.adapt(states_BTE, n) for n in layers)


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
