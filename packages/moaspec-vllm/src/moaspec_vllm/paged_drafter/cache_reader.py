"""The target's keys and values, read back from vLLM's paged cache.

Each attention backend orders the elements of a block in its own way, the one for CPUs by
instruction set. At start the order is found out: numbered keys and values are written by the
backend itself, and the memory is searched for the numbers.

Legend: N tokens, L target layers, H all KV heads, G KV heads of this rank, D head dim, O slots of a
block, X = 2 * G * D, K = 2 * H * D.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moaspec_core.errors import ServingError
from moaspec_vllm.hooks import require

BLOCKS, BLOCK_SLOTS = 0, 2  # axes of vLLM's view of a layer's cache
PLANNING_BACKENDS = ("FLASHINFER",)  # one plan for all layers of a group; the latest applies
DIGITS = 128  # Numbers are written as digits of this base plus one: exact in bf16, and never 0.

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


class CacheReader:
    """Reads the keys and values of tokens from the caches of all target layers.

    Args:
        layers: vLLM's attention layers of the target, in order, with allocated caches. All have
            one layout: blocks, heads, slots, and keys and values in logical order.
        share: distribution of the heads over ranks.

    Raises:
        ServingError: blocks do not hold each key and value unchanged in one place.
    """

    def __init__(self, layers: Sequence[Any], share: HeadShare) -> None:
        first = layers[0].kv_cache
        self._caches = [_elements(layer.kv_cache) for layer in layers]
        self._share, self._block_size = share, first.shape[BLOCK_SLOTS]
        self._block_stride = first.stride(BLOCKS)
        places_OGK = _places(layers[0], share.own)
        self._places_OX, self._shape = places_OGK.flatten(1), places_OGK.shape[1:]
        self._gather = self._take if first.device.type == "cpu" else self._kernel()

    @property
    def device(self) -> torch.device:
        return self._places_OX.device

    def read(self, slots_N: Tensor, all_gather: AllGather) -> Tensor:
        """Keys and values at cache slots, in the layout of a drafter's encoder: (N, L, K)."""
        return self._share.join(self.read_own(slots_N), all_gather).flatten(2)

    def read_own(self, slots_N: Tensor) -> Tensor:
        """Keys and values of this rank's heads at cache slots, int64: (N, L, G, 2 D)."""
        return self._gather(slots_N).unflatten(2, self._shape)

    def _take(self, slots_N: Tensor) -> Tensor:
        """Read layer by layer, (N, L, X); on a CPU an operation starts at once."""
        block_N = slots_N // self._block_size
        index_NX = self._places_OX[slots_N - block_N * self._block_size]
        index_NX = index_NX + (block_N * self._block_stride)[:, None]
        parts = [cache.take(index_NX) for cache in self._caches]
        return torch.stack(parts, dim=1)

    def _kernel(self) -> Callable[[Tensor], Tensor]:
        """Return what reads all layers in one launch on a GPU."""
        from moaspec_vllm.paged_drafter.gather_kernel import gather

        first = self._caches[0]
        distances = [cache.data_ptr() - first.data_ptr() for cache in self._caches]
        offsets_L = torch.tensor(distances, device=first.device) // first.element_size()
        places_OX = self._places_OX.int()
        return lambda slots_N: gather(first, offsets_L, slots_N, places_OX, self._block_stride)


def _elements(cache: Tensor) -> Tensor:
    """A flat view of the memory from a cache's first element to its last."""
    steps = zip(cache.shape, cache.stride(), strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in steps)
    return cache.as_strided((span,), (1,))


