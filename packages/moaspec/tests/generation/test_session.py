"""Turns that reuse caches write what a fresh `generate` writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from torch import Tensor

import moaspec
import tiny
from costs import table
from moaspec_core.drafting.ngram_proposer import NgramProposer
from moaspec_core.errors import InputError, PromptError

pytestmark = pytest.mark.kernels

GREEDY: dict[str, Any] = {}
SAMPLED: dict[str, Any] = {"temperature": 1.2, "top_p": 0.9, "seed": 7, "presence_penalty": 0.5}
NEW = 6


def turns(answers: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Prompts that follow from answers as they come: longer, cut, edited, unrelated, again."""
    first = [5, 9, 2]
    yield first
    second = [*first, *answers[0], 11, 12]
    yield second
    yield [*second, *answers[1], 13]
    yield second[:5]
    yield [*second[:4], 60, *second[5:], 14]
    yield [40, 41, 42, 43]
    yield [40, 41, 42, 43]
    yield [*[40, 41, 42, 43], *answers[-1]]


@pytest.mark.slow
@pytest.mark.parametrize("num_target_layers", [0, 2])
@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_turn_equals_a_fresh_generate(
    family: str, options: dict[str, Any], num_target_layers: int
) -> None:
    """Phi-3's switch lies between the turns' lengths, and is crossed in both directions."""
    target, drafter = tiny.target(family), tiny.random_drafter(tiny.target(family))
    settings: dict[str, Any] = options | {"max_new_tokens": NEW, "tree": "tree:3x2x6"}
    session = moaspec.Session(target, drafter, num_target_layers=num_target_layers)
    answers: list[list[int]] = []
    for prompt in turns(answers):
        got = session.generate(prompt, **settings)
        expected = moaspec.generate(target, prompt, **settings)
        assert got.token_ids == expected.token_ids
        assert session.token_ids == [*prompt, *got.token_ids]
        answers.append(got.token_ids)


@pytest.mark.slow
def test_rolled_back_drafters_draft_as_fresh_ones_do() -> None:
    """What is accepted shows that memory and SA's cache hold the right tokens."""
    target, drafter = tiny.target(), tiny.agreeing_drafter("llama")
    session = moaspec.Session(target, drafter)
    for prompt in (tiny.PROMPTS[1], tiny.PROMPTS[2], tiny.PROMPTS[1][:5], tiny.PROMPTS[1]):
        got = session.generate(prompt, max_new_tokens=tiny.NEW_TOKENS, tree="chain:3")
        fresh = moaspec.generate(
            target, prompt, drafter=drafter, max_new_tokens=tiny.NEW_TOKENS, tree="chain:3"
        )
        assert got.token_ids == fresh.token_ids
        assert got.accept_lengths == fresh.accept_lengths


