"""The decoding loop: rounds, ends, rows that come and go."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing import assert_close

import moaspec
import moaspec_core.engine.engine
import tiny
from moaspec.drafting.moa_proposer import MoAProposer
from moaspec.engine.local_verifier import LocalVerifier
from moaspec.generation.local_engine import local_engine, local_parts
from moaspec_core.drafting.draft_tree import DraftTree, Tree
from moaspec_core.drafting.protocols import VerifyRequest, VerifyResult
from moaspec_core.drafting.tree_shapes import Chain
from moaspec_core.engine.engine import Engine, run_now
from moaspec_core.engine.request_state import GenerationResult, acceptance_by_depth
from moaspec_core.errors import InputError, PromptError
from moaspec_core.policy.policies import DraftPolicy
from moaspec_core.sampling.params import SamplingParams

pytestmark = pytest.mark.kernels

PROMPT, OWN = tiny.PROMPTS[0], tiny.own_texts("llama")[0]


def replay(prompt: int = 0, *, wrong_from: int | None = None) -> Engine:
    """An engine that drafts the target's own continuation of a prompt."""
    text = [*tiny.PROMPTS[prompt], *tiny.own_texts("llama")[prompt]]
    return tiny.replay_engine(tiny.target(), tiny.ReplayDrafting([text], wrong_from=wrong_from))


def finish(engine: Engine) -> None:
    while engine.num_active:
        engine.step()


def decode(
    engine: Engine,
    prompt: tuple[int, ...] = PROMPT,
    *,
    max_new_tokens: int = tiny.NEW_TOKENS,
    stop_token_ids: tuple[int, ...] = (),
    shape: Tree | DraftPolicy = Chain(3),  # noqa: B008
) -> GenerationResult:
    handle = engine.add(
        prompt, max_new_tokens=max_new_tokens, stop_token_ids=stop_token_ids, shape=shape
    )
    result = engine.result(handle)
    finish(engine)
    return result


@pytest.mark.parametrize("shape", [Chain(3), Tree(3, 2, 6), Tree(5, 2, 10)], ids=str)
def test_right_drafts_are_accepted(shape: Tree) -> None:
    result = decode(replay(), shape=shape)
    assert tuple(result.token_ids) == OWN
    depth = shape.depth
    assert result.accept_lengths[:-1] == [depth + 1] * (result.num_rounds - 1)
    assert sum(result.accept_lengths) == len(OWN) - 1
    assert result.sources[: depth + 2] == ["target", *["draft"] * depth, "target"]
    assert result.num_drafted > 0


def test_acceptance_by_depth() -> None:
    result = decode(replay(wrong_from=3), max_new_tokens=13)
    assert result.accept_lengths == [3] * 4
    assert result.drafted_depths == [3, 3, 3, 2]
    assert result.acceptance_by_depth == [1.0, 1.0, 0.0]
    other = decode(replay(wrong_from=1), max_new_tokens=5)
    assert other.acceptance_by_depth == [0.0, 0.0, 0.0]
    assert acceptance_by_depth([result, other])[0] == pytest.approx(4 / (4 + other.num_rounds - 1))
    assert acceptance_by_depth([]) == []


def test_plain_decoding_has_tau_one() -> None:
    result = decode(local_engine(tiny.target()))
    assert tuple(result.token_ids) == OWN
    assert result.tau == 1.0
    assert result.num_rounds == len(OWN) - 1
    assert result.num_drafted == 0
    assert result.stop_reason == "max_new_tokens"
    assert result.sources == ["target"] * len(OWN)
    assert result.timing.total_s >= result.timing.prefill_s > 0


def test_no_round_has_no_tau() -> None:
    result = decode(replay(), max_new_tokens=1)
    assert result.token_ids == [OWN[0]]
    assert result.tau is None
    assert result.accept_lengths == []
    assert result.acceptance_by_depth == []


@pytest.mark.parametrize("kept", range(1, 10))
def test_max_new_tokens_inside_an_accepted_path(kept: int) -> None:
    result = decode(replay(), max_new_tokens=kept)
    assert tuple(result.token_ids) == OWN[:kept]
    assert len(result.sources) == kept
    assert sum(result.accept_lengths) == kept - 1
    assert result.stop_reason == "max_new_tokens"


