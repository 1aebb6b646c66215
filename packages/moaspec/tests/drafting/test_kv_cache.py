"""The engine's key and value cache, and the masks over it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from moaspec.drafting.kv_cache import (
    SLOT_BUCKET,
    KVCache,
    PassSizes,
    StoredMemory,
    prefix_mask,
    tree_mask,
)
from moaspec.drafting.reserved_memory import ReservedMemory
from moaspec.model.layers import masked_attention

LAYERS, HEADS, DIM = 2, 3, 4
CPU = torch.device("cpu")
TARGET = SimpleNamespace(
    num_layers=LAYERS,
    num_kv_heads=HEADS,
    head_dim=DIM,
    dtype=torch.float32,
    device=CPU,
    max_positions=4096,
)


def empty_cache(rows: int = 0, slots: int = 0) -> KVCache:
    cache = KVCache(TARGET)
    cache.reserve(rows, slots)
    return cache


def some_kv(batch: int, tokens: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    key, value = torch.randn(2, batch, HEADS, tokens, DIM, generator=generator)
    return key, value


def read(cache: KVCache, row: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Keys and values of these slots, (L, H, T, D) each."""
    both_TLH2D = cache.features(row, start, stop)[0].unflatten(2, (-1, 2, DIM))
    key_LHTD, value_LHTD = both_TLH2D.permute(3, 1, 2, 0, 4)
    return key_LHTD, value_LHTD


