"""Recorded passes: what they compute, when they are made, and how decoding does without."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import moaspec
import tiny
from moaspec.backends import cuda_graphs
from moaspec.backends.cuda_graphs import PassGraphs
from moaspec.backends.fast_target import accelerate
from moaspec.calibration.measure_costs import fingerprint
from moaspec.calibration.round_parts import RoundParts
from moaspec.drafting.kv_cache import SLOT_BUCKET, KVCache, PassSizes, tree_mask
from moaspec.drafting.reserved_memory import ReservedMemory
from moaspec.engine.local_verifier import LocalVerifier
from moaspec.target.target import Target
from recorder import Recorder, recorders

TREE = moaspec.Tree(depth=3, breadth=2, total_tokens=5)


def recorded(target: Target) -> PassGraphs:
    graphs = tiny.fast_layers(target).graphs
    assert graphs is not None
    return graphs


def recording(family: str = "llama") -> tuple[Target, list[str]]:
    """A target of a test's own, as on a GPU, and what its recordings do."""
    target = tiny.fresh_target(family)
    accelerate(target)
    tiny.fast_layers(target).graphs, log = recorders()
    return target, log


@pytest.mark.parametrize("num_target_layers", [0, 1])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_texts_are_the_same(family: str, num_target_layers: int) -> None:
    target, log = recording(family)
    results = moaspec.generate(
        target,
        tiny.PROMPTS,
        drafter=tiny.random_drafter(target),
        max_new_tokens=tiny.NEW_TOKENS,
        tree=TREE,
        num_target_layers=num_target_layers,
    )
    assert [tuple(result.token_ids) for result in results] == list(tiny.own_texts(family))
    assert recorded(target).failure is None
    assert log.count("capture") < log.count("replay")


def test_rows_that_join_and_leave() -> None:
    """Rows of different lengths; those that are left are not neighbours."""
    target, log = recording()
    results = [
        moaspec.generate(target, tiny.PROMPTS, drafter=drafter, max_new_tokens=length, tree=TREE)
        for drafter in (None, tiny.agreeing_drafter("llama"))
        for length in (5, tiny.NEW_TOKENS)
    ]
    for texts in results:
        for result, own in zip(texts, tiny.own_texts("llama"), strict=True):
            assert tuple(result.token_ids) == own[: len(result.token_ids)]
    assert "replay" in log


def cache_of(target: Target) -> KVCache:
    cache = LocalVerifier(target).cache
    cache.reserve(4, 1)
    return cache


def run(
    target: Target, cache: KVCache, rows: Sequence[int], starts: Sequence[int], *, seed: int
) -> Tensor:
    """A pass over three tokens a row, rounded up where passes are recorded."""
    sizes = PassSizes.of(
        rows, starts, 3, recorded=getattr(target.layers, "graphs", None) is not None
    )
    generator = torch.Generator().manual_seed(seed)
    ids_BT = torch.zeros(len(rows), sizes.tokens, dtype=torch.long)
    ids_BT[:, :3] = torch.randint(tiny.VOCAB, (len(rows), 3), generator=generator)
    positions_BT = torch.tensor(starts)[:, None] + torch.arange(sizes.tokens)
    causal_BTT = torch.ones(len(rows), sizes.tokens, sizes.tokens, dtype=torch.bool).tril()
    with torch.inference_mode():
        return target.run(
            ids_BT,
            positions_BT,
            mask_B1TS=tree_mask(starts, causal_BTT, sizes.visible),
            write=cache.writer(rows, starts, sizes.tokens, sizes.visible, kind=sizes.kind),
        )[:, :3]


PASSES = (
    ((0,), (0,)),
    ((0,), (3,)),
    ((0,), (6,)),
    ((1,), (0,)),
    ((1, 3), (3, 0)),
    ((1, 3), (6, 3)),
    ((0, 2), (9, 0)),
    ((2, 0), (3, 12)),
    ((1, 2), (9, 6)),
)
"""Rows and starts: some again, other rows of one shape, neighbours and not, in either order."""


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3"])
def test_passes_compute_and_store_the_same(family: str) -> None:
    target, log = recording(family)
    plain = tiny.target(family)
    caches = cache_of(target), cache_of(plain)
    kept: list[tuple[Tensor, Tensor]] = []
    for seed, (rows, starts) in enumerate(PASSES):
        pair = [
            run(one, cache, rows, starts, seed=seed)
            for one, cache in zip((target, plain), caches, strict=True)
        ]
        kept.append((pair[0], pair[1]))
        for row, start in zip(rows, starts, strict=True):
            stored = [cache.features(row, 0, start + 3) for cache in caches]
            assert_close(stored[0], stored[1], **tiny.TOLERANCE)
    for found, expected in kept:  # also after later passes of the same shape
        assert_close(found, expected, **tiny.TOLERANCE)
    # A row alone: seen, captured, replayed. Rows apart: captured the second time, replayed
    # for others in either order. The other shapes came once.
    assert log == ["capture", "replay", "replay", "capture", "replay", "replay", "replay"]


