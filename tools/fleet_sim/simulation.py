"""A fleet in simulated time.

Scheduler, budget and draft policy are the real ones: each server is a `SharedVerifier` with its
`PassBudget`, each device has a `LinkPolicy`. Replaced are what takes time and what decides: a pass
lasts as long as a cost table says, drafts are right where a trace has it, messages take as long as
a link says. An event loop with a clock of its own skips all waiting.

Where drafts do not pay, the server streams tokens: the message that begins a stream crosses the
link once, as the last token of it does.

Assumptions: servers and devices differ in nothing but chance; a text goes to a server by chance, as
by a hash of its prompt; a device always writes, at first from somewhere in a text; what crosses a
link does not wait for other messages, and a lost packet is sent again after `RETRANSMIT_S`. Drafts
at one place of a text are right or wrong regardless of whether the device drafted ahead.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import selectors
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

import numpy as np

from fleet_sim.traces import Trace
from moaspec_core.drafting.draft_tree import DraftTree
from moaspec_core.drafting.protocols import VerifyRequest, VerifyResult
from moaspec_core.policy.cost_model import PRIOR, CostTable
from moaspec_core.policy.pass_budget import PassBudget
from moaspec_edge.device.draft_ahead import MIN_STEPS
from moaspec_edge.device.events import LinkStats, RoundTrip
from moaspec_edge.device.link import DEAD_AFTER_S
from moaspec_edge.device.link_policy import LinkPolicy
from moaspec_edge.emulation import LinkProfile
from moaspec_edge.protocol.wire import chain
from moaspec_edge.server.shared_verifier import PREFILL_TOKENS, PassOptions, SharedVerifier

Mode = Literal["plain", "sync", "ahead"]
"""Plain: servers stream tokens and nobody drafts. Sync and ahead: devices draft, and in `ahead`
they do so while they wait."""

RETRANSMIT_S = 0.2
"""Least time after which TCP sends a lost packet again (RFC 6298 says 1 s, Linux takes 0.2)."""


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """What is simulated.

    Attributes:
        mode: see `Mode`.
        devices, servers: numbers of them.
        costs: of a server's passes.
        traces: that devices take turns with.
        link: of each device.
        step_s: of a drafted token on a device.
        fixed: length of all drafts; 0 lets `LinkPolicy` choose.
        token_bytes: of one verified token's activations; 0: the drafter needs none.
        row_s: a server's time for one row besides its pass: messages, and the session.
        turn_s: time that a device needs for a round besides drafting.
        together: whether the devices share one processor, as scripted ones do.
        sticky: whether a device stays with its server for all texts, and begins with a whole one.
        budget: whether servers drop drafts that do not pay.
        rate: see `PassBudget`.
        seconds: that are counted, after `warm_s`.
        lost: servers that fail at once in the middle of the time.
        options: of a pass.
    """

    mode: Mode
    devices: int
    servers: int
    costs: CostTable
    traces: Sequence[Trace]
    link: LinkProfile
    step_s: float = 0.02
    fixed: int = 0
    token_bytes: int = 1040
    row_s: float = 0.0005
    turn_s: float = 0.0
    together: bool = False
    sticky: bool = False
    budget: bool = True
    rate: float = PRIOR[0][0]
    seconds: float = 20.0
    warm_s: float = 10.0
    lost: int = 0
    options: PassOptions = field(default_factory=PassOptions)
    seed: int = 0


@dataclass
class Measured:
    """What happened.

    Attributes:
        pieces: of each verdict: when it arrived, how many seconds after the one before, how many
            tokens, and whether its device had lost its server.
        passes: when each pass of any server began, and how many rows it had.
    """

    pieces: list[tuple[float, float, int, bool]] = field(default_factory=list)
    passes: list[tuple[float, int]] = field(default_factory=list)

    def tokens_per_s(self, start_s: float, stop_s: float) -> float:
        """Tokens that arrived in that time."""
        tokens = sum(count for at, _, count, _ in self.pieces if start_s <= at < stop_s)
        return tokens / (stop_s - start_s)

    def rows(self, start_s: float, stop_s: float) -> float:
        """Rows of a pass, on average."""
        rows = [rows for at, rows in self.passes if start_s <= at < stop_s]
        return sum(rows) / max(1, len(rows))

    def token_s(
        self, start_s: float, stop_s: float, percents: Sequence[float] = (50, 99)
    ) -> list[float]:
        """Percentiles of the seconds per token; tokens of a verdict share its time equally."""
        found = [(s / n, n) for at, s, n, _ in self.pieces if start_s <= at < stop_s and n]
        if not found:
            return [float("nan")] * len(percents)
        seconds, counts = np.array(found).T
        return [
            float(one) for one in np.percentile(np.repeat(seconds, counts.astype(int)), percents)
        ]


class SkippingLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer."""

    def __init__(self) -> None:
        self._skipping = _SkippingSelector()
        super().__init__(self._skipping)

    def time(self) -> float:
        """Simulated seconds."""
        return self._skipping.now_s

    def stand_still(self, seconds: float) -> None:
        """Let time pass while nothing runs, as in a suspended device."""
        self._skipping.now_s += seconds


