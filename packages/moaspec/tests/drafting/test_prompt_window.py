"""A drafter with a prompt window reads the end of a prompt and what follows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

import moaspec
import tiny
from bits import needs_packed_kernels
from costs import table
from moaspec.backends.fast_moa_proposer import FastMoAProposer
from moaspec.backends.fast_target import accelerate
from moaspec.drafting.moa_proposer import MoAProposer
from moaspec.engine.local_verifier import LocalVerifier
from moaspec.model.moa import MoADrafter
from moaspec.target.target import Target
from moaspec_core.drafting.draft_tree import DraftTree, Tree
from moaspec_core.drafting.protocols import RequestText, VerifyRequest
from moaspec_core.engine.engine import Engine, run_now
from moaspec_core.errors import ShapeError
from moaspec_core.policy import policies
from moaspec_core.policy.cost_model import KnownCosts
from moaspec_core.policy.policies import AdaptivePolicy, DraftPolicy

WINDOW = 5
TEXT = (*tiny.PROMPTS[0], *tiny.PROMPTS[1], *tiny.PROMPTS[2])
SHAPE = Tree(3, 2, 6)
PROPOSERS = pytest.mark.parametrize("proposer", [MoAProposer, FastMoAProposer])


def windowed(drafter: MoADrafter, window: int = WINDOW) -> MoADrafter:
    """The same drafter with a prompt window."""
    made = MoADrafter(dataclasses.replace(drafter.config, prompt_window=window))
    made.load_state_dict(drafter.state_dict())
    return made.to(next(drafter.parameters()).dtype).eval().requires_grad_(requires_grad=False)


class Decoding:
    """A proposer and a verifier, and how many tokens were encoded in each pass."""

    def __init__(self, kind: Any, target: Target, drafter: MoADrafter, layers: int = 0) -> None:
        self.proposer: FastMoAProposer = kind(drafter, target, num_target_layers=layers)
        self.encoded: list[list[int]] = []
        inner = self.proposer.encode

        def encode(activations: Any, positions: Any, counts: Sequence[int]) -> Any:
            self.encoded.append(positions[0].tolist())
            return inner(activations, positions, counts)

        self.proposer.encode = encode
        self.verifier = LocalVerifier(target, self.proposer)
        self.proposer.share_target_cache(self.verifier.cache)

    def read(self, start: int, stop: int, *, encode: bool = True, window: int = 0) -> None:
        """Verify TEXT[start:stop] and store its features."""
        request = VerifyRequest(0, start, TEXT[start:stop], encode=encode, window=window)
        (result,) = run_now(self.verifier.verify([request]))
        if result.features is not None:
            self.proposer.append_features(0, result.features)

    def draft(self, length: int) -> DraftTree:
        """Below the last of so many tokens."""
        (tree,) = self.proposer.propose([RequestText(0, TEXT[:length])], SHAPE)
        return tree


def blind(decoding: Decoding, first: int) -> None:
    """Hide the memory of tokens before `first` by PyTorch's path for missing tokens."""
    decoding.proposer.missing[0] = set(range(first))


@PROPOSERS
def test_ca_attends_to_the_window_and_to_later_tokens(proposer: Any) -> None:
    target = tiny.target()
    drafter = tiny.random_drafter(target)
    seen, whole = (Decoding(proposer, target, one) for one in (windowed(drafter), drafter))
    for decoding in (seen, whole):
        decoding.read(0, 12)
    assert seen.encoded == [[*range(12 - WINDOW, 12)]]
    assert whole.encoded == [[*range(12)]]
    everything = whole.draft(13)
    blind(whole, 12 - WINDOW)
    assert_same(seen.draft(13), whole.draft(13))
    assert seen.draft(13).log_p != everything.log_p
    for decoding in (seen, whole):
        decoding.read(12, 15)
    assert seen.encoded[1] == [12, 13, 14]
    assert_same(seen.draft(16), whole.draft(16))


def assert_same(tree: DraftTree, other: DraftTree) -> None:
    assert (tree.tokens, tree.parents) == (other.tokens, other.parents)
    assert tree.log_p == pytest.approx(other.log_p, abs=1e-4)


@PROPOSERS
@pytest.mark.parametrize(("kept", "stop"), [(9, 11), (4, 13), (4, 16), (0, 15), (12, 14), (6, 11)])
def test_a_shared_beginning_of_another_prompt(proposer: Any, kept: int, stop: int) -> None:
    """After a rollback the window of the new prompt is encoded, whatever was before."""
    target = tiny.target()
    drafter = windowed(tiny.random_drafter(target))
    again, fresh = (Decoding(proposer, target, drafter) for _ in range(2))
    again.read(0, 14)
    again.proposer.rollback(0, kept)
    again.read(kept, stop)
    fresh.read(0, stop)
    first = max(0, stop - WINDOW)
    assert again.proposer.num_encoded[0] == stop
    assert again.proposer.first_encoded[0] <= first
    if again.proposer.first_encoded[0] == first:
        assert_same(again.draft(stop + 1), fresh.draft(stop + 1))


