"""Telling a tie from a fault."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

import tiny
from moaspec.evaluate.correctness.equality import (
    FLOAT32_TIE,
    AuditedText,
    Equality,
    _in_float32,
    audit,
    compare,
    first_difference,
    judge,
)
from moaspec.generation.local_engine import local_engine
from moaspec.target.target import Target
from moaspec_core.sampling.params import GREEDY, SamplingParams

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


def gaps(
    target: Target,
    prompt: Sequence[int],
    text: Sequence[int],
    sampling: SamplingParams = GREEDY,
) -> list[float]:
    return list(audit(target, prompt, text, sampling, max_new_tokens=len(text)).gaps)


def judged(target: Target, expected: Sequence[int], got: Sequence[int]) -> Equality:
    return judge(target, PROMPT, expected, got, max_new_tokens=len(expected))


def test_identical() -> None:
    assert judged(tiny.target(), OWN, list(OWN)) == Equality("identical")


@pytest.mark.parametrize("position", [0, 7, 23])
def test_a_wrong_token_is_different(position: int) -> None:
    wrong = (OWN[position] + 1) % tiny.VOCAB
    result = judged(tiny.target(), OWN, replaced(position, wrong))
    assert (result.kind, result.position) == ("different", position)
    assert result.reason == f"token {wrong} is not the target's choice"
    assert not result.lossless
    assert result.gap is not None
    assert result.gap > 1e-3


def test_a_text_is_wrong_even_where_plain_decoding_is_as_wrong() -> None:
    wrong = replaced(7, (OWN[7] + 1) % tiny.VOCAB)
    assert judged(tiny.target(), wrong, wrong).kind == "different"


@pytest.mark.parametrize("position", [0, 7])
def test_logits_that_are_no_numbers_excuse_nothing(position: int) -> None:
    """A faulty target gives NaN; comparisons with it are all false."""
    nan = math.nan
    text = AuditedText(OWN, [nan if i == position else 0.0 for i in range(len(OWN))])
    plain = AuditedText(OWN, [0.0] * len(OWN))
    assert compare(text, plain).kind == "different"
    assert compare(text, plain).gap is None


def test_the_gap_is_how_far_the_worse_token_is_from_the_best() -> None:
    target = tiny.target()
    ids = torch.tensor([PROMPT])
    logits = target.head(target.capture(ids, torch.ones_like(ids)).hidden_BTE[0, -1])
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
def test_what_the_distribution_chooses_has_no_gap(family: str, sampling: SamplingParams) -> None:
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
        gaps(target, prompt, [*result.token_ids[:i], token], sampling)[i]
        for i, token in enumerate(other)
    ]
    assert min(wrong) > 1e-3


def test_forbidden_tokens_are_infinitely_far() -> None:
    assert gaps(tiny.target(), PROMPT, [3], SamplingParams(logit_bias={3: -math.inf})) == [math.inf]


@pytest.mark.parametrize("kept", [0, 1, 23])
def test_a_missing_tail_is_different(kept: int) -> None:
    result = judged(tiny.target(), OWN, OWN[:kept])
    assert (result.kind, result.position) == ("different", kept)
    assert result.reason == f"it ends after {kept} tokens, without a stop token"
    longer = judged(tiny.target(), OWN[:kept], OWN)
    assert (longer.kind, longer.position) == ("different", len(OWN))
    assert longer.reason == f"it has {len(OWN)} tokens instead of at most {kept}"


def test_a_text_that_goes_on_after_a_stop_token() -> None:
    target, stop = tiny.target(), OWN[3]
    first = OWN.index(stop)
    for stops, text, kind in (
        ([stop], OWN, "different"),
        ([stop], OWN[: first + 1], "identical"),
        ([], OWN, "identical"),
    ):
        result = judge(target, PROMPT, text, text, max_new_tokens=len(OWN), stop_token_ids=stops)
        assert result.kind == kind


def test_a_near_tie_and_what_follows_it() -> None:
    """After a tie a text goes its own way, which must be the target's too."""
    target = tied_target()
    assert tiny.own_text(target, PROMPT) == OWN
    begun = replaced(POSITION, TWIN)[: POSITION + 1]
    rest = tiny.own_text(target, [*PROMPT, *begun], len(OWN) - len(begun))
    got = [*begun, *rest]
    result = judged(target, OWN, got)
    assert (result.kind, result.position) == ("near_tie", POSITION)
    assert result.lossless
    assert result.gap == pytest.approx(0, abs=1e-4)
    got[9] = (got[9] + 1) % tiny.VOCAB
    later = judged(target, OWN, got)
    assert (later.kind, later.position) == ("different", 9)


