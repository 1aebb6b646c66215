"""The drafter's encoder, which runs beside the target: its keys and values -> CA's memory.

Legend: B batch, T tokens, L target layers, H target KV heads, D target head dim, E hidden size,
K = 2 * H * D, C = CA's KV heads.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moaspec.model.drafter_config import DrafterConfig
from moaspec.model.layers import DecoderLayer, KeyValueProjection, masked_attention
from moaspec.model.rope import Rope

AGGREGATE_CHUNK_TOKENS = 512
"""Tokens whose layers are aggregated at once; bounds memory for long prompts."""


def layer_features(key_LBHTD: Tensor, value_LBHTD: Tensor) -> Tensor:
    """Lay out the target's keys and values as LSA's input.

    Per KV head, key and value are joined along D, then heads are flattened.

    Returns:
        (B, T, L, K), same dtype.

    Source: arXiv 2410.03804, section 4.1.
    """
    joined_LBHTD = torch.cat((key_LBHTD, value_LBHTD), dim=-1)
    return joined_LBHTD.permute(1, 3, 0, 2, 4).flatten(3)


class LayerFeatures:
    """The layout of `layer_features`, filled layer by layer during a pass, without a second copy.

    Args:
        num_layers: L.
    """

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._kv_BTLHX: Tensor | None = None

    def write(self, layer: int, key_BHTD: Tensor, value_BHTD: Tensor) -> None:
        """Store one layer's keys and values."""
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


class TargetEncoder(nn.Module):
    """LSA over the target's layers, the projection to E, and CA's keys and values.

    For a verified token t with the target's keys and values kv_1 ... kv_L:

        a_t = W mean_l LSA(kv_1, ..., kv_L)_l + b      (`aggregate`)
        k_t = rope(W_k norm(a_t)),  v_t = W_v norm(a_t)  (`project_kv`)

    It runs once for each verified token and never for a draft.

    Source: arXiv 2410.03804, section 4.1 (layer self-attention) and 4.2 (cross-attention).
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        eps = config.rms_norm_eps
        lsa, ca = config.layer_self_attention, config.cross_attention
        self.layer_self_attention = DecoderLayer(lsa, eps=eps, hidden_act=config.hidden_act)
        self.last_layer_only = "lsa" in config.without
        self.layer_rope = Rope.plain(lsa.head_dim, config.rope_theta)
        self.projection = nn.Linear(config.kv_size, config.hidden_size)
        self.memory_norm = nn.RMSNorm(config.hidden_size, eps=eps)
        self.memory_key_value = KeyValueProjection(ca)
        self.memory_rope = Rope.plain(ca.head_dim, config.rope_theta)

    def encode(self, kv_BTLK: Tensor, position_ids_BT: Tensor) -> tuple[Tensor, Tensor]:
        """CA's keys and values of verified tokens: `aggregate`, then `project_kv`."""
        return self.project_kv(self.aggregate(kv_BTLK), position_ids_BT)

    def aggregate(self, kv_BTLK: Tensor) -> Tensor:
        """Summarise all target layers of each token.

        Args:
            kv_BTLK: (B, T, L, K) of verified tokens, as `layer_features` lays them out.

        Returns:
            (B, T, E) in the encoder's dtype.
        """
        return self.projection(self.mean_over_layers(kv_BTLK))

    def mean_over_layers(self, kv_BTLK: Tensor) -> Tensor:
        """LSA, then the mean over layers: (B, T, L, K) -> (B, T, K)."""
        if self.last_layer_only:
            kv_BTLK = kv_BTLK[:, :, -1:]
        flat_NLK = kv_BTLK.flatten(0, 1).to(self.memory_norm.weight.dtype)
        means = [self.layer_mean(chunk) for chunk in flat_NLK.split(AGGREGATE_CHUNK_TOKENS)]
        joined = torch.cat(means) if len(means) > 1 else means[0]
        return joined.unflatten(0, kv_BTLK.shape[:2])

    def layer_mean(self, x_NLK: Tensor) -> Tensor:
        """`mean_over_layers` of N tokens, (N, K)."""
        cos_sin = self.layer_rope.between(0, x_NLK.shape[1])
        return self.layer_self_attention.mean(x_NLK, cos_sin, masked_attention)

    def project_kv(self, states_BTE: Tensor, position_ids_BT: Tensor) -> tuple[Tensor, Tensor]:
        """CA's key (rotated) and value of each verified token, all that drafting needs of it.

        Args:
            states_BTE: output of `aggregate`.
            position_ids_BT: (B, T) int64, the tokens' own positions.

        Returns:
            Two tensors (B, C, T, D of CA).
        """
        # Under mixed precision the projection's output has fewer bits than the norm's weight.
        states_BTE = states_BTE.to(self.memory_norm.weight.dtype)
        normed_BTE = self.memory_norm(states_BTE)
        return self.memory_key_value(normed_BTE, self.memory_rope(position_ids_BT))
