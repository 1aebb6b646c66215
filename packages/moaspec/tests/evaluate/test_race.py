"""Plain and speculative decoding in turns."""

from __future__ import annotations

from itertools import count, pairwise
from types import SimpleNamespace

import pytest

import tiny
from commands import text_target
from moaspec.evaluate import race
from moaspec.evaluate.correctness.equality import Equality
from moaspec.evaluate.race import DecodingStats, Race, TimedDecoding, compare_texts, run_race
from moaspec.target.target import Target
from moaspec_core.drafting.ngram_proposer import NgramProposer
from moaspec_core.drafting.protocols import Proposer

PROMPT, OWN = tiny.PROMPTS[0], tiny.own_texts("llama")[0]
TOKENS = 9


@pytest.fixture(scope="module")
def target() -> Target:
    return text_target()


def replay() -> Proposer:
    """A drafter that is always right."""
    return tiny.ReplayDrafting([[*PROMPT, *OWN]])


def runners(target: Target) -> tuple[TimedDecoding, TimedDecoding]:
    return TimedDecoding(target, None, PROMPT, TOKENS), TimedDecoding(
        target, replay(), PROMPT, TOKENS
    )


def test_both_write_the_targets_text(target: Target) -> None:
    plain, speculative = runners(target)
    assert run_race(plain, speculative)
    assert plain.token_ids == speculative.token_ids == list(OWN[:TOKENS])
    for one in (plain, speculative):
        assert "".join(piece for piece, _ in one.pieces) == " ".join(f"w{t}" for t in OWN[:TOKENS])
    assert {source for _, source in plain.pieces} == {"target"}
    assert plain.stats.passes == plain.stats.tokens == TOKENS
    effort = speculative.stats
    assert effort.tokens == TOKENS
    assert effort.passes < TOKENS
    assert effort.accepted == [source for _, source in speculative.pieces].count("draft") > 0


def test_whose_clock_is_behind_makes_the_next_pass(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every look at the clock is a second, so that each pass takes one and drawing takes none."""
    ticks = count()
    monkeypatch.setattr(race, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    plain, speculative = runners(target)
    seen = [(1.0, 1.0)]  # each was started within a second

    def watch() -> None:
        next(ticks)
        seen.append((plain.seconds, speculative.seconds))

    assert run_race(plain, speculative, watch=watch)
    for before, after in pairwise(seen):
        steps = (after[0] - before[0], after[1] - before[1])
        assert sorted(steps) == [0.0, 1.0]
        if steps[1]:
            assert before[1] < before[0]
        elif not speculative.done:
            assert before[0] <= before[1]
    assert plain.seconds == 1.0 + plain.stats.passes
    assert speculative.seconds == 1.0 + speculative.stats.passes


def test_a_race_that_is_stopped(target: Target) -> None:
    plain, speculative = runners(target)
    asked = count()
    assert not run_race(plain, speculative, stop=lambda: next(asked) == 4)
    assert not plain.done
    assert 0 < len(plain.token_ids) < TOKENS
    assert plain.stats.tokens == len(plain.token_ids)


def test_a_judge_is_asked_where_texts_differ_only(target: Target) -> None:
    asked = []

    def trusted() -> Target:
        asked.append(1)
        return target

    plain, speculative = runners(target)
    assert run_race(plain, speculative)
    found = compare_texts(plain, speculative, PROMPT, max_new_tokens=TOKENS, trusted=trusted)
    assert (found.kind, asked) == ("identical", [])
    speculative.token_ids[4] = (speculative.token_ids[4] + 1) % tiny.VOCAB
    found = compare_texts(plain, speculative, PROMPT, max_new_tokens=TOKENS, trusted=trusted)
    assert (found.kind, found.position, asked) == ("different", 4, [1])


def test_a_prompt_that_is_over_at_once(target: Target) -> None:
    runner = TimedDecoding(target, NgramProposer(), PROMPT, 1)
    runner.advance()
    assert runner.done
    assert runner.stats.passes == 1
    runner.advance()
    assert runner.stats.tokens == 1


def made(speculative_s: float, equality: Equality) -> Race:
    return Race(
        plain=DecodingStats(tokens=10, seconds=2.0, passes=10),
        speculative=DecodingStats(tokens=10, seconds=speculative_s, passes=5, accepted=4, copied=1),
        equality=equality,
    )


def test_totals() -> None:
    same, tie = Equality("identical"), Equality("near_tie", 3, 0.01, 0.1)
    races = [made(1.0, same), made(3.0, tie)]
    total = Race.total(races)
    assert total.plain == DecodingStats(tokens=20, seconds=4.0, passes=20)
    assert total.speculative == DecodingStats(
        tokens=20, seconds=4.0, passes=10, accepted=8, copied=2
    )
    assert (total.equality, total.speedup) == (tie, 1.0)
    assert [race.speedup for race in races] == [2.0, pytest.approx(2 / 3)]


def test_no_speedup_of_a_wrong_text() -> None:
    races = [made(1.0, Equality("different")), made(1.0, Equality("identical"))]
    assert [race.speedup for race in races] == [None, 2.0]
    assert Race.total(races).speedup is None
