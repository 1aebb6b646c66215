"""The target's keys and values, copied while vLLM writes them into its cache.

They are taken after rotary embedding and before any cache layout, so this holds for every backend
that stores keys in a step of its own. With tensor parallelism each rank captures its own heads.

Legend: N tokens of a step, L target layers, H all KV heads, G KV heads of this rank, D head dim,
K = 2 * H * D.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moaspec.errors import ServingError
from moaspec.vllm_plugin.hooks import require

Integers = npt.NDArray[np.integer[Any]]

HELD_TOKENS = 256
"""Of a step whose keys and values are held: queries, in the same memory, are held with them."""

AllGather = Callable[[Tensor, int], Tensor]
"""(this rank's part, axis) -> the parts of all ranks, joined in order of rank."""


@dataclass(frozen=True, kw_only=True)
class HeadShare:
    """How a target's KV heads are spread over ranks.

    With more ranks than heads, neighbouring ranks hold the same one.

    Attributes:
        total: H.
        ranks: tensor-parallel size.
    """

    total: int
    ranks: int

    def __post_init__(self) -> None:
        if max(self.total, self.ranks) % min(self.total, self.ranks):
            raise ServingError(
                f"{self.total} key-value heads cannot be spread over {self.ranks} ranks evenly. "
                "Choose a --tensor-parallel-size that divides them or is a multiple of them."
            )

    @property
    def own(self) -> int:
        """G."""
        return max(1, self.total // self.ranks)

    def join(self, own_NLGK: Tensor, all_gather: AllGather) -> Tensor:
        """All heads in order, each once: (N, L, H, 2 D)."""
        if self.ranks == 1:
            return own_NLGK
        gathered = all_gather(own_NLGK, 2)
        return gathered[:, :, :: max(1, self.ranks // self.total)]


class KVCapture:
    """A buffer that every layer writes its new keys and values into, one step at a time.

    Args:
        layers: vLLM's attention layers of the target, in order.
        max_tokens: of a step.
        share: how heads are spread over ranks.
        like: a tensor of the target's dtype on its device.
        may_hold: whether what a layer writes stays as it is as long as somebody holds it, as in
            eager mode; graphs and compiled code use their memory again. Then those of short steps
            are held instead of copied, which costs a layer a twentieth.
    """

    def __init__(
        self,
        layers: Sequence[Any],
        *,
        max_tokens: int,
        share: HeadShare,
        like: Tensor,
        may_hold: bool = False,
    ) -> None:
        head_dim = layers[0].head_size
        self.share = share
        self.staged_NLGK = like.new_empty(max_tokens, len(layers), share.own, 2 * head_dim)
        self._may_hold, self._holds = may_hold, False
        self._held = dict[int, tuple[Tensor, Tensor]]()
        self._layers = self.staged_NLGK.unbind(1)
        self.pending = False
        for index, layer in enumerate(layers):
            self._attach(index, layer)

    @property
    def device(self) -> torch.device:
        """Where the buffer is."""
        return self.staged_NLGK.device

    def __len__(self) -> int:
        """L."""
        return int(self.staged_NLGK.shape[1])

    def _attach(self, index: int, layer: Any) -> None:
        write = require(layer.impl, "do_kv_cache_update", owner_name=type(layer.impl).__name__)

        def update(layer: Any, key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
            write(layer, key, value, cache, slots)
            self._take(index, key, value)

        layer.impl.do_kv_cache_update = update

    def _take(self, index: int, key_NGD: Tensor, value_NGD: Tensor) -> None:
        if index == 0:
            self._begin(key_NGD.shape[0])
        if self._holds:
            self._held[index] = key_NGD, value_NGD
            return
        # A pass may be padded beyond the step's tokens, never below.
        staged_NGK = self._layers[index][: key_NGD.shape[0]]
        count = staged_NGK.shape[0]
        torch.cat((key_NGD[:count], value_NGD[:count]), dim=-1, out=staged_NGK)

    def _begin(self, num_tokens: int) -> None:
        """The first layer of a step writes so many tokens, and so will all others."""
        self.pending = True
        self._holds = self._may_hold and num_tokens <= HELD_TOKENS
        self._held.clear()

    def read(self, tokens_N: Tensor | slice, all_gather: AllGather) -> Tensor:
        """Keys and values of some of the step's tokens as a drafter's encoder reads them.

        Returns:
            (N, L, K); with a slice, and one rank, it may be a view of the buffer.
        """
        own_NLGK = self._joined(tokens_N) if self._holds else self.staged_NLGK[tokens_N]
        return self.share.join(own_NLGK, all_gather).flatten(2)

    def _joined(self, tokens_N: Tensor | slice) -> Tensor:
        """Of what is held, these tokens as they would be staged."""
        halves = zip(*(self._held[index] for index in range(len(self))), strict=True)
        return torch.cat([torch.stack(half, dim=1)[tokens_N] for half in halves], dim=-1)


def require_capturable(layers: Sequence[Any], num_layers: int) -> None:
    """Refuse a target whose layers do not all write keys and values of their own.

    Raises:
        ServingError: says which layers or how many.
    """
    if len(layers) != num_layers:
        raise ServingError(
            f"vLLM runs {len(layers)} attention layers for a target of {num_layers} layers; a "
            "drafter reads the keys and values of every layer."
        )
    for layer in layers:
        if layer.kv_sharing_target_layer_name is not None:
            raise ServingError(
                f"{layer.layer_name} shares the keys and values of another layer; a drafter reads "
                "those of every layer."
            )
        if layer.attn_backend.forward_includes_kv_cache_update:
            raise ServingError(
                f"vLLM's attention backend {layer.attn_backend.get_name()} stores keys inside its "
                "attention, where they cannot be read. Choose another --attention-backend."
            )


def verified_index(starts: Sequence[int], verified_R: Sequence[int]) -> slice | list[int]:
    """Which of a step's tokens are verified.

    Args:
        starts: index of each request's first token among the step's, and after the last one's last.
        verified_R: how many of each request's, from the first on, are verified; or more.

    Returns:
        Their indices in order; a slice where they are neighbours.
    """
    index = list[int]()
    for start, stop, verified in zip(starts, starts[1:], verified_R, strict=False):
        index.extend(range(start, min(stop, start + verified)))
    if index and index[-1] - index[0] >= len(index):
        return index
    return slice(index[0], index[-1] + 1) if index else slice(0)
