"""`generate`, `stream` and `load_drafter`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from transformers import BatchEncoding

import moaspec
import moaspec.engine.local_verifier
import moaspec.generation.drafters
import tiny
from moaspec.model.checkpoint.moa_checkpoint import save_drafter
from moaspec_core.errors import InputError, MismatchError, PromptError, UnknownModelError


@pytest.mark.slow
@pytest.mark.parametrize("num_target_layers", [0, 1])
def test_long_prompts_in_chunks_give_the_same_text(
    num_target_layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moaspec.engine.local_verifier, "PREFILL_CHUNK_TOKENS", 4)
    results = moaspec.generate(
        tiny.target(),
        tiny.PROMPTS,
        drafter=tiny.agreeing_drafter("llama", num_target_layers),
        max_new_tokens=tiny.NEW_TOKENS,
        tree="chain:3",
        num_target_layers=num_target_layers,
    )
    assert [tuple(result.token_ids) for result in results] == list(tiny.own_texts("llama"))
    for result in results:
        assert result.tau is not None
        assert result.tau > 1.5


@pytest.mark.slow
@pytest.mark.parametrize("tree", ["auto", "tree:3x2x6", moaspec.Chain(2)], ids=str)
def test_stream_yields_the_tokens_of_generate(tree: moaspec.Tree | str) -> None:
    drafter = tiny.agreeing_drafter("qwen2")
    events = list(
        moaspec.stream(
            tiny.target("qwen2"), tiny.PROMPTS[0], drafter=drafter, max_new_tokens=12, tree=tree
        )
    )
    result = moaspec.generate(
        tiny.target("qwen2"), tiny.PROMPTS[0], drafter=drafter, max_new_tokens=12, tree=tree
    )
    assert [token for event in events for token in event.token_ids] == result.token_ids
    assert [source for event in events for source in event.sources] == result.sources
    assert [event.stop_reason for event in events][-1] == "max_new_tokens"
    assert {event.stop_reason for event in events[:-1]} == {None}


def test_stream_stops_at_a_stop_token() -> None:
    own = tiny.own_texts("llama")[0]
    events = list(moaspec.stream(tiny.target(), tiny.PROMPTS[0], stop_token_ids=[own[3]]))
    assert events[-1].stop_reason == "stop_token"
    assert tuple(t for event in events for t in event.token_ids) == own[: own.index(own[3]) + 1]


def test_the_targets_own_stop_tokens_are_the_default() -> None:
    own = tiny.own_texts("llama")[1]
    target = tiny.fresh_target(eos_token_id=own[4])
    result = moaspec.generate(target, tiny.PROMPTS[1])
    assert tuple(result.token_ids) == own[: own.index(own[4]) + 1]
    without = moaspec.generate(target, tiny.PROMPTS[1], stop_token_ids=(), max_new_tokens=24)
    assert tuple(without.token_ids) == own


def test_a_list_of_prompts_gives_a_list_in_order() -> None:
    results = moaspec.generate(tiny.target(), [list(tiny.PROMPTS[3])], max_new_tokens=2)
    assert [result.token_ids for result in results] == [list(tiny.own_texts("llama")[3][:2])]


@pytest.mark.parametrize("prompt", [[], [[]], [[1], []]])
def test_empty_prompts(prompt: list[int]) -> None:
    with pytest.raises(PromptError, match="empty"):
        moaspec.generate(tiny.target(), prompt)


def test_a_tree_that_is_none() -> None:
    bad: Any = (2, 2, 4)
    with pytest.raises(InputError, match="tree must be"):
        moaspec.generate(tiny.target(), [1], tree=bad)


@pytest.mark.parametrize("batched", [False, True])
def test_prompts_may_be_tensors_or_arrays(batched: bool) -> None:
    own = list(tiny.own_texts("llama")[0][:4])
    ids: Any = torch.tensor([tiny.PROMPTS[0]] if batched else tiny.PROMPTS[0])
    for prompt in (ids, ids.numpy()):
        got: Any = moaspec.generate(tiny.target(), prompt, max_new_tokens=4)
        assert [r.token_ids for r in got] == [own] if batched else got.token_ids == own


@pytest.mark.parametrize(
    "prompt", [[1.5], ["a"], "text", [None], 5, None, torch.tensor(5), [[1], None]], ids=repr
)
def test_prompts_that_are_no_token_ids(prompt: Any) -> None:
    with pytest.raises(PromptError):
        moaspec.generate(tiny.target(), prompt)


@pytest.mark.parametrize("kind", [dict, BatchEncoding])
def test_what_a_tokenizer_returns_is_no_prompt(kind: Any) -> None:
    encoded = kind({"input_ids": [1, 2], "attention_mask": [1, 1]})
    for prompt in (encoded, [encoded]):
        with pytest.raises(PromptError, match="input_ids"):
            moaspec.generate(tiny.target(), prompt)


@pytest.mark.parametrize("call", [moaspec.generate, moaspec.stream])
def test_options_that_do_not_exist_are_refused(call: Any) -> None:
    """A typing error in a keyword must not silently be a default."""
    with pytest.raises(TypeError, match="max_tokens"):
        list(call(tiny.target(), [1], max_tokens=3))


def test_load_drafter_from_a_directory(tmp_path: Path) -> None:
    target = tiny.target()
    saved = tiny.random_drafter(target)
    save_drafter(saved, tmp_path, dtype=torch.bfloat16)
    loaded = moaspec.load_drafter(tmp_path, target=target)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    with pytest.raises(MismatchError, match="model_type"):
        moaspec.load_drafter(str(tmp_path), target=tiny.target("qwen2"))


def test_load_drafter_by_bundled_alias(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_drafter(tiny.random_drafter(tiny.target()), tmp_path)
    monkeypatch.setattr(moaspec.generation.drafters, "bundled_drafters", lambda: {"tiny": tmp_path})
    assert moaspec.load_drafter("tiny", target=tiny.target()).num_parameters > 0


def test_load_drafter_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_drafter(tiny.random_drafter(tiny.target()), tmp_path)
    asked: list[str] = []

    def download(name: str, **_: Any) -> str:
        asked.append(name)
        return str(tmp_path)

    monkeypatch.setattr("moaspec.generation.drafters.cached_if_offline", lambda _: None)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert moaspec.load_drafter("someone/drafter", target=tiny.target()).num_parameters > 0
    assert asked == ["someone/drafter"]


@pytest.mark.parametrize(
    "error",
    [LocalEntryNotFoundError("no cache"), OSError("no network"), httpx.ProxyError("no proxy")],
    ids=["cache", "network", "proxy"],
)
def test_load_drafter_that_nobody_has(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(UnknownModelError, match="nobody/nothing"):
        moaspec.load_drafter("nobody/nothing", target=tiny.target())


def test_load_drafter_by_an_impossible_name() -> None:
    with pytest.raises(UnknownModelError, match="not a name"):
        moaspec.load_drafter("not a name!", target=tiny.target())
