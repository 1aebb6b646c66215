"""Sizes of a drafter that is a stack of plain layers over the text (the baselines)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from moaspec.errors import ShapeError
from moaspec.model.drafter_config import MAX_LAYERS, LayerConfig, TargetIdentity
from moaspec.model.layers import Rope
from moaspec.model.rope import scaled_rope


@dataclass(frozen=True, kw_only=True)
class StackConfig:
    """Everything needed to build a baseline drafter."""

    layer: LayerConfig  # each of its layers, as wide as the target
    num_layers: int = 1
    rms_norm_eps: float = 1e-5
    hidden_act: str = "silu"
    # Transformers' `rope_parameters` of the target.
    rope_parameters: dict[str, Any] = field(default_factory=dict)
    max_position_embeddings: int = 2048  # the target's context length, which some scalings need
    target: TargetIdentity | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.num_layers, int) or not 1 <= self.num_layers <= MAX_LAYERS:
            raise ShapeError(f"num_layers must be within 1..{MAX_LAYERS}, got {self.num_layers!r}.")

    def rope(self) -> Rope:
        """Rotary embeddings as the target has them."""
        return scaled_rope(self.layer.head_dim, self.rope_parameters, self.max_position_embeddings)
