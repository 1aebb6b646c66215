"""Drafting with another language model: lossless, cached as read, refused where tokens differ."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

import moaspec
import tiny
from moaspec import ModelProposer, Target
from moaspec.generation.drafters import check_drafter, load_any_drafter
from moaspec.generation.shaping import shaping_for
from moaspec.model.checkpoint.moa_checkpoint import save_drafter
from moaspec_core.drafting.draft_tree import DraftTree
from moaspec_core.drafting.protocols import RequestText
from moaspec_core.errors import InputError, MismatchError


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
    words = tiny.tokenizer()
    target = tiny.fresh_target(tokenizer=words)
    more = tiny.tokenizer()
    more.add_tokens(["<another>"])
    with pytest.raises(MismatchError, match="tokenizers differ"):
        ModelProposer(tiny.fresh_target(tokenizer=more), target)
    ModelProposer(tiny.fresh_target(tokenizer=words), target)
    wide = ModelProposer(tiny.fresh_target(vocab_size=80), tiny.target())
    assert wide.vocabulary == tiny.target().vocab_size  # no id that the target lacks
    hybrid = tiny.fresh_target()
    hybrid.state_bytes = 1
    with pytest.raises(InputError, match="recurrent"):
        ModelProposer(hybrid, target)


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
    assert check_drafter(small, small) == small
    save_drafter(drafter, tmp_path / "bundled")
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
