"""Capture of the target's keys and values while vLLM writes them into its cache.

They are read after rotary embedding and before vLLM lays them out, so capture works with every
attention backend that stores keys in a separate step. Each tensor-parallel rank captures its heads.

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

MAX_HELD_TOKENS = 256
"""Longest step whose tensors are referenced, not copied. The queries share their memory."""

AllGather = Callable[[Tensor, int], Tensor]
"""(this rank's part, axis) -> the parts of all ranks, concatenated in order of rank."""


@dataclass(frozen=True, kw_only=True)
class HeadShare:
    """Distribution of a target's KV heads over tensor-parallel ranks.

    With more ranks than heads, neighbouring ranks hold the same head.
    """

    total: int  # H
    ranks: int  # tensor-parallel size

    def __post_init__(self) -> None:
        if max(self.total, self.ranks) % min(self.total, self.ranks):
            raise ServingError(
                f"{self.total} key-value heads cannot be spread over {self.ranks} ranks evenly. "
                "Choose a --tensor-parallel-size that divides them or is a multiple of them."
            )

    @property
    def own(self) -> int:
        """KV heads of this rank, G."""
        return max(1, self.total // self.ranks)

    def join(self, own_NLGK: Tensor, all_gather: AllGather) -> Tensor:
        """Gather all heads in order, each one time: (N, L, H, 2 D)."""
        if self.ranks == 1:
            return own_NLGK
        gathered = all_gather(own_NLGK, 2)
        return gathered[:, :, :: max(1, self.ranks // self.total)]


class VLLMCapture:
    """The keys and values that all layers wrote in the current step.

    Args:
        layers: vLLM's attention layers of the target, in order.
        max_tokens: maximum number of tokens of a step.
        share: distribution of the heads over ranks.
        like: a tensor of the target's dtype on its device.
        may_hold: reference the tensors of short steps instead of copying them, at a twentieth of
            the time. Only valid in eager mode: graphs and compiled code reuse their memory.
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
        return self.staged_NLGK.device

    def __len__(self) -> int:
        """Number of target layers, L."""
        return int(self.staged_NLGK.shape[1])

    def _attach(self, index: int, layer: Any) -> None:
        write = require(layer.impl, "do_kv_cache_update")

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
        # vLLM may pad a pass beyond the step's tokens.
        staged_NGK = self._layers[index][: key_NGD.shape[0]]
        count = staged_NGK.shape[0]
        torch.cat((key_NGD[:count], value_NGD[:count]), dim=-1, out=staged_NGK)

    def _begin(self, num_tokens: int) -> None:
        """Start a step: every layer will write this number of tokens."""
        self.pending = True
        self._holds = self._may_hold and num_tokens <= MAX_HELD_TOKENS
        self._held.clear()

    def read(self, tokens_N: Tensor | slice, all_gather: AllGather) -> Tensor:
        """Keys and values of some of the step's tokens, in the layout of a drafter's encoder.

        Returns:
            (N, L, K). With a slice and one rank it may be a view of the buffer.
        """
        own_NLGK = self._stacked(tokens_N) if self._holds else self.staged_NLGK[tokens_N]
        return self.share.join(own_NLGK, all_gather).flatten(2)

    def _stacked(self, tokens_N: Tensor | slice) -> Tensor:
        """The referenced keys and values of these tokens, in the layout of the buffer."""
        halves = zip(*(self._held[index] for index in range(len(self))), strict=True)
        return torch.cat([torch.stack(half, dim=1)[tokens_N] for half in halves], dim=-1)


def require_capturable(layers: Sequence[Any], num_layers: int) -> None:
    """ServingError for a target with a layer that does not write keys and values of its own."""
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
    """Indices of a step's verified tokens.

    Args:
        starts: start of each request's tokens in the step, then the total number of tokens.
        verified_R: number of verified tokens at each request's start; may exceed its tokens.

    Returns:
        The indices in order; a slice if they are contiguous.
    """
    index = list[int]()
    for start, stop, verified in zip(starts, starts[1:], verified_R, strict=False):
        index.extend(range(start, min(stop, start + verified)))
    if index and index[-1] - index[0] >= len(index):
        return index
    return slice(index[0], index[-1] + 1) if index else slice(0)
