"""The activation cache gives back what a pass computes."""

from __future__ import annotations

import copy
import gc
import logging
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

import tiny
from moaspec.target.target import Target
from moaspec_core.errors import TrainingError
from moaspec_train.dataset.examples import Example, collate
from moaspec_train.students.target_activations import LayerMeanCache, TargetActivations

EXAMPLES = [Example(p, t[:9]) for p, t in zip(tiny.PROMPTS, tiny.own_texts("llama"), strict=True)]


def new_cache(directory: Path, target: Target | None = None) -> TargetActivations:
    return TargetActivations(target or tiny.target(), EXAMPLES, directory)


@pytest.mark.parametrize("ids", [[0, 1, 2, 3], [3, 1], [2]])
def test_what_is_read_is_what_capture_gives(ids: list[int], tmp_path: Path) -> None:
    target, batch = tiny.target(), collate(EXAMPLES, ids)
    cache = new_cache(tmp_path, target)
    expected = target.capture(batch.input_ids_BT, batch.attention_mask_BT)
    real = batch.attention_mask_BT.bool()
    for _ in range(2):
        got = cache.passes(batch)
        assert got.kv_BTLK.dtype == got.hidden_BTE.dtype == torch.bfloat16
        # Stored as bf16, so equal to the last bit of bf16.
        assert_close(got.kv_BTLK[real], expected.kv_BTLK[real].to(torch.bfloat16), rtol=0, atol=0)
        assert_close(
            got.hidden_BTE[real], expected.hidden_BTE[real].to(torch.bfloat16), rtol=0, atol=0
        )
        assert not got.kv_BTLK[~real].any()


def test_the_target_runs_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, batch = tiny.fresh_target(), collate(EXAMPLES, [0, 2])
    first = new_cache(tmp_path, target).passes(batch)
    cache = new_cache(tmp_path, target)
    monkeypatch.setattr(target, "capture", None)
    again = cache.passes(collate(EXAMPLES, [2, 0]))
    assert_close(again.kv_BTLK.flip(0), first.kv_BTLK, rtol=0, atol=0)
    with pytest.raises(TypeError):
        cache.passes(collate(EXAMPLES, [0, 1]))  # the second one is not stored


