"""Keys and values read back from caches of several layouts, and the heads of ranks joined."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from block_drafts import layer_features
from moaspec_core.errors import ServingError
from moaspec_vllm.paged_drafter.cache_reader import (
    CacheReader,
    HeadShare,
    require_kept,
    require_readable,
)

HEADS, DIM, LAYERS, TOKENS = 4, 6, 3, 5
BLOCKS, SIZE = 7, 16
SLOTS = torch.tensor([0, 17, 40, 41, BLOCKS * SIZE - 1])
"""Cache slots of `TOKENS` tokens, in several blocks."""

Write = Callable[[Tensor, Tensor, Tensor, Tensor], None]


def plain(key_ND: Tensor, value_ND: Tensor, cache: Tensor, slots_N: Tensor) -> None:
    """Keys beside values, as FlashAttention's and most others."""
    for key, value, slot in zip(key_ND, value_ND, slots_N.tolist(), strict=True):
        cache[slot // SIZE, :, slot % SIZE] = torch.cat((key, value), dim=-1)


def transposed(key_ND: Tensor, value_ND: Tensor, cache: Tensor, slots_N: Tensor) -> None:
    """Keys of a block in columns before its values in rows, as on CPUs."""
    for key, value, slot in zip(key_ND, value_ND, slots_N.tolist(), strict=True):
        halves = cache[slot // SIZE].view(-1, 2, SIZE * DIM)
        halves[:, 0].view(-1, DIM, SIZE)[..., slot % SIZE] = key
        halves[:, 1].view(-1, SIZE, DIM)[:, slot % SIZE] = value


def rounded(key_ND: Tensor, value_ND: Tensor, cache: Tensor, slots_N: Tensor) -> None:
    """A quantised cache: not all numbers come back."""
    plain(key_ND // 4 * 4, value_ND, cache, slots_N)


class Layer:
    """What is read of a layer of vLLM."""

    kv_sharing_target_layer_name: str | None = None
    attn_backend = SimpleNamespace(
        forward_includes_kv_cache_update=False, get_name=lambda: "SOME_ATTN"
    )

    def __init__(self, cache: Tensor, write: Write = plain, name: str = "layers.0.attn") -> None:
        self.layer_name, self.head_size, self.impl = name, DIM, self
        self.kv_cache, self._write = cache, write

    def do_kv_cache_update(self, _: Any, key: Tensor, value: Tensor, *rest: Tensor) -> None:
        self._write(key, value, *rest)


def caches(*order: int, heads: int = HEADS, dtype: torch.dtype = torch.float32) -> Tensor:
    """Caches of all layers, (L, B, H, N, C), whose axes lie in memory in another order."""
    shape = (LAYERS, BLOCKS, heads, SIZE, 2 * DIM)
    return torch.empty_permuted(shape, order or (0, 1, 2, 3, 4), dtype=dtype).zero_()


def states(seed: int, *, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Keys and values of all layers and heads, (L, T, H, D) each."""
    generator = torch.Generator().manual_seed(seed)
    shape = (LAYERS, TOKENS, HEADS, DIM)
    key, value = (torch.randn(shape, generator=generator) for _ in range(2))
    return key.to(dtype), value.to(dtype)


def gather_of(parts: list[Tensor]) -> Any:
    return lambda _, axis: torch.cat(parts, dim=axis)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("write", "order"),
    [
        (plain, (0, 1, 2, 3, 4)),
        (plain, (1, 0, 2, 3, 4)),  # layers within blocks
        (plain, (0, 1, 3, 2, 4)),  # a slot's heads side by side
        (transposed, (0, 1, 2, 3, 4)),
        (transposed, (1, 0, 2, 3, 4)),
    ],
)
def test_what_a_backend_wrote_is_read(
    write: Write, order: tuple[int, ...], dtype: torch.dtype
) -> None:
    layers = [Layer(cache, write) for cache in caches(*order, dtype=dtype)]
    key_LTHD, value_LTHD = states(0, dtype=dtype)
    for layer, key, value in zip(layers, key_LTHD, value_LTHD, strict=True):
        write(key, value, layer.kv_cache, SLOTS)
    reader = CacheReader(layers, HeadShare(total=HEADS, ranks=1))
    expected = layer_features(
        key_LTHD.permute(0, 2, 1, 3)[:, None], value_LTHD.permute(0, 2, 1, 3)[:, None]
    )
    assert torch.equal(reader.read(SLOTS, gather_of([])), expected[0])
    chosen = torch.tensor([3, 0])
    assert torch.equal(reader.read(SLOTS[chosen], gather_of([])), expected[0, chosen])


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_ranks_join_to_what_the_encoder_reads(ranks: int) -> None:
    key_LTHD, value_LTHD = states(0)
    share = HeadShare(total=HEADS, ranks=ranks)
    readers = []
    for rank in range(ranks):
        first = rank * HEADS // ranks
        own = slice(first, first + share.own)
        layers = [Layer(cache) for cache in caches(heads=share.own)]
        for layer, key, value in zip(layers, key_LTHD, value_LTHD, strict=True):
            plain(key[:, own], value[:, own], layer.kv_cache, SLOTS)
        readers.append(CacheReader(layers, share))
    gather = gather_of([one.read_own(SLOTS) for one in readers])
    expected = layer_features(
        key_LTHD.permute(0, 2, 1, 3)[:, None], value_LTHD.permute(0, 2, 1, 3)[:, None]
    )
    for reader in readers:
        assert torch.equal(reader.read(SLOTS, gather), expected[0])


def test_reading_leaves_caches_as_they_are() -> None:
    layers = [Layer(cache) for cache in caches()]
    CacheReader(layers, HeadShare(total=HEADS, ranks=1)).read(SLOTS, gather_of([]))
    assert not any(layer.kv_cache.any() for layer in layers)


def nothing(*_: Tensor) -> None:
    """A backend that stores keys elsewhere."""


def everywhere(key_ND: Tensor, value_ND: Tensor, cache: Tensor, slots_N: Tensor) -> None:
    plain(key_ND, value_ND, cache, slots_N)
    cache[2] = 1.0


@pytest.mark.parametrize("write", [rounded, nothing, everywhere])
def test_a_cache_that_does_not_hold_what_was_written_is_refused(write: Write) -> None:
    with pytest.raises(ServingError, match="SOME_ATTN stores keys and values in a form"):
        CacheReader([Layer(caches()[0], write)], HeadShare(total=HEADS, ranks=1))


def test_uneven_heads_are_refused() -> None:
    with pytest.raises(ServingError, match="3 key-value heads cannot be spread over 2 ranks"):
        HeadShare(total=3, ranks=2)


def test_layers_that_cannot_be_read_are_refused() -> None:
    cache = caches()[0]
    sharing, fused = Layer(cache, name="model.layers.1.attn"), Layer(cache)
    sharing.kv_sharing_target_layer_name = "model.layers.0.attn"
    fused.attn_backend = SimpleNamespace(
        forward_includes_kv_cache_update=True, get_name=lambda: "FUSED"
    )
    planning = Layer(cache)
    planning.attn_backend = SimpleNamespace(
        forward_includes_kv_cache_update=False, get_name=lambda: "FLASHINFER"
    )
    without = Layer(cache)
    without.impl = SimpleNamespace()  # type: ignore[assignment]
    require_readable([Layer(cache), Layer(cache)], 2)
    with pytest.raises(ServingError, match="1 attention layers for a target of 2"):
        require_readable([Layer(cache)], 2)
    with pytest.raises(ServingError, match=r"layers\.1\.attn shares"):
        require_readable([Layer(cache), sharing], 2)
    with pytest.raises(ServingError, match="FUSED"):
        require_readable([fused], 1)
    with pytest.raises(ServingError, match="FLASHINFER plans one batch at a time"):
        require_readable([planning], 1)
    with pytest.raises(ServingError, match="do_kv_cache_update"):
        require_readable([without], 1)


class FullAttentionSpec:
    """Named as vLLM's."""


class SlidingWindowSpec:
    """Named as vLLM's."""


def test_targets_whose_old_keys_are_freed_are_refused() -> None:
    layers = [Layer(caches()[0], name=name) for name in ("a", "b")]

    def runner(*tables: tuple[int, str, type]) -> Any:
        groups = [
            SimpleNamespace(layer_names=[name], kv_cache_group_id=table, kv_cache_spec=kind())
            for table, name, kind in tables
        ]
        return SimpleNamespace(attn_groups=[groups])

    full, sliding = FullAttentionSpec, SlidingWindowSpec
    require_kept(runner((0, "a", full), (0, "b", full), (1, "drafter", full)), layers)
    for tables in ([(0, "a", full), (1, "b", full)], [(0, "a", full), (0, "b", sliding)]):
        with pytest.raises(ServingError, match="--disable-hybrid-kv-cache-manager"):
            require_kept(runner(*tables), layers)
