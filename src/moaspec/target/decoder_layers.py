"""The target's decoder layers and the norm behind them: how a pass goes through them.

By kernels in one call where these have all of it, else replayed from a recording on a GPU, else one
by one as transformers' modules compute it.

Legend: B batch, T new tokens, S visible keys, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from torch import Tensor, nn

from moaspec.backends.angle_table import AngleTable
from moaspec.backends.cpu.cpu_attention import MOST_QUERIES
from moaspec.backends.cpu.fused_layers import FusedNorm, FusedStack, Slots
from moaspec.backends.cuda_graphs import GraphSafeWrite, PassGraphs
from moaspec.backends.fast_layers import (
    AttentionInputs,
    KVCapture,
    WriteKV,
    cache_argument,
    kernel_norm,
    make_fast,
)
from moaspec.target import families

WatchLayer = Callable[[int, Tensor], None]
"""(layer index, the states that enter it, (B, T, E))."""


@dataclass(frozen=True)
class LastLayers:
    """A target's last layers as kernels run them inside a call for more than these.

    Attributes:
        stack: ends with them.
        norm: behind the last one.
        angles: float32, of any position.
    """

    stack: FusedStack
    norm: FusedNorm
    angles: AngleTable


class DecoderLayers:
    """Runs the last so many layers, or all, and the final norm.

    Args:
        base: transformers' model without its head.
        config: its configuration; of the whole target, where `base` lacks some layers.

    Attributes:
        types: each layer's, as transformers names them.
        lean: whether they run in fewer calls than transformers' own.
        fused: the layers as kernels compute them, or None.
        graphs: recordings of passes on a CUDA device, or None.
    """

    def __init__(self, base: Any, config: Any) -> None:
        self._base = base
        # The last layer is the one that an excerpt has, if it has any.
        self._cache_argument = cache_argument(base.layers[-1])
        self._rotary = families.RotaryEmbeddings(base.rotary_emb, config)
        self._window: int | None = getattr(config, "sliding_window", None)
        self._groups = int(config.num_attention_heads) // int(config.num_key_value_heads)
        self.types = families.layer_types(config)
        self.lean = False
        self.fused: FusedStack | None = None
        self.graphs: PassGraphs | None = None
        self._fast_norm: FusedNorm | None = None
        self._hooks: list[Mapping[int, Any]] = []

    def fuse(self, layers: Sequence[nn.Module]) -> None:
        """Run these, all that there are, in fewer calls; by kernels where they can."""
        self.fused, self.lean = make_fast(layers), True
        self._hooks = [
            hooks for layer in layers for hooks in (layer._forward_hooks, layer._forward_pre_hooks)
        ]
        if self.fused is not None:
            self._fast_norm = kernel_norm(self._base.norm)
            self._rotary.tabulate()

    @property
    def records(self) -> bool:
        """Whether passes are recorded, so that their sizes are worth rounding up."""
        return self.graphs is not None and self.graphs.failure is None

    def run(
        self,
        states_BTE: Tensor,
        position_ids_BT: Tensor,
        *,
        num: int,
        mask_B1TS: Tensor | None,
        write: WriteKV,
        lengths_B: Tensor | None = None,
        watch: WatchLayer | None = None,
    ) -> Tensor:
        """The last `num` layers and the final norm, from states that stand for their input.

        The other arguments are those of `Target.run`.
        """
        if lengths_B is None:
            lengths_B = position_ids_BT.amax(1) + 1
        rope = self._rotary(states_BTE, position_ids_BT, lengths_B, exact=self.fused is not None)
        masks = families.layer_masks(self.types, self._window, mask_B1TS, position_ids_BT)
        kinds = self._last_types(num)
        if watch is None and len(kinds) == 1:
            (kind,) = kinds
            done_BTE = self._in_one_call(states_BTE, rope[kind], masks[kind], write, num)
            if done_BTE is not None:
                return done_BTE
        shared = {
            kind: self._shared(states_BTE, rope[kind], mask, position_ids_BT)
            for kind, mask in masks.items()
        }
        graphs = self.graphs if watch is None else None
        if (
            graphs is not None
            and isinstance(write, GraphSafeWrite)
            and self._can_record(states_BTE)
        ):
            readings = {kind: one["reading"] for kind, one in shared.items()}
            return graphs.run(partial(self._read, num), states_BTE, readings, write, key=num)
        return self._through(states_BTE, shared, write, num, watch)

    def last(self, num: int) -> LastLayers | None:
        """The last `num` layers, if kernels can run them where a token sees all text before it."""
        norm, angles = self._unwatched_norm(), self._rotary.table(families.FULL)
        if self.fused is None or norm is None or angles is None or any(self._hooks):
            return None
        plain = self._last_types(num) == {families.FULL}
        return LastLayers(self.fused, norm, angles) if plain else None

    def _last_types(self, num: int) -> set[str]:
        return set(self.types[len(self.types) - num :])

    def _through(
        self,
        states_BTE: Tensor,
        shared: Mapping[str, dict[str, Any]],
        write: WriteKV,
        num: int,
        watch: WatchLayer | None = None,
    ) -> Tensor:
        """The last `num` layers one by one, and the final norm."""
        tap = {self._cache_argument: KVCapture(write)}
        for index in range(len(self.types) - num, len(self.types)):
            if watch is not None:
                watch(index, states_BTE)
            layer = self._base.layers[index]
            states_BTE = layer(states_BTE, **tap, **shared[self.types[index]])
        return self._normed(states_BTE)

    def _read(
        self, num: int, states_BTE: Tensor, readings: Mapping[str, AttentionInputs], write: WriteKV
    ) -> Tensor:
        return self._through(
            states_BTE, {kind: {"reading": one} for kind, one in readings.items()}, write, num
        )

    def _can_record(self, states_BTE: Tensor) -> bool:
        """Whether a pass does nothing that a recording would leave out."""
        watched = any(self._hooks) or self._watches_norm()
        return self.lean and not watched and not states_BTE.requires_grad

    def _normed(self, states_BTE: Tensor) -> Tensor:
        """The final norm; the same bits however many tokens a pass has."""
        norm = self._unwatched_norm()
        if norm is None or states_BTE.requires_grad:
            return cast(Tensor, self._base.norm(states_BTE))
        return norm(states_BTE)

    def _unwatched_norm(self) -> FusedNorm | None:
        """The final norm by kernels, unless somebody wants to see it."""
        return None if self._watches_norm() else self._fast_norm

    def _watches_norm(self) -> bool:
        norm = self._base.norm
        return bool(norm._forward_hooks or norm._forward_pre_hooks)

    def _in_one_call(
        self,
        states_BTE: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        mask_B1TS: Tensor | None,
        write: WriteKV,
        num: int,
    ) -> Tensor | None:
        """The last `num` layers and the final norm over a few tokens by kernels.

        None where layers are run one by one.

        That is so where somebody watches them, or where keys and values go elsewhere than into a
        cache that kernels know.
        """
        slots = getattr(write, "slots", None)
        if (
            self.fused is None
            or mask_B1TS is None
            or mask_B1TS.shape[2] > MOST_QUERIES
            or not isinstance(slots, Slots)
            or any(self._hooks)
            or states_BTE.requires_grad
        ):
            return None
        cos_BTR, sin_BTR = (part.contiguous() for part in cos_sin)
        norm = self._unwatched_norm()
        done_BTE = self.fused.run(
            states_BTE, cos_BTR, sin_BTR, mask_B1TS.contiguous(), slots=slots, num=num, norm=norm
        )
        return done_BTE if norm is not None else cast(Tensor, self._base.norm(done_BTE))

    def _shared(
        self,
        states_BTE: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        mask_B1TS: Tensor | None,
        position_ids_BT: Tensor,
    ) -> dict[str, Any]:
        """What all layers of one type are called with in a pass."""
        if self.lean:
            dtype, fused = states_BTE.dtype, self.fused is not None
            return {
                "reading": AttentionInputs.of(cos_sin, mask_B1TS, self._groups, dtype, fused=fused)
            }
        return {
            "attention_mask": mask_B1TS,
            "position_ids": position_ids_BT,
            "position_embeddings": cos_sin,
        }