def test_runs_over_more_examples_use_what_others_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In another order, and added by another process meanwhile."""
    target = tiny.fresh_target()
    few = TargetActivations(target, EXAMPLES[2:], tmp_path)
    more = TargetActivations(target, EXAMPLES, tmp_path)
    first, second = (few.passes(collate(EXAMPLES[2:], [i])) for i in (0, 1))
    more.passes(collate(EXAMPLES, [0]))
    monkeypatch.setattr(target, "capture", None)
    assert_close(more.passes(collate(EXAMPLES, [2])).kv_BTLK, first.kv_BTLK, rtol=0, atol=0)
    assert_close(more.passes(collate(EXAMPLES, [3])).kv_BTLK, second.kv_BTLK, rtol=0, atol=0)
    assert len(list(tmp_path.rglob("*.data"))) == 2  # each writes files of its own


def test_a_damaged_text_of_any_process_is_computed_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = new_cache(tmp_path), new_cache(tmp_path)
    one.passes(collate(EXAMPLES, [0]))
    expected = other.passes(collate(EXAMPLES, [1])).kv_BTLK
    _, second = sorted(tmp_path.rglob("*.data"))
    second.write_bytes(_flipped(second.read_bytes()))
    for told in (True, False):
        caplog.clear()
        again = new_cache(tmp_path).passes(collate(EXAMPLES, [1])).kv_BTLK
        assert_close(again, expected, rtol=0, atol=0)
        assert ("damaged" in caplog.text) == told


def test_a_killed_process_leaves_whole_texts(tmp_path: Path) -> None:
    cache = new_cache(tmp_path)
    first = cache.passes(collate(EXAMPLES, [0, 1]))
    (data,), (index,) = tmp_path.rglob("*.data"), tmp_path.rglob("*.index")
    data.write_bytes(data.read_bytes() + b"part of a text")
    index.write_bytes(index.read_bytes() + b"part of an entry")
    del cache
    gc.collect()
    again = new_cache(tmp_path)
    again.passes(collate(EXAMPLES, [2]))
    assert_close(again.passes(collate(EXAMPLES, [0, 1])).kv_BTLK, first.kv_BTLK, rtol=0, atol=0)
    last = new_cache(tmp_path)
    expected = again.passes(collate(EXAMPLES, [2, 0])).kv_BTLK
    assert_close(last.passes(collate(EXAMPLES, [2, 0])).kv_BTLK, expected, rtol=0, atol=0)


def test_other_data_or_another_target_does_not_reuse_the_files(tmp_path: Path) -> None:
    """The same directory and token counts, but other tokens or weights: nothing is stale."""
    new_cache(tmp_path).passes(collate(EXAMPLES, range(4)))
    other_examples = [Example(e.prompt_ids, tuple(reversed(e.response_ids))) for e in EXAMPLES]
    batch = collate(other_examples, range(4))
    cache = TargetActivations(tiny.target(), other_examples, tmp_path)
    got = cache.passes(batch)
    expected = tiny.target().capture(batch.input_ids_BT, batch.attention_mask_BT)
    real = batch.attention_mask_BT.bool()
    assert_close(got.kv_BTLK[real], expected.kv_BTLK[real].to(torch.bfloat16), rtol=0, atol=0)


def test_final_states_alone_are_what_capture_gives_and_take_no_more_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, batch = tiny.fresh_target(), collate(EXAMPLES, [0, 2])
    expected = target.capture(batch.input_ids_BT, batch.attention_mask_BT).hidden_BTE
    real = batch.attention_mask_BT.bool()
    first = TargetActivations(target, EXAMPLES, tmp_path, finals_only=True).final_states(batch)
    again = TargetActivations(target, EXAMPLES, tmp_path, finals_only=True)
    # Stored as bf16, so equal to the last bit of bf16.
    assert_close(first[real], expected[real].to(torch.bfloat16), rtol=0, atol=0)
    monkeypatch.setattr(target, "capture", None)
    states = again.final_states(collate(EXAMPLES, [2, 0]))
    assert_close(states.flip(0)[real], first[real], rtol=0, atol=0)
    (file,) = tmp_path.rglob("*.data")
    tokens = sum(len(EXAMPLES[i]) for i in (0, 2))
    assert file.stat().st_size == 2 * tokens * target.identity.hidden_size


def _flipped(data: bytes) -> bytes:
    return bytes([data[0] ^ 1]) + data[1:]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: bytes(len(data)),
        _flipped,
        lambda data: data[::-1],
    ],
    ids=["cut", "zeros", "one bit", "another file"],
)
@pytest.mark.parametrize("suffix", ["data", "index"])
def test_damaged_files_are_computed_again(
    damage: Callable[[bytes], bytes],
    suffix: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also those of means, which are made from the activations."""
    batch, encoder = collate(EXAMPLES, range(4)), tiny.random_drafter(tiny.target()).encoder

    def read() -> list[torch.Tensor]:
        cache = new_cache(tmp_path / "activations")
        mean_BTK, _ = LayerMeanCache(cache, encoder, tmp_path / "means").read(batch)
        found = cache.passes(batch)
        return [mean_BTK, found.kv_BTLK, found.hidden_BTE]

    first = read()
    files = list(tmp_path.rglob(f"*.{suffix}"))
    assert files
    for file in files:
        file.write_bytes(damage(file.read_bytes()))
    with caplog.at_level(logging.WARNING):
        again = read()
    for was, now in zip(first, again, strict=True):
        # Alone a text has other rounding than in a batch.
        assert_close(now, was, rtol=0.01, atol=0.001)
    assert suffix != "data" or "damaged; they are computed again" in caplog.text
    caplog.clear()
    read()
    assert not caplog.text


def test_files_of_another_target_are_not_read(tmp_path: Path) -> None:
    """It has the same shape and vocabulary, but other weights."""
    target, batch = tiny.fresh_target(), collate(EXAMPLES, range(4))
    before = new_cache(tmp_path, target).passes(batch)
    target.model.get_parameter("model.layers.0.mlp.down_proj.weight").mul_(1.5)
    assert not torch.equal(new_cache(tmp_path, target).passes(batch).hidden_BTE, before.hidden_BTE)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_target_in_another_dtype_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, batch = tiny.fresh_target("qwen3"), collate(EXAMPLES, range(4))
    before = new_cache(tmp_path, target).passes(batch)
    halves = copy.copy(target)
    halves.model.bfloat16()
    cache = new_cache(tmp_path, halves)
    monkeypatch.setattr(halves, "capture", None)
    assert torch.equal(cache.passes(batch).hidden_BTE, before.hidden_BTE)


def test_too_little_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", ["total", "used", "free"])
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10, 10, 0))
    with pytest.raises(TrainingError, match="activation_cache=false"):
        new_cache(tmp_path)
    encoder = tiny.random_drafter(tiny.target()).encoder
    with pytest.raises(TrainingError, match="frozen_lsa=0"):
        LayerMeanCache(TargetActivations(tiny.target(), EXAMPLES, None), encoder, tmp_path)
    assert not list(tmp_path.rglob("*.data"))
