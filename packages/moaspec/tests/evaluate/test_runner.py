"""Methods side by side."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import pytest

import tiny
from moaspec.evaluate.method_names import MethodResources, parse_methods
from moaspec.evaluate.methods import Method, MethodRun, TransformersMethod
from moaspec.evaluate.prompt_suites import Prompt
from moaspec.evaluate.report.report import Report, costs
from moaspec.evaluate.runner import EvalSettings, measure
from moaspec.target.target import Target
from moaspec_core.drafting.draft_tree import Tree
from moaspec_core.drafting.tree_shapes import Chain
from moaspec_core.errors import InputError

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
    parts = MethodResources(
        target=tiny.target(), checkpoints={"moa": tiny.agreeing_drafter("llama")}
    )
    return parse_methods(names, parts)


@pytest.fixture(scope="module")
def report() -> Report:
    return measure(methods(*METHODS), PROMPTS, encode, EvalSettings(max_new_tokens=LIMIT))


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
    assert report.reference.method.name == "plain"
    assert report.speedup(report.reference) == 1.0
    for outcome in report.outcomes:
        speedup = report.speedup(outcome)
        assert speedup is not None
        assert speedup > 0


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
    parts = report.as_json()["methods"]["moa@chain:3"]["suites"]
    assert {name: part["num_prompts"] for name, part in parts.items()} == {"first": 3, "second": 1}


def test_json(report: Report) -> None:
    data = json.loads(json.dumps(report.as_json()))
    assert data["target"] == "tiny-llama"
    assert data["dtype"] == "float32"
    assert list(data["methods"]) == list(METHODS)
    chain = data["methods"]["moa@chain:3"]
    assert chain["lossless"] is True
    assert len(chain["acceptance_by_depth"]) == 3
    assert [row["tokens"] for row in chain["prompts"]] == [LIMIT] * len(PROMPTS)
    assert set(chain["suites"]) == {"first", "second"}


@dataclass(frozen=True)
class WrongMethod(Method):
    """One token of every text is wrong, or the last one is missing."""

    cut: bool = False

    def run_many(self, *args: Any, **options: Any) -> list[MethodRun]:
        return [self._spoilt(run) for run in super().run_many(*args, **options)]

    def _spoilt(self, run: MethodRun) -> MethodRun:
        *tokens, last = run.token_ids
        return replace(run, token_ids=tokens if self.cut else [*tokens, (last + 1) % tiny.VOCAB])


@pytest.mark.parametrize("cut", [False, True])
def test_a_wrong_token_is_noticed_and_no_speedup_is_given(cut: bool) -> None:
    wrong = WrongMethod("wrong", tiny.target(), shape=Chain(2), cut=cut)
    report = measure(
        [*methods("plain"), wrong], PROMPTS, encode, EvalSettings(max_new_tokens=LIMIT)
    )
    plain, outcome = report.outcomes
    assert plain.lossless
    assert not outcome.lossless
    assert {item.position for item in outcome.equality} == {LIMIT - 1}
    assert report.speedup(outcome) is None
    data = json.loads(json.dumps(report.as_json()))["methods"]["wrong"]
    assert (data["lossless"], data["median_speedup"]) == (False, None)


def test_a_wrong_token_is_noticed_without_plain_too() -> None:
    wrong = WrongMethod("wrong", tiny.target(), shape=Chain(2), cut=False)
    report = measure([wrong], PROMPTS, encode, EvalSettings(max_new_tokens=LIMIT))
    assert not report.lossless
    assert report.speedup(report.outcomes[0]) is None


def test_no_speedup_over_a_lossy_baseline() -> None:
    wrong = WrongMethod("wrong", tiny.target(), shape=Chain(2), cut=False)
    report = measure([wrong, *methods("hf")], PROMPTS, encode, EvalSettings(max_new_tokens=LIMIT))
    right = report.outcomes[1]
    assert right.lossless
    assert report.speedup(right) is None
    suites = report.as_json()["methods"]["hf"]["suites"].values()
    assert [part["median_speedup"] for part in suites] == [None] * len(suites)
    ties = [found for found in right.equality if found.kind == "near_tie"]
    assert all((found.gap or 0) <= (found.limit or 0) for found in ties)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 2])
def test_sampled_texts_are_the_targets_own(batch: int) -> None:
    """All methods write the text of the seed; a wrong token of it is noticed."""
    settings = EvalSettings(max_new_tokens=LIMIT, temperature=0.9, seed=3, batch=batch)
    ways = methods("plain", "moa@chain:3", "moa@tree:3x2x6", "replay:0.8@chain:4")
    report = measure(ways, PROMPTS, encode, settings)
    texts = {
        tuple(tuple(result.token_ids) for result in outcome.results) for outcome in report.outcomes
    }
    greedy = measure(methods("plain"), PROMPTS, encode, EvalSettings(max_new_tokens=LIMIT))
    assert len(texts) == 1
    assert [list(one) for one in next(iter(texts))] != [
        result.token_ids for result in greedy.outcomes[0].results
    ]
    assert report.lossless
    assert report.as_json()["choice"] == "temperature 0.9, seed 3"
    wrong = WrongMethod("wrong", tiny.target(), shape=Chain(2))
    report = measure([*methods("plain"), wrong], PROMPTS, encode, settings)
    assert [outcome.lossless for outcome in report.outcomes] == [True, False]


def test_transformers_draw_noise_of_their_own() -> None:
    with pytest.raises(InputError, match="hf samples with noise of its own"):
        measure(methods("plain", "hf"), PROMPTS, encode, EvalSettings(temperature=0.5))
    with pytest.raises(InputError, match="temperature"):
        EvalSettings(temperature=-1.0)


def test_greedy_results_are_not_told_apart_by_seeds() -> None:
    assert EvalSettings(seed=5).as_dict() == EvalSettings().as_dict()
    sampled = EvalSettings(temperature=0.5, seed=5).as_dict()
    assert (sampled["temperature"], sampled["seed"]) == (0.5, 5)


def test_no_room_for_a_prompt() -> None:
    most = tiny.target().max_positions
    with pytest.raises(InputError, match="leave no room for a prompt"):
        measure(methods("plain"), PROMPTS, encode, EvalSettings(max_new_tokens=most))


def test_without_plain_the_first_method_is_the_baseline() -> None:
    report = measure(methods("moa", "hf"), PROMPTS[:1], encode, EvalSettings(max_new_tokens=3))
    assert report.baseline == "moa"
    assert all(outcome.lossless for outcome in report.outcomes)


def test_progress_is_told_of_every_run() -> None:
    calls: list[None] = []
    measure(
        methods("plain", "hf"),
        PROMPTS[:3],
        encode,
        EvalSettings(max_new_tokens=2),
        advance=lambda: calls.append(None),
    )
    assert len(calls) == 6


@pytest.mark.parametrize("call", [1, 2, 3, 5, 8])
def test_an_interrupted_run_reports_the_prompts_before(
    call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = methods("plain", "moa@chain:3")
    real, calls = Method.run_many, []

    def run_many(self: Method, *arguments: Any) -> list[MethodRun]:
        calls.append(self.name)
        if len(calls) == len(asked) + call:  # after the untimed ones
            raise KeyboardInterrupt
        return real(self, *arguments)

    monkeypatch.setattr(Method, "run_many", run_many)
    settings = EvalSettings(max_new_tokens=LIMIT)
    if call <= len(asked):
        with pytest.raises(KeyboardInterrupt):
            measure(asked, PROMPTS, encode, settings)
        return
    found = measure(asked, PROMPTS, encode, settings)
    assert found.interrupted
    assert [len(one.samples) for one in found.outcomes] == [(call - 1) // 2] * 2
    assert found.lossless


def test_stop_tokens_end_every_method() -> None:
    own = tiny.own_texts("llama")[1]
    target = tiny.fresh_target(eos_token_id=own[4])
    for method in parse_methods(["hf", "plain"], MethodResources(target=target)):
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
        parse_methods(["plain", "moa"], MethodResources(target=tiny.target()))


def test_later_turns_follow_the_baselines_answers() -> None:
    """Also where another method is wrong: all see the same prompt."""
    talk = [Prompt("talk", "1", ("5 9 2", "7 1", "30")), Prompt("talk", "2", ("33 0",))]
    wrong = WrongMethod("wrong", tiny.target(), shape=Chain(2))
    for batch in (1, 2):
        settings = EvalSettings(max_new_tokens=LIMIT, batch=batch)
        report = measure([wrong, *methods("plain")], talk, encode, settings)
        prompts = {s.item.key[:3]: s.item.prompt_ids for s in report.outcomes[0].samples}
        first = tiny.own_text(tiny.target(), [5, 9, 2], LIMIT)
        assert prompts["talk", "1", "1"] == (5, 9, 2, *first, 7, 1)
        second = tiny.own_text(tiny.target(), prompts["talk", "1", "1"], LIMIT)
        assert prompts["talk", "1", "2"] == (5, 9, 2, *first, 7, 1, *second, 30)
        assert len(prompts) == 4


def test_turns_that_do_not_fit_are_left_out_and_counted() -> None:
    long = Prompt("long", "1", (" ".join(["1"] * 250), "2"))
    report = measure(methods("plain"), [*PROMPTS, long], encode, EvalSettings(max_new_tokens=LIMIT))
    assert [item.prompt for item in report.skipped] == [long]
    assert len(report.outcomes[0].samples) == len(PROMPTS)
    assert report.as_json()["skipped"] == [("long", "1", "0")]
    with pytest.raises(InputError, match="No prompt fits"):
        measure(methods("plain"), [long], encode, EvalSettings(max_new_tokens=LIMIT))


@pytest.mark.parametrize("name", ["moa@chain:3", "moa@tree:2x2x4", "lookup@chain:4", "plain"])
def test_tau_is_what_counting_passes_of_the_target_gives(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens are counted by id and passes inside the target, not by the engine."""
    passes: list[None] = []
    right = Target.run

    def counted(self: Target, *arguments: Any, **options: Any) -> Any:
        passes.append(None)
        return right(self, *arguments, **options)

    monkeypatch.setattr(Target, "run", counted)
    (method,) = methods(name)
    runs = [method.run(prompt, LIMIT) for prompt in tiny.PROMPTS]
    independent = sum(len(run.token_ids) - 1 for run in runs) / (len(passes) - len(runs))
    monkeypatch.undo()
    report = measure([method], PROMPTS, encode, EvalSettings(max_new_tokens=LIMIT))
    assert report.outcomes[0].tau == independent
    tau_only = measure(
        methods("plain" if name != "plain" else "hf"),
        PROMPTS,
        encode,
        EvalSettings(max_new_tokens=LIMIT),
        tau_only=[method],
    ).outcomes[1]
    assert tau_only.tau == independent
    assert (tau_only.timed, tau_only.tokens_per_s) == (False, None)