@pytest.mark.parametrize("new_tokens", range(2, 7))
def test_no_draft_goes_beyond_the_last_token(new_tokens: int) -> None:
    result = decode(replay(), max_new_tokens=new_tokens, shape=Chain(128))
    assert tuple(result.token_ids) == OWN[:new_tokens]
    assert result.drafted_depths == [new_tokens - 2]
    assert result.accept_lengths == [new_tokens - 1]


@pytest.mark.parametrize("position", range(9))
def test_stop_token_inside_an_accepted_path(position: int) -> None:
    stop = OWN[position]
    first = OWN.index(stop)
    result = decode(replay(), stop_token_ids=(stop,))
    assert tuple(result.token_ids) == OWN[: first + 1]
    assert len(result.sources) == first + 1
    assert sum(result.accept_lengths) == first
    assert result.stop_reason == "stop_token"


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("shape", [Chain(4), Tree(3, 2, 6)], ids=str)
def test_right_drafts_of_every_family(family: str, shape: Tree) -> None:
    """A ragged batch leaves sliding windows, and LongRoPE's short regime, behind in leaps."""
    texts = [[*p, *t] for p, t in zip(tiny.PROMPTS, tiny.own_texts(family), strict=True)]
    engine = tiny.replay_engine(tiny.target(family), tiny.ReplayDrafting(texts))
    handles = [engine.add(p, max_new_tokens=tiny.NEW_TOKENS, shape=shape) for p in tiny.PROMPTS]
    results = [engine.result(handle) for handle in handles]
    finish(engine)
    for prompt, result in zip(tiny.PROMPTS, results, strict=True):
        assert [*prompt, *result.token_ids] in texts
        assert result.tau is not None
        assert result.tau > 2.5


def switching(text: list[int], *, prompt: int, new_tokens: int) -> tuple[list[int], list[int]]:
    """Accepted and drafted depths of Phi-3's rounds when every draft is right."""
    engine = tiny.replay_engine(tiny.target("phi3"), tiny.ReplayDrafting([text]))
    result = decode(engine, tuple(text[:prompt]), max_new_tokens=new_tokens, shape=Chain(5))
    assert result.token_ids == text[prompt : prompt + new_tokens]
    return result.accept_lengths, result.drafted_depths


@pytest.mark.parametrize("prompt", range(8, 19))
def test_a_draft_ends_at_the_switch_of_longrope(prompt: int) -> None:
    """Whatever part of a draft the switch falls into, the text is transformers' own."""
    text = [*tiny.PROMPTS[2], *tiny.own_texts("phi3")[2]][:prompt]
    text += tiny.own_text(tiny.target("phi3"), text, 16)
    lengths, depths = switching(text, prompt=prompt, new_tokens=16)
    assert sum(lengths) == 15
    length = prompt + 1
    for accepted, depth in zip(lengths, depths, strict=True):
        assert length + depth <= tiny.SWITCH or length > tiny.SWITCH
        length += accepted


def test_one_round_reads_the_text_anew_at_the_switch() -> None:
    text = [*tiny.PROMPTS[2], *tiny.own_texts("phi3")[2]]
    lengths, depths = switching(text, prompt=12, new_tokens=16)
    # 13 tokens after the prefill; 3 drafts and a bonus reach 17; then the round without a draft.
    assert lengths == [4, 1, 6, 4]
    assert depths == [3, 0, 5, 3]


class Told(DraftPolicy):
    """Remembers which texts were to be read."""

    def __init__(self) -> None:
        self.begun: list[tuple[int, int]] = []

    @property
    def wants_features(self) -> bool:
        return True

    def shape(self, length: int, num_requests: int, copied: float) -> Tree:
        del length, num_requests, copied
        return Chain(2)

    def record_round(self, tree: DraftTree, accepted: Sequence[int]) -> None:
        pass

    def begin(self, unread: int, room: int, num_requests: int, *, length: int, window: int) -> None:
        del num_requests, length, window
        self.begun.append((unread, room))


def test_a_text_that_is_read_anew_is_a_prompt_to_its_policy() -> None:
    """Its drafter has forgotten it, so that a policy which had it encoded no more must decide."""
    target, policy = tiny.target("phi3"), Told()
    engine = local_engine(target, tiny.random_drafter(target))
    decode(engine, tiny.PROMPTS[2], max_new_tokens=16, shape=policy)
    prompt, anew = policy.begun
    assert prompt == (12, 16)
    assert anew == (tiny.SWITCH + 1, 12 + 16 - tiny.SWITCH - 1)