def _places(layer: Any, num_heads: int) -> Tensor:
    """Where block 0 of the layer's cache holds each slot's keys and values, (O, G, 2 D) int64."""
    cache = layer.kv_cache
    number_OGK = torch.arange(cache.shape[BLOCK_SLOTS] * num_heads * 2 * layer.head_size)
    number_OGK = number_OGK.reshape(-1, num_heads, 2 * layer.head_size)
    before, found, after = _read_back(layer, number_OGK)
    numbers = found[found >= 0]
    in_order = numbers.argsort()
    if (
        (before >= 0).any()
        or (after >= 0).any()
        or not torch.equal(numbers[in_order], number_OGK.flatten())
    ):
        raise ServingError(
            f"vLLM's attention backend {layer.attn_backend.get_name()} stores keys and values in a "
            "form that cannot be read back, and a drafter reads them. Choose another "
            "--attention-backend."
        )
    place = torch.zeros(found.shape, dtype=torch.int64)
    for axis, (size, stride) in enumerate(zip(found.shape, cache.stride()[1:], strict=True)):
        steps = torch.arange(size) * stride
        place += steps.reshape([-1 if axis == other else 1 for other in range(found.ndim)])
    return place[found >= 0][in_order].reshape(number_OGK.shape).to(cache.device)


def _read_back(layer: Any, number_OGK: Tensor) -> Tensor:
    """Three blocks of the layer's layout after numbers were written to the middle one.

    Returns:
        (3, ...) int64: the numbers where the backend has put them, -1 elsewhere.
    """
    cache = layer.kv_cache
    shape = (3, *cache.shape[1:])
    order = sorted(range(cache.ndim), key=cache.stride, reverse=True)
    written = torch.empty_permuted(shape, order, dtype=cache.dtype, device=cache.device).zero_()
    slots_O = torch.arange(len(number_OGK), 2 * len(number_OGK), device=cache.device)
    found, power = torch.zeros(shape, dtype=torch.int64), 1
    while power < number_OGK.numel():
        digits_OGK = (number_OGK // power % DIGITS + 1).to(cache)
        key_OGD, value_OGD = (half.contiguous() for half in digits_OGK.chunk(2, dim=-1))
        layer.impl.do_kv_cache_update(layer, key_OGD, value_OGD, written, slots_O)
        digits = written.to("cpu", torch.float64).round().long() - 1
        found = torch.where(digits < 0, -1, found + digits * power)
        power *= DIGITS
    return found


def require_readable(layers: Sequence[Any], num_layers: int) -> None:
    """ServingError for a target with a layer that does not store keys and values of its own."""
    if len(layers) != num_layers:
        raise ServingError(
            f"vLLM runs {len(layers)} attention layers for a target of {num_layers} layers; a "
            "drafter reads the keys and values of every layer. Use `moaspec serve`."
        )
    for layer in layers:
        if layer.kv_sharing_target_layer_name is not None:
            raise ServingError(
                f"{layer.layer_name} shares the keys and values of another layer; a drafter reads "
                "those of every layer. Use `moaspec serve`."
            )
        if layer.attn_backend.forward_includes_kv_cache_update:
            raise ServingError(
                f"vLLM's attention backend {layer.attn_backend.get_name()} stores keys inside its "
                "attention, so the drafter's cannot be stored. Choose another --attention-backend."
            )
        if layer.attn_backend.get_name() in PLANNING_BACKENDS:
            raise ServingError(
                f"vLLM's attention backend {layer.attn_backend.get_name()} plans one batch at a "
                "time, and the drafter's two attentions of a step need two: add "
                "--attention-backend FLASH_ATTN or TRITON_ATTN."
            )
        require(layer.impl, "do_kv_cache_update")


def require_kept(runner: Any, layers: Sequence[Any]) -> None:
    """ServingError where vLLM frees the blocks of earlier tokens, or keeps them in several tables.

    Args:
        runner: vLLM's model runner, its caches allocated.
        layers: its attention layers of the target.
    """
    names = {layer.layer_name for layer in layers}
    groups = [
        group
        for groups in runner.attn_groups
        for group in groups
        if names.intersection(group.layer_names)
    ]
    tables = {group.kv_cache_group_id for group in groups}
    if len(tables) > 1 or any(not _keeps_all(group.kv_cache_spec) for group in groups):
        raise ServingError(
            "vLLM frees keys and values of tokens outside a layer's window, and a drafter reads "
            "those of all tokens: add --disable-hybrid-kv-cache-manager."
        )


def _keeps_all(spec: Any) -> bool:
    return any(kind.__name__ == "FullAttentionSpec" for kind in type(spec).__mro__)
