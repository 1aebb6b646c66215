"""Telling a tie from a fault."""

from __future__ import annotations

import math

import pytest
import torch

import tiny
from moaspec.decode import SamplingParams, local_engine
from moaspec.evaluate import compare
from moaspec.evaluate.equality import Equality, first_difference, gaps
from moaspec.target import Target

PROMPT, OWN = list(tiny.PROMPTS[0]), list(tiny.own_texts("llama")[0])
POSITION, TWIN = 4, 62
"""Token TWIN, which is not in OWN and has a higher id than OWN[4], is made OWN[4]'s double."""


def tied_target() -> Target:
    """A target whose LM head has two identical rows, so two logits are always equal."""
    model = tiny.model()
    with torch.no_grad():
        model.lm_head.weight[TWIN] = model.lm_head.weight[OWN[POSITION]]
    return Target(model, None, name="tied")


def replaced(position: int, token: int) -> list[int]:
    return [*OWN[:position], token, *OWN[position + 1 :]]


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([], [], None),
        ([1, 2], [1, 2], None),
        ([1, 2], [1, 3], 1),
        ([1, 2, 3], [1, 2], 2),
        ([1], [1, 2], 1),
        ([], [1], 0),
    ],
)
def test_first_difference(a: list[int], b: list[int], expected: int | None) -> None:
    assert first_difference(a, b) == expected


def test_identical() -> None:
    assert compare(tiny.target(), PROMPT, OWN, list(OWN)) == Equality("identical")


@pytest.mark.parametrize("position", [0, 7, 23])
def test_a_wrong_token_is_different(position: int) -> None:
    wrong = (OWN[position] + 1) % tiny.VOCAB
    result = compare(tiny.target(), PROMPT, OWN, replaced(position, wrong))
    assert (result.kind, result.position) == ("different", position)
    assert not result.lossless
    assert result.gap is not None
    assert result.gap > 1e-3


def test_the_gap_is_how_far_the_worse_token_is_from_the_best() -> None:
    target = tiny.target()
    ids = torch.tensor([PROMPT])
    logits = target.head(target.encode(ids, torch.ones_like(ids)).hidden_BTE[0, -1])
    best = int(logits.argmax())
    assert best == OWN[0]
    expected = float(logits[best] - logits[3])
    # Two ways of computing the same logits in float32, which differ in their last bits.
    assert gaps(target, PROMPT, [3]) == [pytest.approx(expected, abs=1e-4)]
    assert gaps(target, PROMPT, [best]) == [pytest.approx(0, abs=1e-4)]


SETTINGS = (
    SamplingParams(),
    SamplingParams(repetition_penalty=1.4, presence_penalty=0.5),
    SamplingParams(temperature=0.9, seed=5),
    SamplingParams(temperature=1.3, top_k=9, top_p=0.8, min_p=0.01, seed=2**64 - 1, choice=3),
)


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("sampling", SETTINGS)
def test_what_the_law_chooses_has_no_gap(family: str, sampling: SamplingParams) -> None:
    """Texts that cross windows and LongRoPE's switch, decoded with caches one by one."""
    target, prompt = tiny.target(family), tiny.PROMPTS[2]
    engine = local_engine(target)
    result = engine.result(engine.add(prompt, max_new_tokens=12, sampling=sampling))
    for _ in engine.run():
        pass
    # Cached and uncached passes differ in float32's last bits.
    assert max(gaps(target, prompt, result.token_ids, sampling)) < 1e-4
    other = [(token + 1) % tiny.VOCAB for token in result.token_ids]
    wrong = [
        gaps(target, prompt, [*result.token_ids[:i], token], sampling, since=i)[0]
        for i, token in enumerate(other)
    ]
    assert min(wrong) > 1e-3


def test_forbidden_tokens_are_infinitely_far() -> None:
    assert gaps(tiny.target(), PROMPT, [3], SamplingParams(logit_bias={3: -math.inf})) == [math.inf]


@pytest.mark.parametrize("kept", [0, 1, 23])
def test_a_missing_tail_is_different(kept: int) -> None:
    result = compare(tiny.target(), PROMPT, OWN, OWN[:kept])
    assert (result.kind, result.position) == ("different", kept)
    longer = compare(tiny.target(), PROMPT, OWN[:kept], OWN)
    assert (longer.kind, longer.position) == ("different", kept)


def test_a_near_tie() -> None:
    target = tied_target()
    assert tiny.own_text(target, PROMPT) == OWN
    got = [*replaced(POSITION, TWIN)[: POSITION + 1], 1, 2, 3]
    result = compare(target, PROMPT, OWN, got)
    assert (result.kind, result.position) == ("near_tie", POSITION)
    assert result.lossless
    assert result.gap == pytest.approx(0, abs=1e-4)


def test_after_a_tie_the_rest_must_agree_again() -> None:
    target, got = tied_target(), replaced(POSITION, TWIN)
    asked: list[tuple[list[int], int]] = []

    def resume(ids: list[int], limit: int) -> list[int]:
        asked.append((ids, limit))
        return OWN[POSITION + 1 :]

    result = compare(target, PROMPT, OWN, got, resume=resume)
    assert (result.kind, result.position) == ("near_tie", POSITION)
    assert asked == [([*PROMPT, *OWN[: POSITION + 1]], len(OWN) - POSITION - 1)]
    wrong = [*OWN[POSITION + 1 : 9], (OWN[9] + 1) % tiny.VOCAB, *OWN[10:]]
    later = compare(target, PROMPT, OWN, got, resume=lambda *_: wrong)
    assert (later.kind, later.position) == ("different", 9)
    short = compare(target, PROMPT, OWN, got, resume=lambda *_: [])
    assert short.kind == "different"


def test_a_tie_at_the_last_token() -> None:
    expected = OWN[: POSITION + 1]
    got = [*OWN[:POSITION], TWIN]
    result = compare(tied_target(), PROMPT, expected, got, resume=lambda *_: [1])
    assert result.kind == "near_tie"


def test_too_many_ties() -> None:
    """Every resumed decoding parts again at a tie: that is no accident any more."""
    model = tiny.model()
    with torch.no_grad():
        model.lm_head.weight.zero_()
    target = Target(model, None, name="undecided")
    result = compare(target, [1], [0] * 9, [1] * 9, resume=lambda _, limit: [1] * limit)
    assert result.kind == "different"


def test_other_dtypes_are_not_held_to_the_rest() -> None:
    target = Target(tied_target().model.to(torch.bfloat16), None, name="bf16")
    got = replaced(POSITION, TWIN)

    def never(*_: object) -> list[int]:
        raise AssertionError

    expected = tiny.own_text(target, PROMPT, POSITION)
    result = compare(target, PROMPT, [*expected, OWN[POSITION]], [*expected, TWIN], resume=never)
    assert got[POSITION] == TWIN
    assert result.kind == "near_tie"
