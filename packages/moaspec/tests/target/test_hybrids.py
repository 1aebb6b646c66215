"""Hybrids: recurrent and convolution states follow the accepted drafts; see `docs/models.md`."""

from __future__ import annotations

import asyncio
import copy
import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hybrid_models
import tiny
from links import Faults, FaultyTransport, Restartable
from moaspec import NgramProposer
from moaspec.engine.recurrent_verifier import RecurrentVerifier, local_verifier
from moaspec.evaluate.correctness.check_target import Check
from moaspec.evaluate.correctness.equality import audit
from moaspec.generation.local_engine import local_engine
from moaspec.target.decoder_layers import cache_argument
from moaspec.target.generic.generic_target import GenericTarget, target_of
from moaspec.target.generic.hybrid_layers import HybridLayers
from moaspec.target.generic.recurrent_states import num_bytes
from moaspec.target.registry import skeleton_of
from moaspec_core.drafting.draft_tree import DraftTree, Tree
from moaspec_core.drafting.protocols import VerifyRequest, VerifyResult
from moaspec_core.engine.engine import Engine, run_now
from moaspec_core.errors import UnsupportedTargetError
from moaspec_core.sampling.params import SamplingParams
from moaspec_edge.device.local_parts import LocalDevice
from moaspec_edge.device.remote_session import RemoteOptions, RemoteSession
from moaspec_edge.protocol.transport import InProcessTransport
from moaspec_edge.server.service import ServiceOptions, TargetService
from moaspec_edge.server.shared_verifier import PassOptions
from simulated_time import run_simulated

PROMPTS = tiny.PROMPTS[:3]
LENGTH = 12
DOCS = Path(__file__).parents[4] / "docs" / "models.md"
TREE = DraftTree((11, 12, 13, 14, 15), (-1, 0, 0, 1, -1))
"""Branches below the root (0 and 4) and below a draft (1 and 2)."""
STATE_TOLERANCE: dict[str, Any] = {"atol": 1e-3, "rtol": 1e-3}
"""Passes of other widths round otherwise; states of these models then differ by up to 1.3e-4."""
ALONE = ("jamba", "lfm2", "qwen3_next", "zamba2")
"""One kind for each sort of recurrent layer, which are also checked alone."""

every_kind = pytest.mark.parametrize("kind", hybrid_models.KINDS)
pytestmark = pytest.mark.slow


@functools.cache
def own_text(kind: str, prompt: tuple[int, ...]) -> list[int]:
    return tiny.own_text(hybrid_models.target(kind), prompt, LENGTH)


@every_kind
def test_without_weights_it_has_the_same_keys(kind: str) -> None:
    target = hybrid_models.target(kind)
    skeleton = skeleton_of(copy.deepcopy(target.model.config), "float32")
    found = target_of(skeleton, None, name=kind)
    assert isinstance(found, GenericTarget)
    assert found.layers.kv_shape == target.layers.kv_shape


def states_of(kind: str, text: Sequence[int], prompt: int) -> dict[tuple[int, str], Tensor]:
    """Those of transformers' own cache, after reading the prompt and stepping through the rest."""
    model = hybrid_models.target(kind).model
    argument = cache_argument(model)
    cache: Any = None
    with torch.inference_mode():
        for start in (0, *range(prompt, len(text))):
            stop = prompt if start == 0 else start + 1
            positions = torch.arange(start, stop)[None]
            ids = torch.tensor([list(text[start:stop])])
            given: dict[str, Any] = {argument: cache, "position_ids": positions, "use_cache": True}
            cache = model(input_ids=ids, **given)[argument]
    found: dict[tuple[int, str], Tensor] = {}
    for i, layer in enumerate(cache.layers):
        for name in ("conv", "recurrent"):
            states = getattr(layer, f"{name}_states", {}).get(0)
            if states is not None:
                found[i, name] = states
    return found


