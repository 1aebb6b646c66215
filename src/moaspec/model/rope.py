"""Rotary embeddings with the scaling that a target has.

Legend: B batch, T tokens, D head dim.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from moaspec.model.layers import Rope


class LongRope(Rope):
    """LongRoPE: one set of frequencies for texts of up to `switch` tokens, one for longer texts.

    All positions of a longer text use the second set, so a cache must compute its keys again when a
    text grows past the switch. The largest position of a row tells the length of its text.
    """

    long_inv_freq: Tensor

    def __init__(
        self, inv_freq: Tensor, attention_scaling: float, *, long_inv_freq: Tensor, switch: int
    ) -> None:
        super().__init__(inv_freq, attention_scaling)
        self.register_buffer("long_inv_freq", long_inv_freq, persistent=False)
        self.switch = switch

    def frequencies(self, position_ids_BT: Tensor) -> Tensor:
        """(B, 1, D / 2)."""
        is_long = (position_ids_BT.amax(-1) >= self.switch)[:, None, None]
        return torch.where(is_long, self.long_inv_freq, self.inv_freq)


def scaled_rope(head_dim: int, parameters: dict[str, Any], max_positions: int) -> Rope:
    """Rotary embeddings as the target has them, scaling included (SA).

    Args:
        head_dim: D of the layer.
        parameters: transformers' `rope_parameters` (`rope_type`, `rope_theta`, ...).
        max_positions: the target's `max_position_embeddings`.
    """
    kind = parameters.get("rope_type", "default")
    if kind == "default":
        rotary_dim = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
        return Rope.plain(rotary_dim, parameters["rope_theta"])
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
        return Rope(inv_freq, attention_scaling)
    switch = int(parameters["original_max_position_embeddings"])
    long_inv_freq, _ = compute(config, device, seq_len=switch + 1)
    return LongRope(inv_freq, attention_scaling, long_inv_freq=long_inv_freq, switch=switch)