def test_tau_of_transformers_is_what_counting_its_passes_gives() -> None:
    (method,) = methods("hf-lookup")
    prompt = [3, 1, 4, 1, 5, 3, 1, 4]
    passes: list[None] = []
    hook = method.target.model.register_forward_hook(lambda *_: passes.append(None))
    run = method.run(prompt, 20)
    hook.remove()
    assert run.result.num_rounds == len(passes) - 1
    assert sum(run.result.accept_lengths) < len(run.token_ids) == 20


def test_repeats_and_their_spread() -> None:
    settings = EvalSettings(max_new_tokens=4, repeats=3)
    report = measure(methods("plain", "moa"), PROMPTS, encode, settings)
    for outcome in report.outcomes:
        assert all(len(sample.runs) == 3 for sample in outcome.samples)
        spread = outcome.tokens_per_s_by_repeat
        assert len(spread) == 3
        assert outcome.num_tokens == 4 * len(PROMPTS)


def test_parts_of_a_round_add_up() -> None:
    data = measure(methods("moa@chain:3"), PROMPTS, encode, EvalSettings(max_new_tokens=LIMIT))
    outcome = data.outcomes[0]
    parts = costs(outcome)["round_s"]
    assert set(parts) == {"draft", "verify", "encode", "rest"}
    assert all(value >= 0 for value in parts.values())
    rounds = sum(result.num_rounds for result in outcome.results)
    decoding = sum(one.timing.total_s - one.timing.prefill_s for one in outcome.results)
    # Rounding of sums of a few hundred clock readings.
    assert sum(parts.values()) * rounds == pytest.approx(decoding, rel=1e-6)
    # Walks, masks and bookkeeping are nobody's part.
    assert parts["rest"] > 0.0
    assert outcome.passes_per_token == (rounds + len(PROMPTS)) / outcome.num_tokens


@pytest.mark.parametrize("name", ["max_new_tokens", "repeats", "batch"])
def test_settings_below_one(name: str) -> None:
    with pytest.raises(InputError, match=name):
        EvalSettings(**{name: 0})


def test_methods_that_cannot_be_batched_or_are_named_twice() -> None:
    with pytest.raises(InputError, match="one prompt at a time"):
        measure(methods("plain", "hf"), PROMPTS, encode, EvalSettings(batch=2))
    with pytest.raises(InputError, match="one prompt at a time"):
        measure(methods("plain"), PROMPTS, encode, EvalSettings(), tau_only=methods("hf-lookup"))
    with pytest.raises(InputError, match="both timed"):
        measure(methods("plain"), PROMPTS, encode, EvalSettings(), tau_only=methods("plain"))