class _SkippingSelector(selectors.DefaultSelector):
    now_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        found = super().select(0)
        if timeout is None and not found:
            raise RuntimeError("The simulation waits for something that cannot come.")
        if not found and timeout:
            self.now_s += timeout
        return found


@contextmanager
def simulated_clock() -> Iterator[None]:
    """Let `time.monotonic` be the running loop's clock, in this thread only.

    Event loops of other threads time their waits by it, too.
    """
    simulated, real, here = asyncio.get_running_loop().time, time.monotonic, threading.get_ident()

    def clock() -> float:
        return simulated() if threading.get_ident() == here else real()

    with mock.patch("time.monotonic", clock):
        yield


class Server(SharedVerifier):
    """A target server whose passes take simulated time."""

    def __init__(self, fleet: Fleet, found: Measured) -> None:
        budget = (
            PassBudget(fleet.costs, fleet.rate) if fleet.budget and fleet.mode != "plain" else None
        )
        verifier: Any = SimpleNamespace(close=lambda _: None, reads_whole=False)
        super().__init__(verifier, fleet.options, budget=budget)
        self._fleet, self._found = fleet, found
        self.failed = asyncio.Event()
        self.places: dict[int, int] = {}
        """How many drafts are right, by the row's place in its text."""

    async def _pass(self, requests: list[VerifyRequest]) -> list[VerifyResult | Exception]:
        results: list[VerifyResult | Exception] = []
        self._found.passes.append((asyncio.get_running_loop().time(), len(requests)))
        encoded = 0
        for request in requests:
            accepted = min(len(request.tree.tokens), self.places.get(request.cache_row, 0))
            results.append(VerifyResult(tuple(range(accepted)), 1))
            encoded += (len(request.new_tokens) + accepted) * request.encode
        costs = self._fleet.costs
        seconds = pass_s(costs, requests) + len(requests) * self._fleet.row_s
        await asyncio.sleep(seconds + (float(costs.accept_s(encoded)) if encoded else 0.0))
        if self.failed.is_set():
            await asyncio.Event().wait()
        return results


def pass_s(costs: CostTable, requests: Sequence[VerifyRequest]) -> float:
    """Seconds of a pass; tokens of a prompt need no head."""
    prompts = sum(len(request.new_tokens) - 1 for request in requests)
    tokens = len(requests) + sum(len(request.tree.tokens) for request in requests)
    context = sum(request.num_verified for request in requests) // len(requests)
    body = replace(costs, head_s=(0.0,) * len(costs.head_s))
    head_s = costs.verify_s(tokens, context) - body.verify_s(tokens, context)
    return float(body.verify_s(prompts + tokens, context) + head_s) + costs.plain_rest_s