def verified(kind: str, *requests: VerifyRequest) -> RecurrentVerifier:
    verifier = local_verifier(hybrid_models.target(kind))
    assert isinstance(verifier, RecurrentVerifier)
    for request in requests:
        run_now(verifier.verify([request]))
    return verifier


def assert_states(verifier: RecurrentVerifier, kind: str, text: Sequence[int], prompt: int) -> None:
    assert verifier.cache.length(0) == len(text)
    held = verifier.cache.state(0)
    expected = states_of(kind, text, prompt)
    assert {(i, name) for i, layer in held.items() for name, _ in layer} == set(expected)
    for (i, name), states in expected.items():
        torch.testing.assert_close(held[i][name, 0], states, **STATE_TOLERANCE)


@every_kind
def test_check_is_right(kind: str) -> None:
    """Greedy and sampled, chain and tree, drafters that disagree and agree, in ragged batches."""
    target = hybrid_models.target(kind)
    check = Check(
        target=target,
        prompts=PROMPTS,
        drafter=tiny.random_drafter(target),
        max_new_tokens=LENGTH,
        alone=int(kind in ALONE),
    )
    findings = list(check.run())
    assert len(findings) == check.num_texts
    assert [finding for finding in findings if not finding.lossless] == []


@every_kind
@pytest.mark.parametrize("chosen", ["none", "branch", "leaf"])
def test_states_are_those_behind_the_last_accepted_token(kind: str, chosen: str) -> None:
    prompt, right = PROMPTS[0], own_text(kind, PROMPTS[0])
    wrong = (right[1] + 1) % tiny.VOCAB
    trees = {
        "none": DraftTree((wrong, right[2]), (-1, 0)),
        "branch": DraftTree((wrong, right[1], right[1]), (-1, 0, -1)),
        "leaf": DraftTree((wrong, right[1], wrong, right[2]), (-1, -1, 0, 1)),
    }
    accepted = {"none": 0, "branch": 1, "leaf": 2}[chosen]
    verifier = verified(
        kind,
        VerifyRequest(0, 0, prompt, prompt_length=3),
        VerifyRequest(0, 3, (right[0],), trees[chosen], prompt_length=3),
    )
    text = [*prompt, *right[: 1 + accepted]]
    assert_states(verifier, kind, text, len(prompt))


@every_kind
def test_a_text_that_goes_on_elsewhere_is_processed_again(kind: str) -> None:
    """As after a verification that was interrupted, or answered twice."""
    prompt, right = PROMPTS[0], own_text(kind, PROMPTS[0])
    again = VerifyRequest(0, 3, (right[0],), prompt_length=3)
    verifier = verified(
        kind,
        VerifyRequest(0, 0, prompt, prompt_length=3),
        again,
        VerifyRequest(0, 4, (right[1],), TREE, prompt_length=3),
        again,
    )
    assert_states(verifier, kind, [*prompt, right[0]], 3)
    (result,) = run_now(verifier.verify([VerifyRequest(0, 4, (right[1],), prompt_length=3)]))
    assert result.next_token == right[2]


@every_kind
def test_a_kept_text_goes_on(kind: str) -> None:
    """A second turn behind the first, and one that parts from it, equal transformers' texts.

    Their results say how much of the text was not processed again: nothing, where a state of the
    first text cannot be used.
    """
    target, (prompt, other) = hybrid_models.target(kind), PROMPTS[:2]
    engine = local_engine(target, tiny.random_drafter(target))
    first = engine.add(prompt, max_new_tokens=4, shape=Tree(2, 2, 4), keep=True)
    list(engine.run())
    said = engine.result(first).token_ids
    assert isinstance(target.layers, HybridLayers)
    kept = 0 if target.layers.reads_whole else len(prompt) + len(said) - 1
    turns = {(*prompt, *said, *other): kept, (*prompt, *said[:2], *other): 0}
    for turn, num_reused in turns.items():
        first = engine.add(turn, max_new_tokens=6, shape=Tree(2, 2, 4), keep=True, after=first)
        list(engine.run())
        assert engine.result(first).token_ids == tiny.own_text(target, turn, 6)
        assert engine.result(first).num_reused_tokens == num_reused