class Unreliable(LocalVerifier):
    """Its passes over whole texts are interrupted when their keys are written."""

    async def verify(self, requests: Sequence[VerifyRequest]) -> list[VerifyResult]:
        verdicts = await super().verify(requests)
        if requests[0].num_verified == 0 and len(requests[0].new_tokens) > tiny.SWITCH:
            raise KeyboardInterrupt
        return verdicts


def test_an_interrupted_switch_leaves_no_keys_to_the_next_turn() -> None:
    """A kept row whose keys were being written over holds none of the short regime any more."""
    target = tiny.target("phi3")
    text = [*tiny.PROMPTS[2], *tiny.own_texts("phi3")[2]]
    drafting = tiny.ReplayDrafting([text])
    engine = Engine(
        Unreliable(target, drafting),
        drafting,
        target=target,
    )
    first = engine.add(tiny.PROMPTS[2], max_new_tokens=16, keep=True)
    with pytest.raises(KeyboardInterrupt):
        finish(engine)
    engine.abort(first)
    prompt = text[: tiny.SWITCH - 3]
    result = engine.result(engine.add(prompt, max_new_tokens=3, after=first))
    finish(engine)
    assert result.token_ids == tiny.own_text(target, prompt, 3)
    assert result.num_reused_tokens == 0


def test_the_cache_after_a_switch_is_that_of_the_long_text() -> None:
    target = tiny.target("phi3")
    text = [*tiny.PROMPTS[2], *tiny.own_texts("phi3")[2]]
    drafting = tiny.ReplayDrafting([text])
    verifier = LocalVerifier(target, drafting)
    engine = Engine(
        verifier,
        drafting,
        target=target,
    )
    engine.add(tiny.PROMPTS[2], max_new_tokens=16, shape=Chain(3), keep=True)
    finish(engine)
    ids = torch.tensor([text[:26]])
    expected = target.capture(ids, torch.ones_like(ids)).kv_BTLK[0]
    assert_close(verifier.cache.features(0, 0, 26)[0], expected, **tiny.TOLERANCE)


def test_rows_switch_on_their_own() -> None:
    """A mixed batch: a row far beyond the switch, one that crosses it, one that never does."""
    target = tiny.target("phi3")
    prompts = [[*tiny.PROMPTS[2], *tiny.own_texts("phi3")[2]], list(tiny.PROMPTS[1]), [33, 0]]
    lengths = (12, 16, 10)
    engine = local_engine(target, tiny.random_drafter(target), num_target_layers=2)
    results = [
        engine.result(engine.add(prompt, max_new_tokens=n, shape=Tree(3, 2, 6)))
        for prompt, n in zip(prompts, lengths, strict=True)
    ]
    finish(engine)
    for prompt, n, result in zip(prompts, lengths, results, strict=True):
        assert result.token_ids == tiny.own_text(target, prompt, n)


@pytest.mark.parametrize("room", [1, 2, 3, 6])
@pytest.mark.parametrize("speculate", [False, True])
def test_the_context_ends_a_row(room: int, speculate: bool) -> None:
    target = tiny.fresh_target(max_position_embeddings=16)
    prompt = tuple(range(16 - room))
    own = tiny.own_text(target, prompt, room)
    drafting = tiny.ReplayDrafting([[*prompt, *own, 0, 0, 0, 0]])
    engine = tiny.replay_engine(target, drafting) if speculate else local_engine(target)
    result = decode(engine, prompt, shape=Tree(4, 2, 8))
    assert result.token_ids == own
    assert result.stop_reason == "context"


@pytest.mark.parametrize("room", [1, 2, 5])
def test_a_real_drafter_at_the_end_of_the_context(room: int) -> None:
    target = tiny.fresh_target(max_position_embeddings=16)
    prompt = list(range(16 - room))
    result = moaspec.generate(
        target, prompt, drafter=tiny.random_drafter(target), tree=Tree(4, 2, 8)
    )
    assert result.token_ids == tiny.own_text(target, prompt, room)
    assert result.stop_reason == "context"