class Told(DraftPolicy):
    """A policy that drafts if `drafts` says so, and keeps what `begin` tells it."""

    def __init__(self, *, drafts: bool) -> None:
        self.drafts = drafts
        self.begun: list[int] = []

    @property
    def wants_features(self) -> bool:
        return self.drafts

    def begin(self, unread: int, room: int, num_requests: int, *, length: int, window: int) -> None:
        del room, num_requests, length
        self.begun.append(unread)
        assert window == WINDOW

    def shape(self, length: int, num_requests: int, copied: float) -> Tree | None:
        del length, num_requests, copied
        return SHAPE if self.drafts else None

    def record_round(self, tree: DraftTree, accepted: Sequence[int]) -> None:
        del tree, accepted


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("kept", [1, 4, 9, 12, 17])
@pytest.mark.parametrize("more", [1, 4])
def test_policies_hear_what_is_encoded(drafts: bool, kept: int, more: int) -> None:
    """Of a prompt that shares its beginning with an earlier text, whether or not it was encoded."""
    target = tiny.target()
    decoding = Decoding(FastMoAProposer, target, windowed(tiny.random_drafter(target)))
    engine = Engine(decoding.verifier, decoding.proposer, target=target)
    first, then = Told(drafts=drafts), Told(drafts=True)
    old = engine.add(TEXT[:12], max_new_tokens=6, shape=first, keep=True)
    list(engine.run())
    text = [*TEXT[:12], *engine.result(old).token_ids]
    del decoding.encoded[:]
    engine.add([*text[:kept], *[0] * more], max_new_tokens=2, shape=then, after=old)
    engine.step()
    assert then.begun == [len(decoding.encoded[0])]


class Charged(AdaptivePolicy):
    """Notes how many tokens each round's encoding was charged for, by `LINEAR`."""

    def __init__(self, *, lags: bool) -> None:
        super().__init__(KnownCosts(LINEAR, [[0.5]]), lags=lags)
        self.tokens: list[int] = []

    def begin(self, unread: int, room: int, num_requests: int, *, length: int, window: int) -> None:
        super().begin(unread, room, num_requests, length=length, window=window)
        self.tokens.append(round(self.lost_s / PER_TOKEN_S))

    def record_round(self, tree: DraftTree, accepted: Sequence[int]) -> None:
        before_s = self.lost_s
        won_s = LINEAR.plain_s(1) * len(accepted) if tree.tokens else 0.0
        super().record_round(tree, accepted)
        self.tokens.append(round((self.lost_s - before_s + won_s) / PER_TOKEN_S))


PER_TOKEN_S = 1e-6
LINEAR = table(
    pass_s=((0.01,) * 4,) * 2,
    encode_s=tuple(PER_TOKEN_S * tokens for tokens in (1, 8, 16, 64)),
    root_s=0.0,
    step_s=(0.0, 0.0),
)
"""A machine on which only encoding costs anything beyond a pass."""


