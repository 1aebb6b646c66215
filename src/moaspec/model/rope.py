"""Rotary position embeddings.

Legend: B batch, H heads, T tokens, D head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

CosSin = tuple[Tensor, Tensor]


class Rope(nn.Module):
    """Cosines and sines for given positions.

    Frequencies stay in float32 whatever the dtype of the layer: in bf16 neighbouring positions
    beyond 256 would coincide.
    """

    inv_freq: Tensor

    def __init__(self, inv_freq: Tensor, attention_scaling: float = 1.0) -> None:
        super().__init__()
        self.register_buffer("inv_freq", inv_freq.float(), persistent=False)
        self.attention_scaling = attention_scaling

    @classmethod
    def plain(cls, head_dim: int, theta: float) -> Rope:
        """Unscaled rotary embeddings (LSA over layer indices, CA over positions)."""
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        return cls(1.0 / theta**exponent)

    @classmethod
    def scaled(cls, head_dim: int, parameters: dict[str, Any], max_positions: int) -> Rope:
        """Rotary embeddings as the target has them, scaling included (SA).

        Args:
            head_dim: D of the layer.
            parameters: transformers' `rope_parameters` (`rope_type`, `rope_theta`, ...).
            max_positions: the target's `max_position_embeddings`.
        """
        kind = parameters.get("rope_type", "default")
        if kind == "default":
            return cls.plain(head_dim, parameters["rope_theta"])
        config = PreTrainedConfig(
            rope_parameters=dict(parameters),
            head_dim=head_dim,
            hidden_size=head_dim,
            num_attention_heads=1,
            max_position_embeddings=max_positions,
        )
        inv_freq, attention_scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
        return cls(inv_freq, attention_scaling)

    def _apply(self, fn: Any, recurse: bool = True) -> Rope:
        """Follow the module to its device, never to its dtype."""
        exact = self.inv_freq
        super()._apply(fn, recurse)
        self.inv_freq = exact.to(self.inv_freq.device)
        return self

    def forward(self, position_ids_BT: Tensor) -> CosSin:
        """Return cosines and sines, each (B, 1, T, D) in float32."""
        angles_BTD = position_ids_BT[..., None].float() * self.inv_freq
        angles_B1TD = torch.cat((angles_BTD, angles_BTD), dim=-1)[:, None]
        scale = self.attention_scaling
        return angles_B1TD.cos() * scale, angles_B1TD.sin() * scale


def rotate(x_BHTD: Tensor, cos_sin: CosSin) -> Tensor:
    """Apply rotary embeddings to queries or keys, keeping their dtype."""
    cos, sin = (part.to(x_BHTD.dtype) for part in cos_sin)
    first, second = x_BHTD.chunk(2, dim=-1)
    return x_BHTD * cos + torch.cat((-second, first), dim=-1) * sin