@pytest.mark.slow
def test_rows_join_and_leave_midway() -> None:
    engine = local_engine(tiny.target(), tiny.agreeing_drafter("llama"))
    results: dict[int, GenerationResult] = {}

    def join(prompt: int, *, length: int, shape: Tree) -> None:
        handle = engine.add(tiny.PROMPTS[prompt], max_new_tokens=length, shape=shape)
        results[prompt] = engine.result(handle)

    join(0, length=24, shape=Chain(2))
    engine.step()
    engine.step()
    join(1, length=6, shape=Tree(3, 2, 6))
    join(2, length=24, shape=Chain(2))
    for _ in range(3):
        engine.step()
    join(3, length=20, shape=Tree(2, 2, 4))
    finish(engine)
    for prompt, result in results.items():
        expected = tiny.own_texts("llama")[prompt][: len(result.token_ids)]
        assert tuple(result.token_ids) == expected
    assert [len(results[i].token_ids) for i in range(4)] == [24, 6, 24, 20]


@pytest.mark.parametrize("family", ["llama", "phi3", "gemma3_text"])
@pytest.mark.parametrize("size", [1, 5, 30])
def test_prompts_that_join_leave_time_for_running_rows(size: int, family: str) -> None:
    """Each step processes a chunk of prompts and gives the running row a round."""
    target, texts = tiny.target(family), tiny.own_texts(family)
    verifier = LocalVerifier(target)
    verifier.prompt_tokens = size
    engine = Engine(verifier, target=target)
    first = engine.add(PROMPT, max_new_tokens=tiny.NEW_TOKENS, keep=True)
    engine.step()
    later = [engine.add(tiny.PROMPTS[i], max_new_tokens=2, keep=True) for i in (1, 2)]
    steps = 0
    while not all(engine.result(handle).token_ids for handle in later):
        assert first in {event.handle for event in engine.step()}
        steps += 1
    # Of 7 and 12 tokens; the end of the first one joins beside a chunk of the second.
    assert steps == {1: 18, 5: 4, 30: 1}[size]
    finish(engine)
    for i, handle in enumerate([first, *later]):
        result = engine.result(handle)
        assert result.token_ids == list(texts[i][: len(result.token_ids)])


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    verifier = LocalVerifier(tiny.target())
    verifier.prompt_tokens = 3
    engine = Engine(verifier, target=tiny.target())
    running, long, short = (
        engine.add(tiny.PROMPTS[i], max_new_tokens=tiny.NEW_TOKENS) for i in (0, 2, 3)
    )
    engine.step({running: len(tiny.PROMPTS[0])})
    assert [event.handle for event in engine.step()] == [short, running]
    while not engine.result(long).token_ids:
        engine.step()
    assert len(engine.result(running).token_ids) == 5
    assert tuple(engine.result(long).token_ids) == tiny.own_texts("llama")[2][:1]


def test_a_prompt_of_which_a_chunk_was_processed_can_be_left_and_followed() -> None:
    verifier = LocalVerifier(tiny.target())
    verifier.prompt_tokens = 4
    engine = Engine(verifier, target=tiny.target())
    engine.add(tiny.PROMPTS[0], max_new_tokens=tiny.NEW_TOKENS)
    engine.step()
    left = engine.add(tiny.PROMPTS[2], max_new_tokens=2, keep=True)
    engine.step()
    engine.abort(left)
    next_turn = engine.add(tiny.PROMPTS[2], max_new_tokens=5, after=left)
    result = engine.result(next_turn)
    finish(engine)
    assert tuple(result.token_ids) == tiny.own_texts("llama")[2][:5]
    assert result.num_reused_tokens == 4


def test_rows_are_verified_in_the_order_of_their_places() -> None:
    """The latest request takes the first place; its caches lie before those of the others."""
    engine, seen = replay(), []
    verify = engine._verifier.verify

    async def noted(requests: Sequence[VerifyRequest]) -> list[VerifyResult]:
        seen.append([request.cache_row for request in requests])
        return await verify(requests)

    engine._verifier.verify = noted  # type: ignore[method-assign]
    for new_tokens in (2, 9, 9):
        engine.add(PROMPT, max_new_tokens=new_tokens, shape=Chain(1))
    while engine.num_active == 3:
        engine.step()
    engine.add(PROMPT, max_new_tokens=9, shape=Chain(1))
    finish(engine)
    assert [0, 1, 2] in seen[3:]
    assert all(rows == sorted(rows) for rows in seen)