@pytest.mark.parametrize("lags", [False, True])
@pytest.mark.parametrize("agrees", [False, True])
@pytest.mark.parametrize("windows", [(2, 5), (2, 12), (5, 5), (5, 0)])
def test_a_policy_is_charged_for_what_is_encoded(
    lags: bool, agrees: bool, windows: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a new text and one that goes on behind a part of it, in every pass."""
    monkeypatch.setattr(policies, "FIRST_WINDOW", windows[0])
    monkeypatch.setattr(policies, "PROVEN_ROUNDS", 1)
    target = tiny.target()
    drafter = tiny.agreeing_drafter("llama", 0) if agrees else tiny.random_drafter(target)
    decoding = Decoding(FastMoAProposer, target, windowed(drafter, windows[1]))
    engine = Engine(decoding.verifier, decoding.proposer, target=target)
    prompt: tuple[int, ...] = TEXT[:12]
    old = None
    for _ in range(2):
        del decoding.encoded[:]
        policy = Charged(lags=lags)
        old = engine.add(prompt, max_new_tokens=25, shape=policy, keep=True, after=old)
        list(engine.run())
        assert [one for one in policy.tokens if one] == [len(one) for one in decoding.encoded]
        prompt = (*TEXT[:12], *engine.result(old).token_ids[:-7], 3, 4)


def test_a_window_for_one_request() -> None:
    """It is the end of the drafter's own, of which the rest can follow."""
    decoding = Decoding(
        FastMoAProposer, tiny.target(), windowed(tiny.random_drafter(tiny.target()))
    )
    decoding.read(0, 9, window=2)
    decoding.read(9, 10, window=2)
    decoding.read(10, 11)
    decoding.read(11, 12, window=9)
    decoding.read(12, 13)
    assert decoding.encoded == [[7, 8], [9], [10], [*range(3, 12)], [12]]


def test_a_narrow_window_keeps_the_features_of_an_earlier_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(policies, "FIRST_WINDOW", 2)
    target = tiny.target()
    decoding = Decoding(FastMoAProposer, target, windowed(tiny.random_drafter(target)))
    engine = Engine(decoding.verifier, decoding.proposer, target=target)
    old = engine.add(TEXT[:9], max_new_tokens=4, shape=SHAPE, keep=True)
    list(engine.run())
    held = decoding.encoded[0][0]
    prompt = (*TEXT[:9], *engine.result(old).token_ids, 3, 4, 5)
    engine.add(prompt, max_new_tokens=2, shape=Charged(lags=False), after=old)
    engine.step()
    assert decoding.proposer.first_encoded[0] == held
    assert decoding.encoded[-1][-1] >= len(prompt) - 1


def test_a_prompt_that_is_encoded_later() -> None:
    decoding = Decoding(
        FastMoAProposer, tiny.target(), windowed(tiny.random_drafter(tiny.target()))
    )
    decoding.read(0, 9, encode=False)
    decoding.read(9, 12, encode=False)
    decoding.read(12, 13)
    assert decoding.encoded == [[*range(13 - WINDOW, 13)]]


@pytest.mark.parametrize("layers", [0, 2])
@pytest.mark.parametrize("family", ["llama", "phi3", "gemma3_text"])
def test_texts_are_the_targets_own(family: str, layers: int) -> None:
    target = tiny.target(family)
    drafter = windowed(tiny.agreeing_drafter(family, layers))
    proposer = FastMoAProposer(drafter, target, num_target_layers=layers)
    verifier = LocalVerifier(target, proposer)
    proposer.share_target_cache(verifier.cache)
    engine = Engine(verifier, proposer, target=target)
    results = [
        engine.result(engine.add(prompt, max_new_tokens=20, shape=SHAPE)) for prompt in tiny.PROMPTS
    ]
    while engine.num_active:
        engine.step()
    for result, text in zip(results, tiny.own_texts(family), strict=True):
        assert result.token_ids == list(text[:20])


@needs_packed_kernels
@pytest.mark.kernels
@pytest.mark.parametrize("layers", [0, 2])
def test_kernels_draft_behind_a_window_what_levels_draft(
    layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny.kernel_target()
    assert accelerate(target)
    drafter = windowed(tiny.random_drafter(target, exits=(layers,)).bfloat16())
    trees = []
    for grow in (FastMoAProposer.grow, MoAProposer.grow):
        monkeypatch.setattr(FastMoAProposer, "grow", grow)
        decoding = Decoding(FastMoAProposer, target, drafter, layers)
        assert decoding.proposer.kernel_parts() is not None
        decoding.read(0, 14)
        trees.append(decoding.draft(15))
    assert trees[0].tokens == trees[1].tokens
    assert trees[0].parents == trees[1].parents


def test_generate_reports_no_other_text() -> None:
    target = tiny.target()
    prompt = list(TEXT)
    plain = moaspec.generate(target, prompt, max_new_tokens=16)
    drafted = moaspec.generate(
        target, prompt, drafter=windowed(tiny.random_drafter(target)), max_new_tokens=16
    )
    assert drafted.token_ids == plain.token_ids


def test_a_drafter_without_ca_has_no_window() -> None:
    drafter = tiny.random_drafter(tiny.target(), without=("ca",))
    with pytest.raises(ShapeError, match="no memory that prompt_window could limit"):
        windowed(drafter)
    with pytest.raises(ShapeError, match="prompt_window must be an integer >= 0, got -1"):
        windowed(tiny.random_drafter(tiny.target()), -1)


def test_half_a_window_of_the_earlier_prompt_is_enough() -> None:
    """It is not encoded again where prompts with one beginning branch off a little earlier."""
    decoding = Decoding(
        FastMoAProposer, tiny.target(), windowed(tiny.random_drafter(tiny.target()))
    )
    decoding.read(0, 14)
    decoding.proposer.rollback(0, 12)
    decoding.read(12, 13)
    assert decoding.encoded == [[9, 10, 11, 12, 13], [12]]
    decoding.proposer.rollback(0, 11)
    decoding.read(11, 12)
    assert decoding.encoded[2] == [7, 8, 9, 10, 11]
