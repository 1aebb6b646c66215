"""LM heads beside embeddings that share a weight, and their rows for drafts."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

from bits import needs_kernels, needs_packing
from moaspec.backends import linear_backends
from moaspec.backends.fast_heads import FastLMHead, draft_rows, map_into_memory
from moaspec.backends.pack import PackedLinear
from moaspec.target.decoder_layers import LMHead

pytestmark = pytest.mark.kernels


@needs_packing
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_tied_head_is_packed_and_its_rows_are_read_from_a_file(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_backends, "_mkl_copies_weights", lambda: True)
    head, embedding = nn.Linear(32, 50, dtype=dtype), nn.Embedding(50, 32, dtype=dtype)
    head.requires_grad_(requires_grad=False)
    embedding.weight = head.weight
    before, x, ids = head.weight.clone(), torch.randn(3, 32, dtype=dtype), torch.tensor([[49, 0]])
    expected = head(x).float()
    monkeypatch.setattr("moaspec.backends.fast_heads.cache_dir", lambda: tmp_path / "new")
    fast = FastLMHead(LMHead(head, cap=None))
    torch.testing.assert_close(fast.select(None)(x), expected, atol=2e-2, rtol=0)
    assert torch.equal(head.weight, before)
    rows = fast.select(ids[0])
    assert torch.equal(rows(x), nn.functional.linear(x, before[ids[0]], head.bias[ids[0]]))
    assert torch.equal(embedding(ids), before[ids])
    assert list(tmp_path.iterdir()) == [tmp_path / "new"]
    assert not list((tmp_path / "new").iterdir())


def test_without_room_for_a_file_a_table_stays_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    table = torch.randn(4, 3)
    before, place = table.clone(), table.data_ptr()
    map_into_memory(table, tmp_path / "file" / "below")
    assert table.data_ptr() == place
    map_into_memory(table, tmp_path)
    assert table.data_ptr() != place
    assert torch.equal(table, before)


def test_memory_of_rows_that_were_read_is_given_back(tmp_path: Path) -> None:
    table = torch.randn(1 << 22)
    before = table.clone()
    forget = map_into_memory(table, tmp_path)
    total = float(table.sum())
    read = psutil.Process().memory_info().rss
    forget()
    assert psutil.Process().memory_info().rss < read - table.nbytes // 2
    assert float(table.sum()) == total
    assert torch.equal(table, before)


@needs_kernels
def test_rows_for_drafts_are_rounded_only_where_it_is_known_what_they_are_multiplied_with() -> None:
    torch.manual_seed(0)
    rows = nn.Linear(64, 48, bias=False).bfloat16().requires_grad_(requires_grad=False)
    states = torch.randn(512, 6) @ torch.randn(6, 64) + 0.1 * torch.randn(512, 64)
    exact, few = draft_rows(rows, None), draft_rows(rows, states.T @ states / len(states))
    assert isinstance(exact, PackedLinear)
    assert isinstance(few, PackedLinear)
    assert exact.matrix is not None
    assert few.matrix is not None
    assert (exact.matrix.bits, few.matrix.bits) == (16, 4)
    expected = exact.single(states.bfloat16())
    torch.testing.assert_close(expected, rows(states.bfloat16()).float(), atol=0.05, rtol=0.02)
    error = (few.single(states.bfloat16()) - expected).square().mean() / expected.square().mean()
    assert error < 0.001
    single = nn.Linear(64, 48).requires_grad_(requires_grad=False)
    whole = draft_rows(single, torch.eye(64)).state_dict()["weight"]
    assert torch.equal(whole, single.weight)