def test_bf16_is_held_to_the_rest_too() -> None:
    target = Target(tied_target().model.to(torch.bfloat16), None, name="bf16")
    own = tiny.own_text(target, PROMPT)
    assert judged(target, own, own).kind == "identical"
    ids = torch.tensor([[*PROMPT, *own[:9]]])
    worst = int(target.model(ids).logits[0, -1].argmin())
    assert judged(target, own, [*own[:9], worst, *own[10:]]).kind == "different"


def test_the_limit_is_what_rounding_was_measured_to_do() -> None:
    """It follows the size of the target's logits, and excuses few wrong tokens."""
    limits, excused = [], []
    for scale in (1, 8):
        model = tiny.model().to(torch.bfloat16)
        with torch.no_grad():
            model.lm_head.weight *= scale
        target = Target(model, None, name="bf16")
        own = tiny.own_text(target, PROMPT)
        limits.append(audit(target, PROMPT, own, max_new_tokens=len(own)).limit)
        ids = torch.tensor([[*PROMPT, *own[:-1]]])
        ninth = model(ids).logits[0, len(PROMPT) - 1 :].topk(9).indices[:, 8].tolist()
        for position, token in enumerate(ninth):
            wrong = audit(target, PROMPT, [*own[:position], token], max_new_tokens=len(own))
            excused.append(wrong.gaps[-1] <= wrong.limit)
    assert limits[1] == pytest.approx(8 * limits[0], rel=0.5)
    assert limits[0] > 10 * FLOAT32_TIE
    assert sum(excused) <= 0.1 * len(excused)
    assert audit(tiny.target(), PROMPT, OWN, max_new_tokens=len(OWN)).limit == FLOAT32_TIE


def test_a_right_text_beside_a_plain_one_that_is_wrong() -> None:
    """The tie is told by what rounding explains, not by the plain text's fault."""
    text, plain = (
        AuditedText([1, 2], [0.0, 0.1], limit=0.2),
        AuditedText([1, 3], [0.0, 9.0], limit=0.3),
    )
    assert compare(text, plain) == Equality("near_tie", 1, 0.1, 0.2)
    assert compare(plain, text).kind == "different"
    endless = AuditedText([1, 2, 3], [0.0, 0.0, 9.0], wrong_end="it goes on after a stop token")
    assert compare(text, endless) == Equality("near_tie", 2, 0.0, 0.2)
    undecided = AuditedText([1, 4], [0.0, 0.25], limit=0.3)
    assert compare(text, undecided) == Equality("near_tie", 1, 0.25, 0.3)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_pass_in_float32_leaves_the_target_as_it_was(family: str) -> None:
    """Tied weights, and a pass that is interrupted on its way."""
    target = Target(tiny.model(family).to(torch.bfloat16), None, name="bf16")
    before = {name: value.clone() for name, value in target.model.state_dict().items()}
    audit(target, PROMPT, OWN, max_new_tokens=len(OWN))

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    hook = target.model.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt), _in_float32(target):
        target.model(torch.tensor([PROMPT]))
    hook.remove()
    after = target.model.state_dict()
    assert all(value.dtype == before[name].dtype for name, value in after.items())
    assert all(torch.equal(value, before[name]) for name, value in after.items())
    assert not any(module._forward_hooks for module in target.model.modules())


def test_a_packed_target_cannot_judge_in_bf16() -> None:
    target = Target(tiny.model().to(torch.bfloat16), None, name="bf16")
    target.packed = True
    with pytest.raises(ValueError, match="packed=False"):
        audit(target, PROMPT, OWN, max_new_tokens=len(OWN))