@pytest.mark.parametrize("kind", ["qwen3_5_text", "jamba", "nemotron_h"])
def test_long_prompts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("local_verifier", "recurrent_verifier"):
        monkeypatch.setattr(f"moaspec.engine.{module}.PREFILL_CHUNK_TOKENS", 5)
    target, prompt = hybrid_models.target(kind), PROMPTS[2]
    engine = local_engine(target, tiny.random_drafter(target))
    handle = engine.add(prompt, max_new_tokens=LENGTH, shape=Tree(3, 1, 3))
    list(engine.run())
    assert engine.result(handle).token_ids == own_text(kind, prompt)


@pytest.mark.parametrize("kind", ["lfm2", "nemotron_h"])
def test_across_a_link_that_is_cut(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are read in pieces, sessions begin again on a server that was restarted."""
    target, prompt = hybrid_models.target(kind), PROMPTS[2]
    drafter = tiny.random_drafter(target)
    monkeypatch.setattr("moaspec_edge.server.shared_verifier.PREFILL_TOKENS", 5)

    async def run() -> list[int]:
        server = Restartable(lambda: TargetService(target, drafter))
        transport = FaultyTransport(server.transport, Faults(), seed=0)
        remote = RemoteOptions(draft=Tree(2, 2, 4))
        session = RemoteSession(LocalDevice(target, drafter), transport, remote)
        text: list[int] = []
        async for event in session.stream(prompt, max_new_tokens=LENGTH):
            if len(text) < 6 <= event.start + len(event.token_ids):
                await server.restart()
            text[event.start :] = event.token_ids
        await session.close()
        await server.service.stop()
        return text

    assert run_simulated(run()) == own_text(kind, prompt)


@pytest.mark.parametrize(("kind", "whole"), [("lfm2", False), ("jamba", True)])
def test_a_server_reads_each_token_of_a_prompt_once(
    kind: str, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces, or whole where a piece would be read again with each later one."""
    target, prompts = hybrid_models.target(kind), ([3, 4, 5] * 8, [6, 7] * 9)
    monkeypatch.setattr("moaspec_edge.server.shared_verifier.PREFILL_TOKENS", 5)
    options = ServiceOptions(passes=PassOptions(owner_tokens=4))
    passes: list[list[int]] = []  # tokens of each pass's rows, also those read again

    async def run() -> None:
        service = TargetService(target, None, options)
        verify = service.verifier.verify

        async def counted(requests: Sequence[VerifyRequest]) -> list[VerifyResult]:
            results: list[VerifyResult] = await verify(requests)
            tokens = [len(request.new_tokens) for request in requests]
            again = [result.num_read_again for result in results]
            passes.append([sum(pair) for pair in zip(tokens, again, strict=True)])
            return results

        service.verifier.verify = counted
        await asyncio.gather(*(open_text(service, prompt) for prompt in prompts))
        await service.stop()

    async def open_text(service: TargetService, prompt: list[int]) -> None:
        transport = InProcessTransport(service, owner=str(len(prompt)))
        session = RemoteSession(LocalDevice(target, NgramProposer()), transport)
        result = await session.generate(prompt, max_new_tokens=1)
        assert result.token_ids == tiny.own_text(target, prompt, 1)
        await session.close()

    asyncio.run(run())
    assert sum(map(sum, passes)) == sum(map(len, prompts))
    if whole:
        assert sorted(passes) == [[18], [24]]  # each in a pass of its own
    else:
        assert len(passes) > 4


def test_an_interrupted_round_is_repeated() -> None:
    """A caller's processor fails between the pass and the decision."""
    target, prompt = hybrid_models.target("qwen3_5_text"), PROMPTS[0]
    failures = [RuntimeError("once")]

    def fails_once(token_ids: Sequence[int], logits_V: Tensor) -> Tensor:
        if len(token_ids) > 5 and failures:
            raise failures.pop()
        return logits_V

    engine = local_engine(target, tiny.random_drafter(target))
    sampling = SamplingParams(processors=(fails_once,))
    handle = engine.add(prompt, max_new_tokens=LENGTH, shape=Tree(2, 1, 2), sampling=sampling)
    with pytest.raises(RuntimeError, match="once"):
        finish(engine)
    finish(engine)
    assert engine.result(handle).token_ids == own_text("qwen3_5_text", prompt)


def finish(engine: Engine) -> None:
    while engine.num_active:
        engine.step()


@every_kind
def test_captured_keys_do_not_depend_on_left_pads(kind: str) -> None:
    target, text = hybrid_models.target(kind), list(PROMPTS[2])
    plain = target.capture(torch.tensor([text]), torch.ones(1, len(text)))
    mask = torch.tensor([[0] * 3 + [1] * len(text)])
    padded = target.capture(torch.tensor([[7] * 3 + text]), mask)
    assert plain.kv_BTLK.shape[2] == target.num_layers
    torch.testing.assert_close(padded.kv_BTLK[:, 3:], plain.kv_BTLK, **tiny.TOLERANCE)


@every_kind
def test_bytes_of_a_text(kind: str) -> None:
    target = hybrid_models.target(kind)
    verifier = verified(kind, VerifyRequest(0, 0, PROMPTS[0], prompt_length=3))
    assert num_bytes(verifier.cache.state(0)) == target.state_bytes > 0


def test_sessions_that_fit_with_their_states() -> None:
    target = hybrid_models.target("falcon_h1")
    keys = 50 * ServiceOptions.token_bytes(target)
    room = 3 * (keys + target.state_bytes)
    for size, sessions in ((room, 3), (room - 1, 2)):
        options = ServiceOptions(max_tokens=50, max_cache_bytes=size)
        assert options.fitting(target).max_sessions == sessions


def test_the_model_is_not_changed() -> None:
    model = hybrid_models.model("lfm2")
    before = dict(model.named_modules())
    target_of(model, None, name="tiny")
    assert dict(model.named_modules()) == before


def test_what_differs_between_families() -> None:
    layers = {kind: hybrid_models.target(kind).layers for kind in hybrid_models.KINDS}
    hybrids = {kind: one for kind, one in layers.items() if isinstance(one, HybridLayers)}
    assert set(hybrids) == set(hybrid_models.KINDS)
    whole = {kind for kind, one in hybrids.items() if one.reads_whole}
    assert whole == {"jamba", "nemotron_h", "zamba", "zamba2"}
    assert all(mixer.batches for one in hybrids.values() for mixer in one.mixers)
    differ = {kind for kind, one in hybrids.items() if one.steps_differ}
    assert differ == {"nemotron_h", "zamba2"}


def test_audit_in_half_precision() -> None:
    """Layers with states use weights of their parts without calling these parts."""
    target = target_of(hybrid_models.model("jamba").to(torch.bfloat16), None, name="tiny")
    text = tiny.own_text(target, PROMPTS[0], 4)
    audited = audit(target, PROMPTS[0], text, max_new_tokens=4)
    assert all(gap <= audited.limit for gap in audited.gaps)
    assert target.dtype == torch.bfloat16


def test_states_outside_the_cache_are_refused() -> None:
    model = hybrid_models.model("recurrent_gemma", num_hidden_layers=3, lru_width=48, head_dim=8)
    with pytest.raises(UnsupportedTargetError, match="do not keep these in transformers' cache"):
        target_of(model, None, name="tiny")


def test_the_documentation_lists_all_types() -> None:
    _, _, listed = DOCS.read_text().partition("<!-- hybrids -->")
    listed, _, _ = listed.partition("<!-- end of hybrids -->")
    named = set(re.findall(r"`(\w+)`", listed))
    assert named == set(hybrid_models.KINDS)


def test_layers_of_a_hybrid_are_not_reused() -> None:
    target = hybrid_models.target("lfm2")
    assert isinstance(target, GenericTarget)
    assert target.num_reusable_layers == 0
