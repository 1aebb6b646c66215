"""The Mixture-of-Attentions drafter: both halves in one module.

Legend: B batch, T tokens, L target layers, E hidden size, V vocabulary, K one layer's key and
value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from moaspec.backends.cpu.fused_drafting import FusedExit
from moaspec.errors import ShapeError
from moaspec.model.draft_decoder import DraftDecoder
from moaspec.model.drafter_config import DrafterConfig
from moaspec.model.layers import masked_attention
from moaspec.model.masks import memory_mask, reused_layer_mask, staircase_mask, text_mask
from moaspec.model.target_encoder import TargetEncoder


@dataclass(frozen=True)
class TargetPass:
    """What one uncached pass of the frozen target leaves behind.

    Attributes:
        kv_BTLK: keys and values of all layers, as `layer_features` lays them out.
        hidden_BTE: states after the final norm, the input of the LM head.
        before: by N, the states that enter the last N layers, (B, T, E) each, where asked for.
    """

    kv_BTLK: Tensor
    hidden_BTE: Tensor
    before: Mapping[int, Tensor] = field(default_factory=dict)


class TrainingTarget(Protocol):
    """The parts of a target that the training pass uses (see `moaspec.target.target.Target`)."""

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
    """CA's output as an N wants it: norm, linear, and the size of that N's states.

    States before the last N layers differ in direction and by tens in size, too much for one
    output to stand for all of them, or for CA to learn from what it gave for another N.

    Attributes:
        fused: the same by kernels, where they can, in bf16.
    """

    fused: FusedExit | None = None

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.linear = nn.Linear(config.hidden_size, config.hidden_size)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, states_BTE: Tensor) -> Tensor:
        if self.fused is not None:
            return self.fused.run(states_BTE)
        return self.linear(self.norm(states_BTE)) * self.scale


class DerivedModules:
    """What someone made of a module's weights, for as long as they stay what they are.

    Not a part of the module: it is neither saved nor moved nor copied with it.
    """

    def __init__(self) -> None:
        self._key: object = None
        self._made: Any = None

    def get(self, key: object, make: Callable[[], Any]) -> Any:
        """What was made for this key, or what `make` makes now; only the latest is kept."""
        if self._key != key:
            self._key, self._made = key, make()
        return self._made

    def __deepcopy__(self, _: Any) -> DerivedModules:
        return DerivedModules()

    def __reduce__(self) -> tuple[type[DerivedModules], tuple[()]]:
        return DerivedModules, ()


class MoADrafter(nn.Module):
    """A drafter that reads the target's keys and values in every layer.

    Args:
        config: sizes; the target it belongs to.
        draft_token_ids: (V',) int64 ids of a trimmed draft vocabulary, None for the full one.

    Attributes:
        prepared: what decoding made of these weights and keeps from call to call.
        head_moment: (E, E) float32 on the CPU, or None: the mean of products of what drafts give to
            the head, measured after training. With it a rounded head drafts nearly as well.

    Source: arXiv 2410.03804, section 4 and figure 2.
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
        self.prepared = DerivedModules()

    @property
    def reads_drafts(self) -> bool:
        """Whether CA is replaced by a self-attention, which reads drafted tokens too."""
        return "ca" in self.config.without

    @property
    def num_parameters(self) -> int:
        """Trainable parameters; embedding, head and reused layers are the target's."""
        return sum(p.numel() for p in self.parameters())

    @property
    def version(self) -> tuple[tuple[int, int], ...]:
        """Changes whenever a weight does: where each is stored, and how often it was written."""
        return tuple(
            (p.data_ptr(), 0 if p.is_inference() else p._version) for p in self.parameters()
        )

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
        """`project_kv` of what `aggregate` gives, in one call where kernels can."""
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
        """CA's output for every token when token i may read memory up to s(i): (B, T, E).

        Args:
            embeddings_BTE: the target's token embeddings.
            aggregated_BTE: what `aggregate` made of the target's activations of the same tokens.
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
        """What CA's output goes through before the last N target layers, or the head.

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
            read: keys and values of all layers, (B, T, L, K), or means over layers that a frozen
                LSA gave before, (B, T, K).
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
        """Draft logits of a whole batch in one pass, as training computes them.

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
