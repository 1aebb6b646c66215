"""The text over any link, codec and N is the local plain text."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

import moaspec
import tiny
from links import Faults, FaultyTransport, Restartable
from moaspec.drafting.other_proposers.oracle_proposer import OracleProposer
from moaspec_core.drafting.draft_tree import Tree
from moaspec_core.drafting.tree_shapes import Chain
from moaspec_edge.device.local_parts import LocalDevice
from moaspec_edge.device.remote_session import RemoteOptions, RemoteSession
from moaspec_edge.protocol.codec import CODECS
from moaspec_edge.protocol.transport import InProcessTransport
from moaspec_edge.server.service import TargetService
from simulated_time import run_simulated

PASS_S = 0.01
"""Simulated time of a pass; messages are up to 4 ms late."""
LINKS = {
    "clean": Faults(),
    "messy": Faults(loss=0.08, twice=0.15, delay_s=0.004),
    "all at once": Faults(loss=0.04, twice=0.1, delay_s=0.003, cut_after=(4, 6, 8)),
}
"""Delays differ from message to message, so that later ones overtake earlier ones."""
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "top_p": 0.95, "seed": 11, "presence_penalty": 0.3},
}
SHAPES = (Chain(4), "auto", Tree(3, 2, 6))


@pytest.fixture(autouse=True)
def _small_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are encoded in several."""
    monkeypatch.setattr("moaspec_edge.server.shared_verifier.PREFILL_TOKENS", 5)


def service(family: str = "llama") -> TargetService:
    return TargetService(tiny.target(family), tiny.agreeing_drafter(family))


async def read(session: RemoteSession, prompt: Any, **options: Any) -> list[int]:
    """The text as a reader of events has it."""
    text: list[int] = []
    async for event in session.stream(prompt, **options):
        assert event.start <= len(text), "no event may leave a hole"
        text[event.start :] = event.token_ids
    return text


def plain(family: str, prompt: Any, **options: Any) -> list[int]:
    return moaspec.generate(tiny.target(family), prompt, **options).token_ids


@pytest.mark.slow
@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("num_target_layers", [0, 1, 3])
def test_every_link_and_codec(link: str, num_target_layers: int) -> None:
    """Random and well-trained drafters alike; each case another shape and prompt."""

    async def run() -> None:
        cases = product(CODECS, SETTINGS)
        for number, (codec, setting) in enumerate(cases):
            drafter = tiny.agreeing_drafter("llama") if number % 2 else tiny.random_drafter(target)
            await check(codec, SETTINGS[setting], drafter, number)

    async def check(codec: Any, options: dict[str, Any], drafter: Any, number: int) -> None:
        server = Restartable(lambda: TargetService(target, drafter))
        transport = FaultyTransport(server.transport, LINKS[link], seed=number)
        remote = RemoteOptions(
            codec=codec,
            num_target_layers=num_target_layers,
            draft=SHAPES[number % len(SHAPES)],
        )
        session = RemoteSession(LocalDevice(target, drafter), transport, remote)
        prompt = tiny.PROMPTS[number % len(tiny.PROMPTS)]
        options = options | {"max_new_tokens": tiny.NEW_TOKENS}
        got: list[int] = []
        async for event in session.stream(prompt, **options):
            if len(got) < 10 <= event.start + len(event.token_ids) and link == "all at once":
                await server.restart()
            got[event.start :] = event.token_ids
        assert got == plain("llama", prompt, **options)
        assert session.result.token_ids == got
        # A drafter that agrees may be done with the text before all cuts.
        assert number % 2 or transport.connections > len(LINKS[link].cut_after)
        await session.close()
        await server.service.stop()

    target = tiny.target()
    run_simulated(run(), PASS_S)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["phi3", "gemma3_text"])