def test_abort_returns_what_was_generated_and_frees_the_row() -> None:
    engine = local_engine(tiny.target(), tiny.random_drafter(tiny.target()))
    handle = engine.add(PROMPT, max_new_tokens=24)
    other = engine.add(tiny.PROMPTS[1], max_new_tokens=24)
    rest = engine.result(other)
    for _ in range(3):
        engine.step()
    result = engine.abort(handle)
    assert tuple(result.token_ids) == OWN[: len(result.token_ids)]
    assert len(result.token_ids) >= 3
    assert result.stop_reason == "aborted"
    assert engine.num_active == 1
    again = engine.result(engine.add(tiny.PROMPTS[2], max_new_tokens=24))
    finish(engine)
    assert tuple(rest.token_ids) == tiny.own_texts("llama")[1]
    assert tuple(again.token_ids) == tiny.own_texts("llama")[2]


def test_abort_before_the_prompt_was_processed() -> None:
    engine = local_engine(tiny.target())
    result = engine.abort(engine.add(PROMPT, max_new_tokens=4))
    assert result.token_ids == []
    assert engine.num_active == 0
    assert engine.step() == []


def test_the_drafter_is_told_of_closed_rows() -> None:
    drafting = tiny.ReplayDrafting([])
    engine = tiny.replay_engine(tiny.target(), drafting)
    decode(engine, max_new_tokens=2)
    assert drafting.closed == [0]


def test_events_carry_every_token_once() -> None:
    engine = replay()
    handles = [engine.add(p, max_new_tokens=9, shape=Chain(3)) for p in tiny.PROMPTS[:2]]
    seen: dict[int, list[int]] = {handle: [] for handle in handles}
    reasons: dict[int, list[str]] = {handle: [] for handle in handles}
    while engine.num_active:
        for event in engine.step():
            assert len(event.token_ids) == len(event.sources) > 0
            seen[event.handle] += event.token_ids
            reasons[event.handle] += [event.stop_reason] if event.stop_reason else []
    assert [tuple(seen[h]) for h in handles] == [t[:9] for t in tiny.own_texts("llama")[:2]]
    assert all(reasons[h] == ["max_new_tokens"] for h in handles)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ((), "empty"),
        (tuple([1] * 256), "maximum context length is 256 tokens"),
        ((1, tiny.VOCAB), "Token id 64"),
        ((-1, 2), "Token id -1"),
    ],
)
def test_prompts_that_are_refused(prompt: tuple[int, ...], message: str) -> None:
    engine = local_engine(tiny.target())
    with pytest.raises(PromptError, match=message):
        engine.add(prompt, max_new_tokens=4)
    assert engine.num_active == 0


@pytest.mark.parametrize("number", [-1, 2.5, "5", None, True, torch.tensor(2.0)], ids=repr)
def test_numbers_of_new_tokens_that_are_none(number: Any) -> None:
    engine = local_engine(tiny.target())
    with pytest.raises(InputError, match="max_new_tokens must be an integer"):
        engine.add(PROMPT, max_new_tokens=number)
    assert engine.num_active == 0


@pytest.mark.parametrize("number", [torch.tensor(2), np.int64(2)], ids=repr)
def test_integers_of_other_libraries_are_integers(number: Any) -> None:
    result = decode(local_engine(tiny.target()), max_new_tokens=number)
    assert tuple(result.token_ids) == OWN[:2]


@pytest.mark.parametrize("stops", [5, None, ["a"], [1.0], [-1], [True]], ids=repr)
def test_stop_tokens_that_are_none(stops: Any) -> None:
    with pytest.raises(InputError, match="stop_token_ids"):
        local_engine(tiny.target()).add(PROMPT, max_new_tokens=2, stop_token_ids=stops)


def test_no_new_tokens_need_no_pass() -> None:
    engine = local_engine(tiny.target())
    handle = engine.add(PROMPT, max_new_tokens=0)
    result = engine.result(handle)
    (event,) = engine.step()
    assert (event.token_ids, event.stop_reason) == ((), "max_new_tokens")
    assert (result.token_ids, result.tau, result.stop_reason) == ([], None, "max_new_tokens")
    assert engine.num_active == 0


class _Waits:
    def __await__(self) -> Generator[None, None, None]:
        yield


def test_run_now_refuses_to_wait() -> None:
    async def waits() -> None:
        await _Waits()

    async def answers() -> int:
        return 3

    assert run_now(answers()) == 3
    with pytest.raises(RuntimeError, match="astep"):
        run_now(waits())