def test_a_grown_cache_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where growing copies it, as on GPUs."""
    monkeypatch.setattr(ReservedMemory, "reserve", lambda *_: None)
    target, log = recording()
    plain, caches = tiny.target(), (cache_of(target), cache_of(tiny.target()))
    for seed, start in enumerate((0, 3, 6)):
        for one, cache in zip((target, plain), caches, strict=True):
            run(one, cache, [0], [start], seed=seed)
    held = caches[0].data  # so that the new memory lies elsewhere
    for cache in caches:
        cache.reserve(8, SLOT_BUCKET)
    found, expected = (
        run(one, cache, [0], [9], seed=3)
        for one, cache in zip((target, plain), caches, strict=True)
    )
    assert_close(found, expected, **tiny.TOLERANCE)
    assert held.data_ptr() != caches[0].data.data_ptr()
    assert log == ["capture", "replay", "replay"]


def test_what_is_not_needed_for_long_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "MAX_GRAPHS", 2)
    target, log = recording()
    cache = cache_of(target)
    for row in (0, 0, 1, 0, 2, 0, 1, 1):  # 1 is forgotten for 2
        run(target, cache, [row], [0], seed=0)
    assert log == ["capture", *["replay"] * 3, "capture", "replay"]


class _Failing(Recorder):
    def capture(self, run: Any) -> Tensor:
        super().capture(run)
        raise RuntimeError("CUDA error: capture is no good\nand a second line")


def test_where_recording_fails_passes_go_on_without(caplog: pytest.LogCaptureFixture) -> None:
    target, log = recording()
    tiny.fast_layers(target).graphs = PassGraphs(lambda: _Failing(log))
    with caplog.at_level(logging.WARNING, logger="moaspec"):
        results = moaspec.generate(target, tiny.PROMPTS, max_new_tokens=tiny.NEW_TOKENS)
    assert [tuple(result.token_ids) for result in results] == list(tiny.own_texts("llama"))
    assert log == ["capture"]
    assert recorded(target).failure == "CUDA error: capture is no good"
    assert not target.layers.records  # so that nobody rounds sizes up for nothing
    (message,) = caplog.messages
    assert message.endswith("take longer to launch: CUDA error: capture is no good")


def test_the_stand_in_refuses_what_graphs_cannot_hold() -> None:
    with pytest.raises(RuntimeError, match="not permitted"):
        Recorder([]).capture(lambda: torch.tensor([1.0]))
    with pytest.raises(RuntimeError, match="not permitted"):
        Recorder([]).capture(lambda: torch.zeros(2) * torch.ones(1).item())


def test_layers_that_somebody_watches_are_not_recorded() -> None:
    target, log = recording()
    seen: list[int] = []
    layer = target.model.base_model.layers[1]
    handle = layer.register_forward_hook(lambda *_: seen.append(1))
    cache = cache_of(target)
    for start in (0, 3, 6):
        run(target, cache, [0], [start], seed=0)
    assert (len(seen), log) == (3, [])
    handle.remove()
    for start in (9, 12):
        run(target, cache, [0], [start], seed=0)
    assert log == ["capture", "replay"]


class _Slow(Recorder):
    def replay(self) -> None:
        time.sleep(0.005)  # in which another thread could put its pass into this one's place
        super().replay()


def test_two_threads_with_one_recording() -> None:
    target, log = recording()
    tiny.fast_layers(target).graphs = PassGraphs(lambda: _Slow(log))
    cache = cache_of(target)
    for seed in range(2):  # what is not recorded yet runs beside other passes, in its own cache
        run(target, cache, [0], [0], seed=seed)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda seed: run(target, cache, [0], [0], seed=seed), range(8)))
    plain, other = tiny.target(), cache_of(tiny.target())
    expected = [run(plain, other, [0], [0], seed=seed) for seed in range(8)]
    assert "replay" in log
    assert_close(found, expected, **tiny.TOLERANCE)


def test_costs_are_those_of_recorded_passes() -> None:
    target, log = recording()
    part = RoundParts(target, None).target_pass(3, 20)
    for _ in range(3):
        part.time()  # behind one like it
    assert log == ["capture", *["replay"] * 5]
    plain = tiny.fresh_target()
    accelerate(plain)
    assert fingerprint(target) == fingerprint(plain) | {"graphs": True}


def test_nothing_of_it_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: pytest.fail("a graph on a CPU"))
    target = tiny.fresh_target()
    accelerate(target)
    assert tiny.fast_layers(target).graphs is None
    moaspec.generate(target, tiny.PROMPTS[0], max_new_tokens=4)


def test_what_is_asked_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """One stream and one pool for all recordings; each is captured with both, and replayed."""
    asked: list[Any] = []
    takes = inspect.signature(torch.cuda.graph)

    class Fake:
        def __init__(self, *_: Any) -> None:
            asked.append("graph")

        def replay(self) -> None:
            asked.append("replay")

    def capturing(graph: Any, **options: Any) -> Any:
        takes.bind(graph, **options)  # PyTorch's own knows these names
        asked.append(options)
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Fake)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "graph", capturing)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    made = PassGraphs.of(torch.device("cuda:1"))
    target, _ = recording()
    tiny.fast_layers(target).graphs = made
    cache = cache_of(target)
    for start in (0, 3, 6):
        run(target, cache, [0], [start], seed=0)
    options = {
        "pool": "pool",
        "stream": "stream of cuda:1",
        "capture_error_mode": "thread_local",
    }
    assert asked == ["graph", options, "replay", "replay"]


@pytest.mark.parametrize("said", ["off", "0", "False"])
def test_it_can_be_switched_off(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cuda_graphs.SWITCH, said)
    assert PassGraphs.of(torch.device("cuda")) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_on_a_gpu(family: str) -> None:
    target = tiny.fresh_target(family)
    target.model.to("cuda")
    accelerate(target)
    assert tiny.fast_layers(target).graphs is not None
    results = moaspec.generate(
        target,
        tiny.PROMPTS,
        drafter=tiny.random_drafter(target).to("cuda"),
        max_new_tokens=tiny.NEW_TOKENS,
        tree=TREE,
    )
    assert [tuple(result.token_ids) for result in results] == list(tiny.own_texts(family))
    assert recorded(target).failure is None
