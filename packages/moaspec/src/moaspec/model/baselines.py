"""The baselines: EAGLE's draft head, and an independent small language model.

Token embeddings and LM head are the target's, frozen; the layers between them are their own.

Legend: B batch, T tokens, E hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moaspec.model.layers import DecoderLayer, SelfAttend, masked_attention, scaled_rope
from moaspec.model.masks import text_mask
from moaspec_core.checkpoint.drafter_config import MAX_LAYERS, LayerConfig, TargetIdentity
from moaspec_core.errors import ShapeError


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


class Baseline(nn.Module):
    """The parts that all baselines have.

    Args:
        draft_token_ids: (V',) int64 ids of a trimmed draft vocabulary, None for the full one.
    """

    kind: ClassVar[str]
    """Its name in configs, and the name of the method in `moaspec eval`."""

    def __init__(self, config: StackConfig, draft_token_ids: Tensor | None = None) -> None:
        super().__init__()
        self.config = config
        self.rope = scaled_rope(
            config.layer.head_dim, config.rope_parameters, config.max_position_embeddings
        )
        self.draft_token_ids: Tensor | None
        self.register_buffer("draft_token_ids", draft_token_ids, persistent=False)

    def _new_layer(self) -> DecoderLayer:
        config = self.config
        return DecoderLayer(config.layer, eps=config.rms_norm_eps, hidden_act=config.hidden_act)


class EagleDrafter(Baseline):
    """The draft head of EAGLE and EAGLE-2: one layer that predicts the target's next final state.

    It reads pairs: the target's final state of a token and the embedding of the token after it. For
    a token that the target has not processed yet, the head's own prediction replaces the state.

    Source: arXiv 2401.15077, section 4; arXiv 2406.16858.
    """

    kind = "eagle"

    def __init__(self, config: StackConfig, draft_token_ids: Tensor | None = None) -> None:
        super().__init__(config, draft_token_ids)
        width = config.layer.hidden_size
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.layer = self._new_layer()

    def read(
        self,
        embeddings_BTE: Tensor,
        hidden_BTE: Tensor,
        position_ids_BT: Tensor,
        attend: SelfAttend,
    ) -> Tensor:
        """Predict the target's final state of each pair's second token, (B, T, E).

        Args:
            embeddings_BTE: of the second tokens.
            hidden_BTE: the target's final states of the first ones, or predictions of them.
            position_ids_BT: of the first ones.
        """
        pairs_BTE = self.fc(torch.cat((embeddings_BTE, hidden_BTE), dim=-1))
        return self.layer(pairs_BTE, self.rope(position_ids_BT), attend)

    def forward(
        self,
        embeddings_BTE: Tensor,
        hidden_BTE: Tensor,
        position_ids_BT: Tensor,
        attention_mask_BT: Tensor,
    ) -> Tensor:
        """The training pass: predictions of each token's final state, (B, T, E).

        The first token has no predecessor, so its row is meaningless.
        """
        next_BTE = F.pad(embeddings_BTE[:, 1:], (0, 0, 0, 1))
        attend = _over_texts(attention_mask_BT)
        states_BTE = self.read(next_BTE, hidden_BTE, position_ids_BT, attend)
        return F.pad(states_BTE[:, :-1], (0, 0, 1, 0))


class IndependentDrafter(Baseline):
    """A small language model: a stack of decoder layers that sees no activations of the target."""

    kind = "independent"

    def __init__(self, config: StackConfig, draft_token_ids: Tensor | None = None) -> None:
        super().__init__(config, draft_token_ids)
        self.layers = nn.ModuleList(self._new_layer() for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.layer.hidden_size, eps=config.rms_norm_eps)

    def read(
        self, embeddings_BTE: Tensor, position_ids_BT: Tensor, attends: Sequence[SelfAttend]
    ) -> Tensor:
        """Final states for the target's head, (B, T, E); one attention operation per layer."""
        cos_sin = self.rope(position_ids_BT)
        for layer, attend in zip(self.layers, attends, strict=True):
            embeddings_BTE = layer(embeddings_BTE, cos_sin, attend)
        return self.norm(embeddings_BTE)

    def forward(
        self, embeddings_BTE: Tensor, position_ids_BT: Tensor, attention_mask_BT: Tensor
    ) -> Tensor:
        """The training pass, (B, T, E)."""
        attends = [_over_texts(attention_mask_BT)] * len(self.layers)
        return self.read(embeddings_BTE, position_ids_BT, attends)


def _over_texts(attention_mask_BT: Tensor) -> SelfAttend:
    """Causal attention over whole texts."""
    mask = text_mask(attention_mask_BT)
    return lambda query, key, value: masked_attention(query, key, value, mask)


KINDS: dict[str, type[Baseline]] = {cls.kind: cls for cls in (EagleDrafter, IndependentDrafter)}
"""All kinds, by the names that checkpoints record."""
