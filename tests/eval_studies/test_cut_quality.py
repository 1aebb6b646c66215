"""What a drafter writes alone, and what the target thinks of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tiny
from costs import know, rated, table, watch_reused
from eval_studies import cut_quality
from eval_studies.command import CutStudy
from eval_studies.cut_quality import TARGET_NAME, continue_alone, measure_cut
from moaspec.evaluate.method_names import MethodResources, parse_methods
from moaspec.evaluate.methods import Method
from moaspec.evaluate.prompt_suites import Prompt
from moaspec_core.errors import InputError

PROMPTS = [Prompt("s", str(i), (" ".join(map(str, p)),)) for i, p in enumerate(tiny.PROMPTS)]


def encode(turn: str) -> list[int]:
    return [int(word) for word in turn.split()]


def methods(*names: str) -> list[Method]:
    parts = MethodResources(
        target=tiny.target(), checkpoints={"moa": tiny.agreeing_drafter("llama")}
    )
    return parse_methods(names, parts)


def test_a_drafter_that_knows_the_text_goes_on_like_the_target() -> None:
    """The agreeing drafter was trained on blocks of at most seven tokens."""
    found = measure_cut(methods("plain", "moa"), PROMPTS, encode, after=4, max_new_tokens=8)
    own, alone = found.texts[TARGET_NAME], found.texts["moa"]
    assert [one.tokens for one in own] == [4] * len(PROMPTS)
    assert all(one.agreement == 1.0 and one.same == 4 for one in own)
    assert alone == own
    assert set(found.as_json()["methods"]) == {TARGET_NAME, "moa"}


def test_the_likelihood_is_the_targets() -> None:
    """Against a product of conditional probabilities, one full pass each."""
    (found,) = measure_cut(methods("moa:n1"), PROMPTS[:1], encode, after=3, max_new_tokens=9).texts[
        "moa:n1"
    ]
    seen = [*tiny.PROMPTS[0], *tiny.own_texts("llama")[0][:3]]
    text = continue_alone(methods("moa:n1")[0], seen, 6)
    log_p, hits = 0.0, 0
    for i, token in enumerate(text):
        ids = torch.tensor([[*seen, *text[:i]]])
        logits = tiny.target().model(ids).logits[0, -1]
        log_p += float(logits.log_softmax(-1)[token])
        hits += int(logits.argmax() == token)
    assert found.tokens == len(text) == 6
    assert found.log_likelihood == pytest.approx(log_p / 6, **{"abs": tiny.TOLERANCE["atol"]})
    assert found.agreement == hits / 6


def test_alone_is_what_one_long_draft_says() -> None:
    """Prompt lookup needs nothing of the target, so its draft is known beforehand."""
    assert continue_alone(methods("lookup")[0], [1, 2, 3, 4, 1, 2], 3) == [3, 4, 1]
    assert continue_alone(methods("lookup")[0], [1], 3) == []


def test_who_goes_on_alone_drafts_as_it_did_before_the_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    know(monkeypatch, {0: table(), 2: table(root_s=0.003)})
    reused = watch_reused(monkeypatch)
    method = Method("moa", tiny.target(), rated(tiny.target(), 0.3, 0.8))
    text = continue_alone(method, tiny.PROMPTS[0], 3)
    assert reused == {2}
    named = replace(method, num_target_layers=2)
    assert continue_alone(named, tiny.PROMPTS[0], 3) == text
    assert method.key == named.key != replace(method, num_target_layers=0).key


def test_a_text_ends_with_its_turn() -> None:
    own = tiny.own_texts("llama")[0]
    target = tiny.fresh_target(eos_token_id=own[5])
    (moa,) = parse_methods(
        ["moa"], MethodResources(target=target, checkpoints={"moa": tiny.agreeing_drafter("llama")})
    )
    text = continue_alone(moa, [*tiny.PROMPTS[0], *own[:4]], 8)
    assert text == list(own[4:6])
    ended = measure_cut([moa], PROMPTS[:2], encode, after=10, max_new_tokens=12)
    assert ended.left_out == 1
    assert len(ended.texts[TARGET_NAME]) == 1
    with pytest.raises(InputError, match="earlier --cut"):
        measure_cut([moa], PROMPTS[:1], encode, after=10, max_new_tokens=12)


@pytest.mark.slow
def test_alone_for_longer_than_one_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it goes on with does not depend on how long its drafts are."""
    seen = [*tiny.PROMPTS[0], *tiny.own_texts("llama")[0][:3]]
    for name in ("moa", "moa:n1", "lookup"):
        (method,) = methods(name)
        monkeypatch.setattr(cut_quality, "DRAFTS_PER_CALL", 200)
        whole = continue_alone(method, seen, 100)
        for stretch in (1, 7):
            monkeypatch.setattr(cut_quality, "DRAFTS_PER_CALL", stretch)
            assert continue_alone(method, seen, 100)[: len(whole)] == whole
    monkeypatch.undo()
    assert len(continue_alone(methods("moa")[0], seen, 200)) == 200


def test_prompts_that_do_not_fit_are_left_out() -> None:
    long = Prompt("long", "1", (" ".join(["1"] * 250),))
    found = measure_cut(methods("moa"), [long, *PROMPTS], encode, after=4, max_new_tokens=8)
    assert found.left_out == 1
    assert found.as_json()["methods"]["moa"]["texts"] == len(PROMPTS)


@pytest.mark.parametrize("after", [0, 8])
def test_a_cut_has_tokens_before_and_after_it(after: int) -> None:
    study = CutStudy(after, 8, accuracy=False)
    with pytest.raises(InputError, match="--cut"):
        study.check(PROMPTS)


def test_a_cut_needs_a_drafter() -> None:
    with pytest.raises(InputError, match="--cut"):
        measure_cut(methods("plain"), PROMPTS, encode, after=3, max_new_tokens=8)
