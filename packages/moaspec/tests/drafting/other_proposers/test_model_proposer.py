"""Drafting with another language model: lossless, cached as read, refused where tokens differ."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

import moaspec
import tiny
from moaspec import ModelProposer, Target
from moaspec.drafting.other_proposers.model_proposer import FEW_TOKENS
from moaspec.generation.drafters import check_any_drafter, check_drafter, load_any_drafter
from moaspec.generation.shaping import shaping_for
from moaspec.model.checkpoint.moa_checkpoint import save_drafter
from moaspec_core.drafting.draft_tree import DraftTree
from moaspec_core.drafting.protocols import RequestText
from moaspec_core.errors import InputError, MismatchError

MODULE = "moaspec.drafting.other_proposers.model_proposer"


def other(family: str = "llama") -> Target:
    """A smaller model, which disagrees."""
    return tiny.fresh_target(family, seed=3, intermediate_size=40)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "phi3"])
@pytest.mark.parametrize("shape", [moaspec.Chain(3), moaspec.Tree(4, 3, 9)], ids=str)
def test_lossless(family: str, shape: moaspec.Tree) -> None:
    results = moaspec.generate(
        tiny.target(family),
        tiny.PROMPTS,
        drafter=ModelProposer(other(family), tiny.target(family)),
        max_new_tokens=tiny.NEW_TOKENS,
        tree=shape,
    )
    assert [tuple(result.token_ids) for result in results] == list(tiny.own_texts(family))


def test_lossless_when_sampled() -> None:
    plain, drafted = (
        moaspec.generate(
            tiny.target(),
            tiny.PROMPTS[1],
            drafter=drafter,
            max_new_tokens=24,
            temperature=1.0,
            seed=5,
        )
        for drafter in (None, ModelProposer(other(), tiny.target()))
    )
    assert plain.token_ids == drafted.token_ids


def test_the_target_itself_drafts_what_it_accepts() -> None:
    """Every draft: keys and values are those of the text that was kept."""
    target = tiny.target()
    result = moaspec.generate(
        target,
        tiny.PROMPTS[2],
        drafter=ModelProposer(tiny.fresh_target(), target),
        max_new_tokens=26,
        stop_token_ids=(),
    )
    assert result.tau == 5  # of the usual chain of four, and the target's own choice
    assert shaping_for(target, ModelProposer(other(), target)).tree == moaspec.Chain(4)


def test_drafts_do_not_depend_on_earlier_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rejected drafts leave nothing: a new proposer would draft the same."""
    target, propose, seen = tiny.target(), ModelProposer.propose, 0

    def checked(
        self: ModelProposer, rows: Sequence[RequestText], shape: moaspec.Tree
    ) -> list[DraftTree]:
        nonlocal seen
        seen += 1
        found = propose(self, rows, shape)
        afresh = propose(ModelProposer(self.target, target), rows, shape)
        assert [one.tokens for one in found] == [one.tokens for one in afresh]
        return found

    monkeypatch.setattr(ModelProposer, "propose", checked)
    moaspec.generate(
        target,
        tiny.PROMPTS,
        drafter=ModelProposer(other(), target),
        max_new_tokens=tiny.NEW_TOKENS,
    )
    assert seen > 3


def test_a_model_of_other_tokens_is_refused() -> None:
    """Ids that only one of them has a token for do not matter."""
    words = tiny.tokenizer()
    target = tiny.fresh_target(tokenizer=words)
    more = tiny.tokenizer()
    more.add_tokens(["[PAD64]"])
    ModelProposer(tiny.fresh_target(tokenizer=more, vocab_size=80), target)
    backend = Tokenizer(models.WordLevel({f"w{63 - i}": i for i in range(64)}, unk_token="w0"))
    others = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="w0")
    with pytest.raises(MismatchError, match=r"token \d+ is 'w\d+' for one and"):
        ModelProposer(tiny.fresh_target(tokenizer=others), target)
    wide = ModelProposer(tiny.fresh_target(vocab_size=80), tiny.target())
    assert wide.vocabulary == tiny.target().vocab_size  # no id that the target lacks
    hybrid = tiny.fresh_target()
    hybrid.state_bytes = 1
    with pytest.raises(InputError, match="recurrent"):
        ModelProposer(hybrid, target)
    unwrapped: Any = other()
    with pytest.raises(InputError, match="ModelProposer"):
        moaspec.generate(target, [1], drafter=unwrapped)