class Device:
    """A device that writes one text after another."""

    def __init__(self, world: World, number: int) -> None:
        self._world, self._fleet, self._number = world, world.fleet, number
        self._random = random.Random(f"{world.fleet.seed}-{number}")
        self._stats = LinkStats(rtt_s=2 * self._fleet.link.delay_s)
        self._lost = self._streams = False
        self._steps = 0  # draft steps whose time is known
        self._under_way_s = 0.0  # that the tokens of a stream take
        self.policy = LinkPolicy(
            wait_s=lambda: self._stats.wait_s,
            step_s=lambda: self._fleet.step_s,
            plain_s=lambda: self._stats.pass_s,
            measuring=lambda: self._steps < MIN_STEPS,
            ahead=self._fleet.mode == "ahead",
        )

    async def run(self) -> None:
        """Write for ever."""
        after_s = self._random.random() * self._fleet.warm_s / 2
        if self._fleet.sticky:
            after_s = 2.0 * self._number / self._fleet.devices  # as in real runs
        await asyncio.sleep(after_s)
        for turn in itertools.count():
            traces = self._fleet.traces
            trace = traces[(self._number + turn) % len(traces)]
            if not turn and not self._fleet.sticky:
                # Somewhere in a text, so that not all devices end theirs at once.
                place = self._random.randrange(len(trace.right))
                trace = Trace(trace.prompt + place, trace.right[place:])
            await self._write(trace)

    async def _write(self, trace: Trace) -> None:
        at = self._number if self._fleet.sticky else None
        self._server = self._world.server(self._random, at)
        self._row = self._server.lease(str(self._number))
        self._trace, self._length, self._ready = trace, 0, 0
        self._lost = self._streams = False
        await self._read_prompt()
        self._at_s = self._world.now_s
        while self._length < len(trace.right):
            try:
                await self._round()
            except ServerLostError:
                # It is noticed by its silence; the text is opened again elsewhere.
                await asyncio.sleep(DEAD_AFTER_S)
                self._lost, self._streams, self._ready = True, False, 0
                self._server = self._world.server(self._random)
                self._row = self._server.lease(str(self._number))
                await self._read_prompt()
        self._server.close(self._row)

    async def _read_prompt(self) -> None:
        """Have prompt and text so far encoded, in pieces; it ends with a token."""
        total, done = self._trace.prompt + self._length, 0
        size = PREFILL_TOKENS
        await asyncio.sleep(self._delay_s())
        while total - done > size:
            await self._ask(done, size, DraftTree(), text_length=total)
            done += size
        _, pass_s = await self._ask(done, total - done, DraftTree())
        self._note(self._world.now_s, pass_s)
        if self._fleet.mode != "plain":  # a stream goes on at once
            await asyncio.sleep(self._delay_s(total))
        self._length += 1

    async def _round(self) -> None:
        drafting = self._fleet.mode != "plain"
        tree = await self._draft() if drafting else None
        verified = self._trace.prompt + self._length - 1
        if self._streams and tree is not None:
            await asyncio.sleep(self._under_way_s)  # until the last streamed token is there
        asked_s = self._world.now_s
        if drafting and not (self._streams and tree is None):
            await asyncio.sleep(self._delay_s())
            self._under_way_s = self._delay_s(1)
        self._streams = drafting and tree is None
        result, pass_s = await self._ask(verified, 1, tree or DraftTree())
        assert result.tree is not None
        count = len(result.accepted) + 1
        if tree is not None:
            await asyncio.sleep(self._delay_s(count))
        self._note(asked_s, pass_s, drafts=len(tree.tokens) if tree is not None else 0)
        if tree is not None:
            if tree.tokens:
                self.policy.record_round(result.tree, result.accepted)
            self._prepare(len(tree.tokens), count, asked_s)
        self._length += count
        now_s = self._world.now_s + self._under_way_s * self._streams
        self._world.found.pieces.append((now_s, now_s - self._at_s, count, self._lost))
        self._at_s, self._lost = now_s, False

    def _note(self, asked_s: float, pass_s: float, drafts: int = 0) -> None:
        """Note a verdict that is there now, as sessions do; dropped drafts count as sent ones."""
        self._stats.add_round(RoundTrip(asked_s, self._world.now_s, pass_s, drafts, 0, 0))

    async def _draft(self) -> DraftTree | None:
        """Draft what is not ready; None where drafts do not pay."""
        fleet, left = self._fleet, len(self._trace.right) - self._length - 1
        shape = self.policy.shape(0, 1)
        if shape is None and not fleet.fixed:
            self._ready = 0
            if self.policy.observes:
                self._steps += 1
                self.policy.observe(self._trace.right[self._length - 1] > 0)
            return None
        depth = fleet.fixed or (shape.depth if shape else 0)
        wanted = max(0, min(depth, left))
        async with self._world.processor:
            await asyncio.sleep(fleet.turn_s)
        await asyncio.sleep(max(0, wanted - self._ready) * fleet.step_s)
        self._ready = 0
        return chain([1] * wanted)

    def _prepare(self, drafted: int, count: int, asked_s: float) -> None:
        """Note how much was drafted since `asked_s`, if the text went as expected."""
        right = self._trace.right[self._length - 1]
        if self._fleet.mode == "ahead" and count == drafted + 1 and right > drafted:
            # The first token drafted ahead is the bonus token.
            ahead = int((self._world.now_s - asked_s) / self._fleet.step_s)
            self._ready = max(0, min(ahead, drafted + 1) - 1)

    async def _ask(
        self, verified: int, new: int, tree: DraftTree, **more: Any
    ) -> tuple[VerifyResult, float]:
        """One pass of the server; returns the result and how long the pass took.

        Raises:
            ServerLostError: it has failed.
        """
        server, row = self._server, self._row
        place = self._length - 1
        server.places[row] = self._trace.right[place] if place >= 0 else 0
        drafting = self._fleet.mode != "plain"
        encode = drafting and self._fleet.token_bytes > 0
        asked = VerifyRequest(row, verified, (1,) * new, tree, encode=encode, **more)
        if not self._fleet.lost:
            return await server.decide(asked)
        answer = asyncio.ensure_future(server.decide(asked))
        failed = asyncio.ensure_future(server.failed.wait())
        done, _ = await asyncio.wait({answer, failed}, return_when=asyncio.FIRST_COMPLETED)
        failed.cancel()
        if answer in done:
            return answer.result()
        answer.cancel()
        raise ServerLostError

    def _delay_s(self, tokens: int = 0) -> float:
        """Of one message, with the activations of so many tokens."""
        link = self._fleet.link
        delay_s = max(0.0, self._random.gauss(link.delay_s, link.jitter_s))
        if tokens and link.bits_per_s:
            delay_s += 8 * min(tokens, 32) * self._fleet.token_bytes / link.bits_per_s
        while self._random.random() < link.loss:
            delay_s += RETRANSMIT_S
        return delay_s