@pytest.mark.slow
@pytest.mark.parametrize("pass_s", [0.010, 0.001], ids=["drafts pay", "drafts cost"])
def test_turns_drafted_by_cost(pass_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn may end while features are put off; the next one still drafts from the right ones."""
    costs = table(pass_s=((pass_s,) * 4, (pass_s,) * 4))
    monkeypatch.setattr("moaspec.calibration.choose_layers.stored_costs", lambda *_, **__: costs)
    target = tiny.target()
    session = moaspec.Session(target, tiny.agreeing_drafter("llama"))
    answers: list[list[int]] = []
    for prompt in turns(answers):
        got = session.generate(prompt, max_new_tokens=2 * NEW)
        assert got.token_ids == tiny.own_text(target, prompt, 2 * NEW)
        answers.append(got.token_ids)


def test_turns_with_copies() -> None:
    target, session = tiny.target(), moaspec.Session(tiny.target())
    prompt = [3, 1, 4, 1, 5, 3, 1, 4]
    first = session.generate(prompt, max_new_tokens=NEW, free_branches=True)
    # The answer stands in the next prompt, so that writing it again is copying.
    again = [*prompt, *first.token_ids, *prompt]
    got = session.generate(again, max_new_tokens=NEW, free_branches=True)
    assert got.token_ids == tiny.own_text(target, again, NEW)
    assert got.num_reused_tokens > 0
    assert session.generate(prompt, max_new_tokens=NEW).token_ids == first.token_ids


def test_the_target_runs_over_new_tokens_only(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny.fresh_target()
    session = moaspec.Session(target, tiny.random_drafter(target))
    first = session.generate([5, 9, 2, 8], max_new_tokens=NEW, tree="chain:2")
    assert first.num_reused_tokens == 0
    widths: list[int] = []
    run = target.run

    def counted(input_ids_BT: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        widths.append(input_ids_BT.shape[1])
        return run(input_ids_BT, *args, **kwargs)

    monkeypatch.setattr(target, "run", counted)
    prompt = [*session.token_ids, 20, 21, 22]
    second = session.generate(prompt, max_new_tokens=NEW, tree="chain:2")
    # The answer's last token has no activations yet, so it is read with the three new ones.
    assert second.num_reused_tokens == len(prompt) - 4
    assert widths[0] == 4
    assert max(widths[1:]) <= 3


def test_a_repeated_prompt_is_read_from_its_last_token_on() -> None:
    session = moaspec.Session(tiny.target())
    session.generate([5, 9, 2], max_new_tokens=NEW)
    assert session.generate([5, 9, 2], max_new_tokens=NEW).num_reused_tokens == 2


def test_tokens_after_a_stop_are_not_taken_for_part_of_the_text() -> None:
    """A round may accept more than is kept; the next turn goes on otherwise."""
    target, prompt = tiny.target(), list(tiny.PROMPTS[0])
    own = list(tiny.own_texts("llama")[0])
    session = moaspec.Session(target, tiny.ReplayDrafting([[*prompt, *own]]))
    stopped = session.generate(prompt, tree="chain:6", stop_token_ids=[own[3]])
    assert stopped.stop_reason == "stop_token"
    longer = [*session.token_ids, 17]
    expected = moaspec.generate(target, longer, max_new_tokens=NEW)
    assert session.generate(longer, max_new_tokens=NEW).token_ids == expected.token_ids


@pytest.mark.parametrize("started", [False, True])
def test_another_turn_ends_an_answer(started: bool) -> None:
    target = tiny.target()
    session = moaspec.Session(target, NgramProposer())
    events = session.stream([5, 9, 2], max_new_tokens=20)
    if started:
        next(events)
        next(events)
    partial = session.token_ids
    follow_up = [*partial, 3, 4]
    result = session.generate(follow_up, max_new_tokens=NEW)
    assert list(events) == []
    assert result.num_reused_tokens == (len(partial) - 1 if started else 0)
    expected = moaspec.generate(target, follow_up, max_new_tokens=NEW)
    assert result.token_ids == expected.token_ids


def test_stream_yields_the_answer_and_closing_keeps_it() -> None:
    session = moaspec.Session(tiny.target())
    events = session.stream([5, 9, 2], max_new_tokens=NEW)
    tokens = [token for event in events for token in event.token_ids]
    assert session.result.token_ids == tokens
    events = session.stream([5, 9, 2], max_new_tokens=NEW)
    next(events)
    events.close()
    assert session.result.stop_reason == "aborted"
    assert session.token_ids == [5, 9, 2, tokens[0]]


def test_no_new_tokens_then_some() -> None:
    session = moaspec.Session(tiny.target())
    assert session.generate([5, 9, 2], max_new_tokens=0).token_ids == []
    own = tiny.own_texts("llama")[0]
    assert tuple(session.generate(tiny.PROMPTS[0], max_new_tokens=24).token_ids) == own


def test_reset_forgets() -> None:
    session = moaspec.Session(tiny.target(), tiny.random_drafter(tiny.target()))
    session.reset()
    session.generate([5, 9, 2], max_new_tokens=NEW)
    session.reset()
    assert session.token_ids == []
    assert session.generate([5, 9, 2], max_new_tokens=NEW).num_reused_tokens == 0


def test_bad_input_leaves_the_session_as_it_was() -> None:
    session = moaspec.Session(tiny.target())
    session.generate([5, 9, 2], max_new_tokens=NEW)
    held = session.token_ids
    with pytest.raises(PromptError):
        session.generate([5, 900])
    with pytest.raises(InputError, match="temperature"):
        session.generate([5], temperature=-1.0)
    with pytest.raises(TypeError, match="drafter"):
        session.generate([5], drafter=None)  # type: ignore[call-arg]
    assert session.token_ids == held
    assert session.generate([*held, 1], max_new_tokens=1).num_reused_tokens == len(held) - 1


def test_a_turn_without_a_pass_leaves_keys_of_another_regime_alone() -> None:
    """LongRoPE: what the first turn left is of a long text, whatever the second reused of it."""
    target = tiny.target("phi3")
    session = moaspec.Session(target)
    start = [5, 9, 2, 17, 8, 11]
    session.generate([*start, *range(20, 20 + tiny.SWITCH + 4)], max_new_tokens=2)
    session.generate([*start, *range(40, 40 + tiny.SWITCH + 4)], max_new_tokens=0)
    short = [*start, 7]
    result = session.generate(short, max_new_tokens=4)
    assert result.num_reused_tokens == 0
    assert result.token_ids == moaspec.generate(target, short, max_new_tokens=4).token_ids