@pytest.fixture(params=["reserved", "copied"])
def memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Caches as on Linux, and as where the system reserves no memory."""
    if request.param == "copied":
        monkeypatch.setattr(ReservedMemory, "reserve", lambda *_: None)
    elif ReservedMemory.reserve(1 << 20, 1) is None:
        pytest.skip("this system reserves no memory")
    return str(request.param)


def test_capacity_grows_in_buckets_and_keeps_what_is_stored(memory: str) -> None:
    cache = empty_cache()
    assert cache.num_bytes == 0
    cache.reserve(2, 3)
    assert cache.data.shape[2:5:2] == (2, SLOT_BUCKET)
    key, value = some_kv(LAYERS, 3)
    cache.append(1, 0, key, value)
    before = cache.data.data_ptr()
    cache.reserve(5, SLOT_BUCKET + 1)
    assert cache.data.shape[2:5:2] == (5, 2 * SLOT_BUCKET)
    assert (cache.data.data_ptr() == before) == (memory == "reserved")
    got_key, got_value = read(cache, 1, 0, 3)
    assert_close(got_key, key, rtol=0, atol=0)
    assert_close(got_value, value, rtol=0, atol=0)
    shape = cache.data.shape
    cache.reserve(1, 1)
    assert cache.data.shape == shape


def resident_bytes(cache: KVCache) -> int:
    """Of the memory that a cache has reserved."""
    address, inside = cache.data.data_ptr(), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, value, *_ = line.split()
        if "-" in name:
            start, stop = (int(bound, 16) for bound in name.split("-"))
            inside = start <= address < stop
        elif inside and name == "Rss:":
            return int(value) * 1024
    raise AssertionError("the cache has no memory of its own")


def test_memory_follows_use(memory: str) -> None:
    """Row by row; what is given back reads as zeros, and the rest stays."""
    if memory == "copied":
        pytest.skip("its memory is the rectangle of rows and slots")
    slots, target = 60_000, SimpleNamespace(**{**vars(TARGET), "max_positions": 100_000})
    cache = KVCache(target)
    cache.reserve(40, slots)
    for row in (3, 30):
        key, value = some_kv(LAYERS, slots, seed=row)
        cache.append(row, 0, key, value)
    used = 2 * slots * cache.slot_bytes
    assert used <= cache.num_bytes <= 1.01 * used
    del key, value
    assert resident_bytes(cache) >= 0.9 * used
    cache.give_back(30, 1000)
    cache.give_back(3)
    assert 1000 * cache.slot_bytes <= cache.num_bytes <= 2000 * cache.slot_bytes
    assert resident_bytes(cache) <= 0.5 * used
    assert_close(read(cache, 30, 0, 1000), some_kv_start(slots, 1000, 30), rtol=0, atol=0)
    assert not read(cache, 3, 0, slots)[0].any()
    cache.append(3, 0, *some_kv(LAYERS, 9))
    assert_close(read(cache, 3, 0, 9), some_kv(LAYERS, 9), rtol=0, atol=0)


def some_kv_start(tokens: int, shown: int, seed: int) -> tuple[Tensor, Tensor]:
    key, value = some_kv(LAYERS, tokens, seed)
    return key[:, :, :shown], value[:, :, :shown]


def test_rows_beyond_the_address_space_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moaspec.drafting.kv_cache.MAX_ROWS", 2)
    cache = empty_cache(2, 4)
    key, value = some_kv(LAYERS, 3)
    cache.append(1, 0, key, value)
    cache.reserve(3, 4)
    assert_close(read(cache, 1, 0, 3), (key, value), rtol=0, atol=0)
    cache.append(2, 0, key, value)
    cache.give_back(1)
    assert_close(read(cache, 2, 0, 3), (key, value), rtol=0, atol=0)


def test_what_grew_inside_inference_mode_is_written_outside() -> None:
    """A device drafts beyond the capacity, and takes in what the server sends after that."""
    with torch.inference_mode():
        cache = empty_cache()
        cache.reserve(1, 2)
    key, value = some_kv(LAYERS, 2)
    cache.append(0, 0, key, value)
    assert_close(read(cache, 0, 0, 2), (key, value))
    with torch.inference_mode():
        cache.release()
    cache.reserve(1, 2)
    cache.append(0, 0, key, value)


def test_more_rows_alone_keep_the_slots() -> None:
    cache = empty_cache(1, 10)
    key, value = some_kv(LAYERS, 10)
    cache.append(0, 0, key, value)
    cache.reserve(3, 5)
    assert_close(read(cache, 0, 0, 10)[0], key, rtol=0, atol=0)


def test_release_gives_all_memory_back() -> None:
    cache = empty_cache(2, 20)
    cache.release()
    assert cache.num_bytes == 0
    cache.append(0, 0, *some_kv(LAYERS, 1))
    assert cache.num_bytes > 0


@pytest.mark.parametrize(
    ("rows", "starts"), [([0], [4]), ([2], [1]), ([0, 1], [3, 0]), ([3, 1], [0, 5])]
)
def test_writer_stores_and_hands_back(rows: list[int], starts: list[int]) -> None:
    cache = empty_cache(4, 16)
    expected = torch.zeros(2, LAYERS, 4, HEADS, 10, DIM)
    for row in range(4):
        key, value = some_kv(LAYERS, 10, seed=row)
        cache.append(row, 0, key, value)
        expected[:, :, row] = torch.stack((key, value))
    write = cache.writer(rows, starts, num_tokens=2, visible=9)
    for layer in range(LAYERS):
        new = some_kv(len(rows), 2, seed=10 + layer)
        got = write(layer, *new)
        for part in range(2):
            for i, (row, start) in enumerate(zip(rows, starts, strict=True)):
                expected[part, layer, row, :, start : start + 2] = new[part][i]
            assert_close(got[part], expected[part, layer, rows, :, :9], rtol=0, atol=0)
    for row in range(4):
        assert_close(read(cache, row, 0, 10)[0], expected[0, :, row], rtol=0, atol=0)
        assert_close(read(cache, row, 0, 10)[1], expected[1, :, row], rtol=0, atol=0)


def test_read_of_a_stretch() -> None:
    cache = empty_cache(1, 8)
    key, value = some_kv(LAYERS, 6)
    cache.append(0, 2, key, value)
    got_key, got_value = read(cache, 0, 3, 5)
    assert_close(got_key, key[:, :, 1:3], rtol=0, atol=0)
    assert_close(got_value, value[:, :, 1:3], rtol=0, atol=0)


@pytest.mark.parametrize("slots", [[4, 5, 6], [5, 7, 9], [4, 9], [9], []])
def test_commit_moves_kept_slots_together(slots: list[int]) -> None:
    cache = empty_cache(2, 12)
    for row in range(2):
        cache.append(row, 0, *some_kv(LAYERS, 12, seed=row))
    before = [read(cache, row, 0, 12)[0].clone() for row in range(2)]
    cache.commit(1, 4, slots)
    after = read(cache, 1, 0, 4 + len(slots))[0]
    assert_close(after, before[1][:, :, [0, 1, 2, 3, *slots]], rtol=0, atol=0)
    assert_close(read(cache, 0, 0, 12)[0], before[0], rtol=0, atol=0)


@pytest.mark.parametrize("rows", [[0, 1], [2, 0]])
def test_stored_memory(rows: list[int]) -> None:
    """Cross-attention is over the keys and values of these rows."""
    cache = KVCache(SimpleNamespace(**vars(TARGET) | {"num_layers": 1}))
    cache.reserve(3, 8)
    for row in range(3):
        cache.append(row, 0, *some_kv(1, 8, seed=row))
    query = torch.randn(2, HEADS, 2, DIM)
    mask = prefix_mask([5, 3], 5, CPU)
    key, value = (torch.cat([read(cache, row, 0, 5)[part] for row in rows]) for part in range(2))
    expected = masked_attention(query, key, value, mask)
    assert_close(StoredMemory(cache, rows, mask)(query), expected, rtol=0, atol=0)


def test_prefix_mask() -> None:
    mask = prefix_mask([0, 2, 3], 3, CPU)
    assert mask.shape == (3, 1, 1, 3)
    assert mask[:, 0, 0].int().tolist() == [[0, 0, 0], [1, 1, 0], [1, 1, 1]]


def test_tree_mask() -> None:
    own = torch.tensor([[[1, 0], [1, 1]], [[1, 0], [0, 1]]], dtype=torch.bool)
    mask = tree_mask([1, 3], own, visible=6)
    assert mask.shape == (2, 1, 2, 6)
    assert mask[:, 0].int().tolist() == [
        [[1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0]],
        [[1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 1, 0]],
    ]


@pytest.mark.parametrize("rows", [[0], [2], [0, 1], [1, 2], [2, 0], [0, 2]])
def test_neighbouring_rows_are_read_without_copies(rows: list[int]) -> None:
    cache = empty_cache(3, 6)
    key, value = some_kv(len(rows), 2)
    starts = [3 + row for row in rows]
    write = cache.writer(rows, starts, 2, 6 if max(rows) < 2 else 7)
    got_key, got_value = write(1, key, value)
    for i, (row, start) in enumerate(zip(rows, starts, strict=True)):
        assert_close(got_key[i, :, start : start + 2], key[i], rtol=0, atol=0)
        assert_close(got_value[i, :, start : start + 2], value[i], rtol=0, atol=0)
        assert_close(read(cache, row, start, start + 2)[0][1], key[i], rtol=0, atol=0)
    neighbours = rows == list(range(rows[0], rows[0] + len(rows)))
    assert (got_key._base is not None) is neighbours


@pytest.mark.parametrize(
    ("rows", "starts", "longest", "expected"),
    [
        ([0], [0], 1, PassSizes(1, SLOT_BUCKET, steady=True)),
        ([0], [254], 2, PassSizes(2, SLOT_BUCKET, steady=True)),
        ([0], [254], 3, PassSizes(4, 2 * SLOT_BUCKET, steady=True)),
        ([4, 1], [10, 300], 5, PassSizes(8, 2 * SLOT_BUCKET, steady=True)),
        ([0], [0], 64, PassSizes(64, SLOT_BUCKET, steady=True)),
        ([0], [7], 65, PassSizes(65, 72, steady=False)),
        ([1, 1], [0, 16], 16, PassSizes(16, 32, steady=False)),
    ],
)
def test_sizes_of_recorded_passes_are_few(
    rows: list[int], starts: list[int], longest: int, expected: PassSizes
) -> None:
    assert PassSizes.of(rows, starts, longest, recorded=True) == expected
    plain = PassSizes(longest, max(starts) + longest, steady=False)
    assert PassSizes.of(rows, starts, longest, recorded=False) == plain