def test_kept_rows_hold_their_place_until_they_are_forgotten() -> None:
    drafting = tiny.ReplayDrafting([])
    engine = tiny.replay_engine(tiny.target(), drafting)
    kept = engine.add(PROMPT, max_new_tokens=2, keep=True)
    finish(engine)
    assert drafting.closed == []
    engine.add(PROMPT, max_new_tokens=2)
    finish(engine)
    assert drafting.closed == [1]
    engine.forget(kept)
    assert drafting.closed == [1, 0]
    with pytest.raises(InputError, match="not kept"):
        engine.forget(kept)
    with pytest.raises(InputError, match="not kept"):
        engine.add(PROMPT, max_new_tokens=2, after=kept)


def test_results_of_ended_requests() -> None:
    engine = local_engine(tiny.target())
    handle = engine.add(PROMPT, max_new_tokens=2)
    active = engine.result(handle)
    finish(engine)
    assert engine.result(handle) is active
    engine.forget(handle)
    with pytest.raises(InputError, match="no result of request 0"):
        engine.result(handle)


def test_old_results_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moaspec_core.engine.engine, "MAX_ENDED_RESULTS", 2)
    engine = local_engine(tiny.target())
    kept, *others = (engine.add(PROMPT, max_new_tokens=0, keep=i == 0) for i in range(4))
    finish(engine)
    assert [engine.result(one).stop_reason for one in (kept, *others[1:])] == ["max_new_tokens"] * 3
    with pytest.raises(InputError, match="no result"):
        engine.result(others[0])
    engine.forget(kept)
    with pytest.raises(InputError, match="no result"):
        engine.result(kept)


def test_only_active_requests_are_aborted() -> None:
    engine = local_engine(tiny.target())
    handle = engine.add(PROMPT, max_new_tokens=2)
    engine.abort(handle)
    for one in (handle, 99):
        with pytest.raises(InputError, match="not active"):
            engine.abort(one)


def test_an_unfinished_row_has_no_successor() -> None:
    engine = local_engine(tiny.target())
    handle = engine.add(PROMPT, max_new_tokens=2, keep=True)
    with pytest.raises(InputError, match="not kept"):
        engine.add(PROMPT, max_new_tokens=2, after=handle)
    assert engine.num_active == 1


def test_closing_a_run_aborts_its_rows() -> None:
    engine = local_engine(tiny.target())
    result = engine.result(engine.add(PROMPT, max_new_tokens=9))
    events = engine.run()
    next(events)
    events.close()
    assert (engine.num_active, result.stop_reason) == (0, "aborted")
    assert len(result.token_ids) == 1


def test_a_round_interrupted_after_encoding_hides_no_features() -> None:
    """The next round encodes the same tokens again; all before them had been hidden from CA."""
    target = tiny.target()
    verifier, proposer = local_parts(target, tiny.random_drafter(target))
    assert isinstance(proposer, MoAProposer)
    engine = Engine(verifier, proposer, target=target)
    inner, calls = verifier.verify, 0

    async def verify(requests: Sequence[VerifyRequest]) -> list[VerifyResult]:
        nonlocal calls
        results = await inner(requests)
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return results

    verifier.verify = verify  # type: ignore[method-assign]
    handle = engine.add(tiny.PROMPTS[2], max_new_tokens=12, shape=Tree(3, 2, 6))
    with pytest.raises(KeyboardInterrupt):
        finish(engine)
    while engine.num_active:
        engine.step()
        assert not any(proposer.first_encoded.values())
    assert engine.result(handle).token_ids == tiny.own_text(target, tiny.PROMPTS[2], 12)


@pytest.mark.parametrize("cuts", [(), (7, 5)])
def test_a_prompt_is_scored_in_chunks_and_after_a_set_back(cuts: tuple[int, ...]) -> None:
    target = tiny.target()
    prompt = [number % tiny.VOCAB for number in range(5, 45)]
    engine = Engine(LocalVerifier(target), target=target)
    sampling = SamplingParams(logprobs=True, top_logprobs=2)
    handle = engine.add(prompt, max_new_tokens=1, sampling=sampling, scored=True)
    for size in cuts:
        assert not engine.step({handle: size})
    if cuts:
        engine.set_back(handle)
        assert not engine.step({handle: 3})
    (event,) = engine.step()
    with torch.inference_mode():
        log_p_TV = target.model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    expected = [float(log_p_TV[i, token]) for i, token in enumerate(prompt[1:])]
    assert event.scores is not None
    # Passes of other widths add up in another order.
    assert event.scores.logprobs == pytest.approx(expected, abs=1e-4)
    best = [alternatives[0][0] for alternatives in event.scores.top_logprobs]
    assert best == log_p_TV[:-1].argmax(-1).tolist()