class ServerLostError(Exception):
    """The server of a device does not answer any more."""


class World:
    """A fleet that runs."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet, self.found = fleet, Measured()
        self.servers = [Server(fleet, self.found) for _ in range(fleet.servers)]
        self.processor = asyncio.Lock() if fleet.together else nullcontext()

    @property
    def now_s(self) -> float:
        """Simulated time."""
        return asyncio.get_running_loop().time()

    def server(self, drawn: random.Random, device: int | None = None) -> Server:
        """A server that has not failed; with a number, the one of that device."""
        if device is not None:
            return self.servers[device % len(self.servers)]
        while (one := drawn.choice(self.servers)).failed.is_set():
            pass
        return one

    async def run(self) -> Measured:
        """Let the devices write until the time is over."""
        fleet = self.fleet
        devices = [asyncio.create_task(Device(self, i).run()) for i in range(fleet.devices)]
        await asyncio.sleep(fleet.warm_s + fleet.seconds / 2)
        for server in self.servers[: fleet.lost]:
            server.failed.set()
        await asyncio.sleep(fleet.seconds / 2)
        for device in devices:
            device.cancel()
        await asyncio.gather(*devices, return_exceptions=True)
        for server in self.servers:
            await server.stop()
        return self.found


def simulate(fleet: Fleet) -> Measured:
    """What a fleet does."""

    async def run() -> Measured:
        with simulated_clock():
            return await World(fleet).run()

    with asyncio.Runner(loop_factory=SkippingLoop) as runner:
        return runner.run(run())
