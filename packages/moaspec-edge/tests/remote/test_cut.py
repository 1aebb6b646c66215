"""A link that is lost and comes back: what is shown meanwhile, and what becomes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import moaspec
import tiny
from links import FaultyTransport, Restartable
from moaspec.model.moa import MoADrafter
from moaspec_core.drafting.tree_shapes import Chain
from moaspec_core.errors import LinkError, RefusedError
from moaspec_edge.device.events import RemoteEvent
from moaspec_edge.device.local_parts import LocalDevice
from moaspec_edge.device.remote_session import RemoteOptions, RemoteSession
from moaspec_edge.server.service import TargetService
from simulated_time import run_simulated

pytestmark = pytest.mark.essential

PROMPT = tiny.PROMPTS[1]
NEW = tiny.NEW_TOKENS
PASS_S = 0.01
SAMPLED: dict[str, Any] = {"temperature": 0.9, "seed": 5}


class Cut:
    """A session whose link falls into a hole after a few tokens.

    Attributes:
        events: of the turn.
        text: as a reader of the events has it.
    """

    def __init__(
        self,
        drafter: Any,
        *,
        heal_after: int | None = 6,
        **options: Any,
    ) -> None:
        self.target, self.heal_after = tiny.target(), heal_after
        trained = drafter if isinstance(drafter, MoADrafter) else None
        self.server = Restartable(lambda: TargetService(self.target, trained))
        self.transport = FaultyTransport(self.server.transport)
        remote = RemoteOptions(draft=Chain(2), **options)
        device = LocalDevice(self.target, drafter)
        self.session = RemoteSession(device, self.transport, remote)
        self.events: list[RemoteEvent] = []
        self.text: list[int] = []
        self.was_cut = False

    async def run(
        self, between: Callable[[], Awaitable[None]] | None = None, **options: Any
    ) -> None:
        async for event in self.session.stream(PROMPT, max_new_tokens=NEW, **options):
            self.events.append(event)
            self.text[event.start :] = event.token_ids
            if len(self.text) >= 5 and not self.was_cut:
                self.transport.hole = self.was_cut = True
            if sum(bool(one.num_provisional) for one in self.events) == self.heal_after:
                if between is not None:
                    await between()
                self.heal_after, self.transport.hole = None, False

    async def end(self) -> None:
        await self.session.close()
        await self.server.service.stop()


@pytest.mark.slow
@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("agrees", [False, True])
@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("num_target_layers", [0, 2])
def test_rollback_ends_with_the_local_text(
    num_target_layers: int, options: dict[str, Any], agrees: bool, restart: bool
) -> None:
    async def run() -> None:
        target = tiny.target()
        drafter = tiny.agreeing_drafter("llama") if agrees else tiny.random_drafter(target)
        cut = Cut(drafter, num_target_layers=num_target_layers)
        await cut.run(cut.server.restart if restart else None, **options)
        expected = moaspec.generate(target, PROMPT, max_new_tokens=NEW, **options)
        assert cut.text == expected.token_ids == cut.session.result.token_ids
        stats = cut.session.stats
        assert stats.provisional >= 6
        assert stats.cuts >= 1
        assert stats.reconnects >= 1
        assert (stats.reopened > 0) is restart
        alone = [event for event in cut.events if event.num_provisional]
        assert alone[0].link == "down"
        assert sum(event.num_corrected for event in cut.events) == stats.corrected
        assert cut.events[-1].num_provisional == 0
        await cut.end()

    run_simulated(run(), PASS_S)


def test_a_drafter_that_agrees_has_nothing_taken_back() -> None:
    """Greedy text that the drafter knows by heart: one verdict takes all of it."""

    async def run() -> None:
        cut = Cut(tiny.ReplayDrafting([[*PROMPT, *tiny.own_texts("llama")[1]]]))
        await cut.run()
        assert cut.text == list(tiny.own_texts("llama")[1])
        assert cut.session.stats.provisional >= 6
        assert cut.session.stats.corrected == 0
        await cut.end()

    run_simulated(run(), PASS_S)


@pytest.mark.slow
def test_keep_leaves_what_was_shown() -> None:
    """The text goes on from the kept tokens as the target would go on from them."""

    async def run() -> None:
        cut = Cut(tiny.random_drafter(tiny.target()), on_cut="keep")
        await cut.run()
        assert cut.session.stats.corrected == 0
        assert cut.text == cut.session.result.token_ids
        kept = [e.start for e in cut.events if e.num_provisional]
        after = kept[-1] + 1
        alone = moaspec.generate(
            tiny.target(), [*PROMPT, *cut.text[:after]], max_new_tokens=NEW - after
        )
        assert cut.text[after:] == alone.token_ids
        assert cut.text != list(tiny.own_texts("llama")[1])
        await cut.end()

    run_simulated(run(), PASS_S)


@pytest.mark.slow
def test_keep_ends_without_a_server_and_goes_on_with_one() -> None:
    async def run() -> None:
        drafter = tiny.random_drafter(tiny.target())
        cut = Cut(drafter, on_cut="keep", heal_after=None)
        await cut.run()
        assert len(cut.text) == NEW
        assert cut.events[-1].stop_reason == "max_new_tokens"
        cut.transport.hole = False
        while cut.session.stats.state != "up":
            await asyncio.sleep(0.01)
        longer = [*PROMPT, *cut.text, 9]
        result = await cut.session.generate(longer, max_new_tokens=5)
        assert (
            result.token_ids == moaspec.generate(tiny.target(), longer, max_new_tokens=5).token_ids
        )
        await cut.end()

    run_simulated(run(), PASS_S)


@pytest.mark.slow
def test_wait_shows_verified_tokens_only() -> None:
    async def run() -> None:
        cut = Cut(tiny.random_drafter(tiny.target()), on_cut="wait")

        async def heal() -> None:
            while cut.session.stats.cuts == 0:
                await asyncio.sleep(0.01)
            cut.transport.hole = False

        healing = asyncio.create_task(heal())
        await cut.run()
        await healing
        assert cut.text == list(tiny.own_texts("llama")[1])
        assert cut.session.stats.provisional == 0
        await cut.end()

    run_simulated(run(), PASS_S)


@pytest.mark.slow
def test_an_end_that_the_target_does_not_see_is_none() -> None:
    """The device thinks that the text has ended, is told otherwise, and is cut off again."""
    text = list(tiny.own_texts("llama")[1])
    stop = next(token for token in range(tiny.VOCAB) if token not in text)

    async def run() -> None:
        known = [[*PROMPT, *text[:9], stop], [*PROMPT, *text]]
        cut = Cut(tiny.ReplayDrafting(known))
        got: list[int] = []
        cuts = 0
        async for event in cut.session.stream(PROMPT, max_new_tokens=NEW, stop_token_ids=(stop,)):
            got[event.start :] = event.token_ids
            if not event.num_provisional and len(got) >= (5, 12, NEW + 1)[cuts]:
                cut.transport.hole, cuts = True, cuts + 1
            elif event.num_provisional and (stop in got or cuts == 2):
                cut.transport.hole = False
        assert got == text
        assert cuts == 2
        await cut.end()

    run_simulated(run(), PASS_S)


@pytest.mark.slow
def test_a_link_that_does_not_come_back_is_given_up() -> None:
    async def run() -> None:
        drafter = tiny.random_drafter(tiny.target())
        cut = Cut(drafter, heal_after=None, give_up_s=2.0, max_provisional=4)
        with pytest.raises(LinkError, match=r"for 2 s"):
            await cut.run()
        assert cut.session.stats.provisional == 4
        await cut.end()

    run_simulated(run(), PASS_S)


def test_another_drafter_or_target_is_refused() -> None:
    async def run() -> None:
        target = tiny.target()
        server = Restartable(lambda: TargetService(target, tiny.random_drafter(target)))
        for device, why in (
            (LocalDevice(target, tiny.random_drafter(target, seed=9)), "Export the device bundle"),
            (LocalDevice(tiny.target("qwen2"), moaspec.NgramProposer()), "model_type 'qwen2'"),
        ):
            session = RemoteSession(device, server.transport())
            with pytest.raises(RefusedError, match=why):
                await session.generate(PROMPT, max_new_tokens=4)
            await session.close()
        await server.service.stop()

    run_simulated(run(), PASS_S)
