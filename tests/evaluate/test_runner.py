"""Methods side by side."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import pytest

import tiny
from moaspec.decode import Chain, Tree
from moaspec.errors import InputError
from moaspec.evaluate import Method, Parts, Prompt, Report, Run, Settings, measure, parse_methods
from moaspec.evaluate.methods import TransformersMethod

PROMPTS = [
    Prompt("first" if i < 3 else "second", str(i), (" ".join(map(str, prompt)),))
    for i, prompt in enumerate(tiny.PROMPTS)
]
LIMIT = 9
METHODS = ("hf", "plain", "moa@chain:3", "moa@tree:2x2x4")


def encode(turns: Sequence[str], answers: Sequence[Sequence[int]]) -> list[int]:
    ids: list[int] = []
    for turn, answer in zip_longest(turns, answers, fillvalue=()):
        ids += [int(word) for word in str(turn).split()]
        ids += answer
    return ids


def methods(*names: str) -> list[Method]:
    parts = Parts(target=tiny.target(), checkpoints={"moa": tiny.agreeing_drafter("llama")})
    return parse_methods(names, parts)


@pytest.fixture(scope="module")
def report() -> Report:
    return measure(methods(*METHODS), PROMPTS, encode, Settings(max_new_tokens=LIMIT))


def test_every_method_gives_the_targets_text(report: Report) -> None:
    expected = [text[:LIMIT] for text in tiny.own_texts("llama")]
    for outcome in report.outcomes:
        assert [tuple(run.token_ids) for run in outcome.runs] == expected
        assert [item.kind for item in outcome.equality] == ["identical"] * len(PROMPTS)
        assert outcome.lossless
        assert outcome.tokens_per_s is not None
        assert outcome.tokens_per_s > 0


def test_tau(report: Report) -> None:
    hf, plain, chain, tree = report.outcomes
    assert hf.tau == plain.tau == 1.0
    assert chain.tau is not None
    assert chain.tau > 1.5
    assert tree.tau is not None


def test_speedups(report: Report) -> None:
    assert report.baseline == "plain"
    plain = report.outcome("plain")
    assert plain is not None
    assert report.speedup(plain) == 1.0
    for outcome in report.outcomes:
        speedup = report.speedup(outcome, "hf")
        assert speedup is not None
        assert speedup > 0
    assert report.outcome("no such method") is None
    assert report.speedup(plain, "no such method") is None


def test_speedup_is_the_median_of_ratios(report: Report) -> None:
    timed = []
    for outcome, seconds in zip(
        report.outcomes[1:3], ([6.0] * 4, [1.0, 2.0, 3.0, 6.0]), strict=True
    ):
        samples = [
            replace(sample, runs=(replace(sample.runs[0], seconds=s),))
            for sample, s in zip(outcome.samples, seconds, strict=True)
        ]
        timed.append(replace(outcome, samples=samples))
    assert replace(report, outcomes=timed).speedup(timed[1]) == pytest.approx(2.5)


def test_by_suite(report: Report) -> None:
    parts = report.by_suite(report.outcomes[2])
    assert {name: len(part.runs) for name, part in parts.items()} == {"first": 3, "second": 1}


def test_json(report: Report) -> None:
    facts = json.loads(json.dumps(report.as_json()))
    assert facts["target"] == "tiny-llama"
    assert facts["dtype"] == "float32"
    assert list(facts["methods"]) == list(METHODS)
    chain = facts["methods"]["moa@chain:3"]
    assert chain["lossless"] is True
    assert len(chain["acceptance_by_depth"]) == 3
    assert [row["tokens"] for row in chain["prompts"]] == [LIMIT] * len(PROMPTS)
    assert set(chain["suites"]) == {"first", "second"}


@dataclass(frozen=True)
class WrongMethod(Method):
    """One token of every text is wrong, or the last one is missing."""

    cut: bool = False

    def run_many(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[Run]:
        return [self._spoilt(run) for run in super().run_many(prompts, max_new_tokens)]

    def _spoilt(self, run: Run) -> Run:
        *tokens, last = run.token_ids
        return replace(run, token_ids=tokens if self.cut else [*tokens, (last + 1) % tiny.VOCAB])


@pytest.mark.parametrize("cut", [False, True])
def test_a_wrong_token_is_noticed_and_no_speedup_is_given(cut: bool) -> None:
    wrong = WrongMethod("wrong", tiny.target(), shape=Chain(2), cut=cut)
    report = measure([*methods("plain"), wrong], PROMPTS, encode, Settings(max_new_tokens=LIMIT))
    plain, outcome = report.outcomes
    assert plain.lossless
    assert not outcome.lossless
    assert {item.position for item in outcome.equality} == {LIMIT - 1}
    assert report.speedup(outcome) is None
    facts = json.loads(json.dumps(report.as_json()))["methods"]["wrong"]
    assert (facts["lossless"], facts["median_speedup"]) == (False, None)


def test_without_plain_the_first_method_is_the_baseline() -> None:
    report = measure(methods("moa", "hf"), PROMPTS[:1], encode, Settings(max_new_tokens=3))
    assert report.baseline == "moa"
    assert all(outcome.lossless for outcome in report.outcomes)


def test_progress_is_told_of_every_run() -> None:
    calls: list[None] = []
    measure(
        methods("plain", "hf"),
        PROMPTS[:3],
        encode,
        Settings(max_new_tokens=2),
        advance=lambda: calls.append(None),
    )
    assert len(calls) == 6


def test_stop_tokens_end_every_method() -> None:
    own = tiny.own_texts("llama")[1]
    target = tiny.fresh_target(eos_token_id=own[4])
    for method in parse_methods(["hf", "plain"], Parts(target=target)):
        run = method.run(tiny.PROMPTS[1], 20)
        assert tuple(run.token_ids) == own[: own.index(own[4]) + 1]
        assert run.seconds > 0


def test_parse_methods() -> None:
    hf, plain, moa, chain, tree = methods("hf", "plain", "moa", "moa@chain:4", "moa@tree:3x2x5")
    assert isinstance(hf, TransformersMethod)
    assert plain.drafter is None
    assert moa.drafter is not None
    assert chain.shape == Chain(4)
    assert tree.shape == Tree(3, 2, 5)
    assert tree.name == "moa@tree:3x2x5"


@pytest.mark.parametrize(
    "name", ["", "eagle", "hf@chain:3", "plain@auto", "moa@chain", "moa@chain:0", "MOA"]
)
def test_methods_that_are_refused(name: str) -> None:
    with pytest.raises(InputError):
        methods(name)


def test_moa_needs_a_drafter() -> None:
    with pytest.raises(InputError, match="--drafter"):
        parse_methods(["plain", "moa"], Parts(target=tiny.target()))
