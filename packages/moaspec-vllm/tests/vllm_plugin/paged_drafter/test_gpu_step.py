"""A step as a GPU sees it: FlashAttention's layout, devices, transfers and operations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vllm_batch import DEPTH, MOST, Batch, FakeReader

pytest.importorskip("vllm", reason="vLLM is not installed; `make test-vllm` installs it")
pytestmark = pytest.mark.filterwarnings("default")


@torch.inference_mode()
def test_drafts_over_flash_attentions_layout_are_the_drafters_own() -> None:
    """Prompts of several lengths, one in two chunks, then steps of one and several tokens."""
    batch = Batch()
    for layer in batch.layers:
        layer.kv_cache.copy_(torch.randn(layer.kv_cache.shape))
    drafts = batch.step([0, 0, 0], [40, 7, 20], [1, 1, 0])
    assert drafts == [batch.expected(0, 41), batch.expected(1, 8), []]
    drafts = batch.step([40, 7, 20], [1, 1, 13], [1, 1, 1])
    assert drafts == [batch.expected(row, length) for row, length in enumerate((42, 9, 34))]
    drafts = batch.step([41, 8, 33], [4, 2, 1], [4, 2, 1])
    assert drafts == [batch.expected(row, length) for row, length in enumerate((46, 11, 35))]


class Watched(TorchDispatchMode):
    """Counts operations, those between devices apart, and refuses mixed devices in all others.

    PyTorch itself lets an index lie on the host, and copies it in silence.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **kwargs or {})
        moves = func.overloadpacket.__name__ in ("to", "_to_copy", "copy_")
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        places = {one.device.type for one in (*tensors, *([found] if moves else []))}
        assert moves or len(places) < 2, f"{func} of tensors on {places}"
        self.counts["operations"] += 1
        self.counts["transfers"] += len(places) > 1
        return found


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    """Drafts that come back from the device are zeros."""
    from moaspec_vllm.paged_drafter import vllm_drafting

    def tolist(self: Tensor) -> Any:
        if self.device.type == "cpu":
            return plain(self)
        watched.counts["waits"] += 1
        return np.zeros(tuple(self.shape), int).tolist()

    plain, watched = Tensor.tolist, Watched()
    monkeypatch.setattr(vllm_drafting, "CacheReader", FakeReader)
    monkeypatch.setattr(Tensor, "tolist", tolist)
    with torch.inference_mode(), watched:
        yield watched


def made(backend: str, dtype: torch.dtype, scales: str) -> Any:
    """An attention layer as vLLM has made it."""
    return SimpleNamespace(
        layer_name="moa_spec.layers.3.self_attn.attn",
        attn_backend=SimpleNamespace(get_name=lambda: backend),
        kv_cache_torch_dtype=dtype,
        _k_scale=torch.ones((), device=scales),
        _v_scale=torch.ones((), device=scales),
    )


@pytest.mark.parametrize(
    "own",
    [
        made("TRITON_ATTN", torch.bfloat16, "meta"),
        made("FLASH_ATTN", torch.float32, "meta"),
        made("FLASH_ATTN", torch.bfloat16, "cpu"),
    ],
    ids=["backend", "dtype", "scales"],
)
def test_layers_that_vllm_made_unlike_the_targets_are_refused(own: Any) -> None:
    from moaspec_core.errors import ServingError
    from moaspec_vllm.paged_drafter.caches import _require_alike

    like = made("FLASH_ATTN", torch.bfloat16, "meta")
    _require_alike(like, like, torch.device("meta"))
    with pytest.raises(ServingError, match="vLLM made moa_spec"):
        _require_alike(own, like, torch.device("meta"))


@pytest.mark.parametrize("sizes", [{}, {"trained_positions": 16}, {"window": 24}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.usefixtures("gpu")
def test_a_step_runs_on_the_device_of_the_model(dtype: torch.dtype, sizes: dict[str, Any]) -> None:
    batch = Batch("meta", dtype, **sizes)
    drafts = batch.step([0, 0], [40, 30], [1, 0])
    assert [len(chain) for chain in drafts] == [DEPTH, 0]
    assert [len(chain) for chain in batch.step([40, 30], [1, 9], [1, 1])] == [DEPTH] * 2


def test_a_step_has_one_transfer_one_wait_and_no_operations_by_request(
    gpu: Watched,
) -> None:
    counts = []
    for number in (1, 4, MOST):
        batch = Batch("meta", torch.bfloat16)
        batch.step([0] * number, [40] * number, [1] * number)
        gpu.counts.clear()
        batch.step([40] * number, [1] * number, [1] * number)
        counts.append(gpu.counts.copy())
    for one in counts:
        assert one["transfers"] == 1
        assert one["waits"] == 1
    # Attention of few queries folds heads, and one token needs no copies: a tenth at most.
    numbers = [one["operations"] for one in counts]
    assert max(numbers) < 1.15 * min(numbers)


def test_steps_without_drafts_touch_no_device(gpu: Watched) -> None:
    batch = Batch("meta", torch.bfloat16)
    batch.proposer._depths = [0] * (MOST + 1)
    gpu.counts.clear()
    assert batch.step([0, 0], [40, 30], [1, 0]) == [[], []]
    assert not gpu.counts