@pytest.mark.parametrize("small", ["vocabulary", "context"])
def test_what_the_model_cannot_read_gets_no_drafts(small: str) -> None:
    """Ids that it lacks, and texts beyond its context, beside a text that it drafts for."""
    changes: dict[str, Any] = {"vocab_size": 40}
    if small == "context":
        changes = {"max_position_embeddings": 12}
    target, model = tiny.target(), tiny.fresh_target(seed=3, **changes)
    prompts = [[1, 2, 3], [50, 2, 3]]
    plain = moaspec.generate(target, prompts, max_new_tokens=20)
    drafted = moaspec.generate(
        target, prompts, drafter=ModelProposer(model, target), max_new_tokens=20
    )
    assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
    assert drafted[0].tau is not None


def test_long_prompts_are_read_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pass of the model is longer, and rows that wait are not padded to a prompt's length."""
    monkeypatch.setattr(f"{MODULE}.READ_CHUNK_TOKENS", 32)
    target, model = tiny.target(), tiny.fresh_target()
    run, sizes = model.run, list[tuple[int, ...]]()

    def counted(ids: torch.Tensor, *args: Any, **more: Any) -> torch.Tensor:
        sizes.append(tuple(ids.shape))
        return run(ids, *args, **more)

    monkeypatch.setattr(model, "run", counted)
    prompts = [[7 * i % 64 for i in range(100)], [5, 6], list(range(40))]
    drafter = ModelProposer(model, target)
    found = moaspec.generate(target, prompts, drafter=drafter, max_new_tokens=20, stop_token_ids=())
    plain = moaspec.generate(target, prompts, max_new_tokens=20, stop_token_ids=())
    assert [one.token_ids for one in found] == [one.token_ids for one in plain]
    assert max(width for _, width in sizes) <= 32
    assert max(rows * width for rows, width in sizes) <= 3 * FEW_TOKENS
    assert all(one.tau is not None and one.tau > 2 for one in found)


def test_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory with a tokenizer, or an alias whose bundled drafter is another target's."""
    small = tmp_path / "small"
    words, drafter = tiny.tokenizer(), tiny.random_drafter(tiny.target())
    model = tiny.model("llama", num_hidden_layers=2)
    model.save_pretrained(small)
    words.save_pretrained(small)
    target = tiny.fresh_target(tokenizer=words)
    found = load_any_drafter(small, target=target)
    assert isinstance(found, ModelProposer)
    large = tmp_path / "large"
    tiny.model("llama").save_pretrained(large)
    words.save_pretrained(large)
    assert check_any_drafter(small, large) == str(small)
    with pytest.raises(InputError, match="is a language model"):
        check_drafter(small, large)
    with pytest.raises(InputError, match="the target itself"):
        check_any_drafter(small, small)
    save_drafter(drafter, tmp_path / "bundled")
    words.save_pretrained(tmp_path / "bundled")  # a tokenizer makes no model of a drafter
    assert isinstance(load_any_drafter(tmp_path / "bundled", target=target), type(drafter))
    monkeypatch.setattr(
        "moaspec.generation.drafters.bundled_drafters",
        lambda: {"smollm2-135m": tmp_path / "bundled"},
    )
    loaded: list[str] = []

    def load(name: str, **_: object) -> Target:
        loaded.append(name)
        return other()

    monkeypatch.setattr("moaspec.generation.drafters.load_target", load)
    own = load_any_drafter("smollm2-135m", target=tiny.target())
    assert isinstance(own, type(drafter))
    for_other = load_any_drafter("smollm2-135m", target=tiny.fresh_target(num_hidden_layers=2))
    assert isinstance(for_other, ModelProposer)
    assert loaded == ["smollm2-135m"]