def test_families_with_other_keys(family: str) -> None:
    """LongRoPE's switch is crossed within the text; windows slide over activations of N > 0."""

    async def run() -> None:
        server = service(family)
        device = LocalDevice(tiny.target(family), tiny.agreeing_drafter(family))
        options = RemoteOptions(num_target_layers=1, draft=Chain(3))
        session = RemoteSession(device, InProcessTransport(server), options)
        for prompt in tiny.PROMPTS[:3]:
            got = await read(session, prompt, max_new_tokens=tiny.NEW_TOKENS)
            assert got == plain(family, prompt, max_new_tokens=tiny.NEW_TOKENS)
        await session.close()
        await server.stop()

    run_simulated(run(), PASS_S)


def test_turns_reuse_what_they_share() -> None:
    async def run() -> None:
        server = service()
        device = LocalDevice(tiny.target(), tiny.agreeing_drafter("llama"))
        session = RemoteSession(device, InProcessTransport(server))
        text = list(tiny.PROMPTS[2])
        for _ in range(2):
            got = await read(session, text, max_new_tokens=8)
            assert got == plain("llama", text, max_new_tokens=8)
            text += [*got, 17]
        edited = [*text[:5], 60, *text[6:]]
        got = await read(session, edited, max_new_tokens=8, temperature=1.0, seed=1)
        assert got == plain("llama", edited, max_new_tokens=8, temperature=1.0, seed=1)
        assert session.result.num_reused_tokens == 5
        await session.close()
        await server.stop()

    run_simulated(run(), PASS_S)


def test_log_probabilities_and_stops_cross_the_wire() -> None:
    async def run() -> None:
        target = tiny.fresh_target(tokenizer=tiny.tokenizer())
        drafter = tiny.random_drafter(target)
        server = TargetService(target, drafter)
        session = RemoteSession(LocalDevice(target, drafter), InProcessTransport(server))
        prompt = tiny.PROMPTS[0]
        whole = moaspec.generate(target, prompt, max_new_tokens=12, logprobs=True)
        await session.generate(prompt, max_new_tokens=12, logprobs=True)
        # float32 sums in another order; see tiny.TOLERANCE.
        assert session.result.logprobs == pytest.approx(whole.logprobs, abs=1e-4)
        stop = f"w{whole.token_ids[5]}"
        expected = moaspec.generate(target, prompt, max_new_tokens=12, stop=stop)
        await session.generate(prompt, max_new_tokens=12, stop=stop)
        assert session.result.token_ids == expected.token_ids
        assert session.result.stop_string == stop
        await session.close()
        await server.stop()

    run_simulated(run(), PASS_S)


def test_a_turn_that_continues_the_very_text_has_its_own_settings() -> None:
    others: tuple[dict[str, Any], ...] = (
        {"temperature": 1.0, "seed": 5},
        {"repetition_penalty": 1.5},
    )

    async def run() -> None:
        at = service()
        device = LocalDevice(tiny.target(), tiny.agreeing_drafter("llama"))
        session = RemoteSession(device, InProcessTransport(at))
        for options in others:
            first = await session.generate(tiny.PROMPTS[0], max_new_tokens=6)
            prompt = [*tiny.PROMPTS[0], *first.token_ids]
            second = await session.generate(prompt, max_new_tokens=6, **options)
            assert second.token_ids == plain("llama", prompt, max_new_tokens=6, **options)
        await session.close()
        await at.stop()

    run_simulated(run(), PASS_S)


@pytest.mark.parametrize("length", [3, 4])
def test_drafts_may_fill_the_context(length: int) -> None:
    """The target then chooses a token that has no place."""

    async def run() -> None:
        target, at = tiny.target(), TargetService(tiny.target())
        prompt = [token % tiny.VOCAB for token in range(target.max_positions - 9)]
        expected = plain("llama", prompt, max_new_tokens=64)
        device = LocalDevice(target, OracleProposer([[*prompt, *expected, *range(8)]]))
        remote = RemoteOptions(draft=Chain(length))
        session = RemoteSession(device, InProcessTransport(at), remote)
        result = await session.generate(prompt, max_new_tokens=64)
        assert (result.token_ids, result.stop_reason) == (expected, "context")
        await session.close()
        await at.stop()

    run_simulated(run(), PASS_S)
