"""Keys of positions that training did not reach, moved to positions that it did.

The target rotates its keys by their positions before LSA reads them, and LSA knows only the angles
that it was trained on. Rotary embeddings are turned back exactly: a key of position p, rotated by
the angles of p' - p, is the key of position p'.

Legend: B batch, T tokens, L target layers, K one layer's key and value (for each KV head its key,
then its value), J KV heads, D head dim.
"""

import torch
from torch import Tensor, nn

from moaspec.errors import ShapeError
from moaspec.model.drafter_config import DrafterConfig
from moaspec.model.layers import Rope, rotate
from moaspec.model.rope import LongRope, scaled_rope

CHUNK_TOKENS = 512
"""Tokens whose keys are turned at once; bounds memory for long prompts."""


class FoldedPositions(nn.Module):
    """Reads keys of later positions as keys of the second half of the trained positions.

    The first half is not used: LSA has seen only beginnings of prompts there.

    Args:
        config: of a drafter with `trained_positions`; all layers of its target have the rotary
            embeddings `rope_parameters`.

    Raises:
        ShapeError: the config has no target, or rotary embeddings that change with a text's length.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        if config.target is None:
            raise ShapeError("trained_positions needs the sizes of the target.")
        self.trained, self.head_dim = config.trained_positions, config.target.head_dim
        rope = scaled_rope(self.head_dim, config.rope_parameters, config.max_position_embeddings)
        if isinstance(rope, LongRope):
            raise ShapeError("trained_positions must be 0 for a target with LongRoPE.")
        self.rope = Rope(rope.inv_freq)  # without the scale, which the keys have already

    def forward(self, kv_BTLK: Tensor, position_ids_BT: Tensor) -> Tensor:
        """Keys and values of the same shape and dtype; values are unchanged.

        Args:
            kv_BTLK: (B, T, L, K) keys (after rotary embedding) and values.
            position_ids_BT: (B, T) int64, the tokens' positions.
        """
        if position_ids_BT.device.type == "cpu" and bool((position_ids_BT < self.trained).all()):
            return kv_BTLK
        half = max(1, self.trained // 2)
        back_BT = ((position_ids_BT - self.trained) // half + 1).clamp(min=0) * half
        chunks = (kv_BTLK.split(CHUNK_TOKENS, dim=1), back_BT.split(CHUNK_TOKENS, dim=1))
        turned = [self._turned(kv, back) for kv, back in zip(*chunks, strict=True)]
        return torch.cat(turned, dim=1) if len(turned) > 1 else turned[0]

    def _turned(self, kv_BTLK: Tensor, back_BT: Tensor) -> Tensor:
        """Keys rotated back by these numbers of positions, and the values."""
        cos, sin = self.rope.angles(back_BT)  # (B, T, D)
        key, value = kv_BTLK.unflatten(-1, (-1, 2, self.head_dim)).unbind(-2)  # (B, T, L, J, D)
        turned = rotate(key.float(), (cos[:, :, None, None], -sin[:, :, None, None]))
        return torch.stack((turned.to(value.dtype), value), dim=-2).flatten(-3)
