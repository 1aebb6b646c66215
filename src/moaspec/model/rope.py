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

    Frequencies stay in float32 in layers of any dtype: in bf16 neighbouring positions beyond 256
    would coincide.
    """

    inv_freq: Tensor
    long_inv_freq: Tensor | None

    def __init__(
        self,
        inv_freq: Tensor,
        attention_scaling: float = 1.0,
        *,
        long_inv_freq: Tensor | None = None,
        switch: int = 0,
    ) -> None:
        super().__init__()
        self.register_buffer("inv_freq", inv_freq.float(), persistent=False)
        self.register_buffer("long_inv_freq", long_inv_freq, persistent=False)
        self.attention_scaling = attention_scaling
        self.switch = switch

    @classmethod
    def plain(cls, head_dim: int, theta: float) -> Rope:
        """Unscaled rotary embeddings (LSA over layer indices, CA over positions)."""
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        return cls(1.0 / theta**exponent)

    @classmethod
    def scaled(cls, head_dim: int, parameters: dict[str, Any], max_positions: int) -> Rope:
        """Rotary embeddings as the target has them, scaling included (SA).

        LongRoPE has two sets of frequencies: one for texts of up to `switch` tokens, one for
        longer texts, from their first token on. Whoever caches keys computes them again when a text
        outgrows the switch, as the target's own keys are.

        Args:
            head_dim: D of the layer.
            parameters: transformers' `rope_parameters` (`rope_type`, `rope_theta`, ...).
            max_positions: the target's `max_position_embeddings`.
        """
        kind = parameters.get("rope_type", "default")
        if kind == "default":
            rotary_dim = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
            return cls.plain(rotary_dim, parameters["rope_theta"])
        config = PreTrainedConfig(
            rope_parameters=dict(parameters),
            head_dim=head_dim,
            hidden_size=head_dim,
            num_attention_heads=1,
            max_position_embeddings=max_positions,
        )
        compute = ROPE_INIT_FUNCTIONS[kind]
        device = torch.get_default_device()
        inv_freq, attention_scaling = compute(config, device)
        if kind != "longrope":
            return cls(inv_freq, attention_scaling)
        switch = int(parameters["original_max_position_embeddings"])
        long_inv_freq, _ = compute(config, device, seq_len=switch + 1)
        return cls(inv_freq, attention_scaling, long_inv_freq=long_inv_freq, switch=switch)

    def _apply(self, fn: Any, recurse: bool = True) -> Rope:
        """Follow the module to its device, never to its dtype."""
        exact = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, buffer in exact.items():
            moved = self._buffers[name]
            if buffer is not None and moved is not None:
                self._buffers[name] = buffer.to(moved.device)
        return self

    def forward(self, position_ids_BT: Tensor) -> CosSin:
        """Return cosines and sines, each (B, 1, T, D) in float32.

        Each row's largest position tells LongRoPE how long its text is.
        """
        cos, sin = self.angles(position_ids_BT)
        return cos[:, None], sin[:, None]

    def between(self, start: int, stop: int) -> CosSin:
        """Those of positions start..stop - 1 of one text, (1, 1, stop - start, D) each."""
        cos, sin = self.along(start, stop)
        return cos[None, None], sin[None, None]

    def along(self, start: int, stop: int) -> CosSin:
        """`between` without leading axes, contiguous, (stop - start, D) each."""
        cos, sin = self(torch.arange(start, stop, device=self.inv_freq.device)[None])
        return cos[0, 0], sin[0, 0]

    def angles(self, position_ids: Tensor) -> CosSin:
        """Cosines and sines, (..., T, D) each."""
        angles = position_ids[..., None].float() * self._frequencies(position_ids)
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin, scale = angles.cos(), angles.sin(), self.attention_scaling
        return (cos, sin) if scale == 1.0 else (cos * scale, sin * scale)

    def _frequencies(self, position_ids_BT: Tensor) -> Tensor:
        if self.long_inv_freq is None:
            return self.inv_freq
        is_long = (position_ids_BT.amax(-1) >= self.switch)[:, None, None]
        return torch.where(is_long, self.long_inv_freq, self.inv_freq)


def rotate(x_BHTD: Tensor, cos_sin: CosSin) -> Tensor:
    """Apply rotary embeddings to queries or keys, keeping their dtype.

    Where there are fewer angles than dimensions (partial rotary embeddings), the rest stays.
    """
    cos, sin = (part.to(x_BHTD.dtype) for part in cos_sin)
    turned, rest = x_BHTD.split([cos.shape[-1], x_BHTD.shape[-1] - cos.shape[-1]], dim=-1)
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned
