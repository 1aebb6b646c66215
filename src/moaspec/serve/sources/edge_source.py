"""Text from a device's sessions with a remote target.

A session holds one text at a time, and its caches are kept between turns. So there is a pool of
them, and a conversation goes on in the session that holds its beginning.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Unpack

from moaspec.drafting.draft_tree import DraftTree
from moaspec.engine.request_state import check_bias, check_prompt
from moaspec.engine.result import Event
from moaspec.errors import BusyError, InputError
from moaspec.generation.options import RowOptions
from moaspec.remote.device.local_parts import Device
from moaspec.remote.device.remote_session import RemoteOptions, RemoteSession
from moaspec.remote.protocol.transport import Transport
from moaspec.sampling.grammar import GrammarProcessor, Grammars
from moaspec.sampling.token_ids import common_length
from moaspec.serve.sources.edge_reader import Reader, link_state, row_options
from moaspec.serve.sources.source import (
    Job,
    LinkState,
    Load,
    Round,
    SourceFacts,
    Update,
    Updates,
    check_number,
    first_to_go,
    share_of,
)
from moaspec.target.generation_defaults import GenerationDefaults

CUT_POLL_S = 0.05
"""How often a held-back text looks whether its emulated link is back."""


@dataclass(frozen=True, kw_only=True)
class EdgeLimits:
    """How much a device takes on.

    Attributes:
        active: texts that are decoded at a time; each has a session.
        waiting: texts that may wait for one; more are refused.
        share: of `active` texts, and of all, that one key may have.
    """

    active: int = 8
    waiting: int = 64
    share: float = 0.5


class Cuttable(Protocol):
    """An emulated link: while `cut` is True nothing passes."""

    cut: bool


class ServerOnlySource(Protocol):
    """The server decoding by itself; `moaspec.remote.server.server_only.RemoteText` is one."""

    def stream(
        self, prompt_ids: Sequence[int], *, speculate: bool = False, **options: Unpack[RowOptions]
    ) -> AsyncIterator[Event]:
        """Verified tokens as they come."""
        ...


@dataclass(eq=False)
class _Seat:
    """One session of the pool.

    Attributes:
        tenant, token_ids: whose text it holds, and which.
        busy: whether it decodes.
        used: number of its latest text; the least recently used is taken over first.
    """

    session: RemoteSession
    tenant: str = ""
    token_ids: Sequence[int] = ()
    busy: bool = False
    used: int = 0


def _last_used(seat: _Seat) -> int:
    return seat.used


class EdgeSource:
    """A `TextSource` whose target is on a server.

    Args:
        device: drafts.
        transport: leads to the server.
        name: how responses call the model.
        options: of every session, but for its tenant.
        limits: see `EdgeLimits`.
        faults: of an emulated link that the page may cut; None: the link is what it is.
        alone: decodes what asks for no speculation, and for no log-probabilities, which it has
            not; None: the device drafts for all, which changes no text.
        defaults: hold where a request says nothing; None takes the target's.
    """

    def __init__(
        self,
        device: Device,
        transport: Transport,
        *,
        name: str,
        options: RemoteOptions | None = None,
        limits: EdgeLimits | None = None,
        faults: Cuttable | None = None,
        alone: ServerOnlySource | None = None,
        defaults: GenerationDefaults | None = None,
    ) -> None:
        self._device, self._transport = device, transport
        self._options = options or RemoteOptions()
        self._limits, self._faults, self._alone = limits or EdgeLimits(), faults, alone
        self._seats: list[_Seat] = []
        self._gone = (0, 0)  # bytes of sessions that ended
        self._jobs: set[_EdgeUpdates] = set()
        self._active = self._count = 0
        self._room: asyncio.Semaphore | None = None
        self._turns: dict[str, asyncio.Semaphore] = {}
        self.facts = SourceFacts(
            name=name,
            mode="edge",
            tokenizer=device.tokenizer,
            vocab_size=device.vocab_size,
            max_positions=device.max_positions,
            stop_token_ids=device.stop_token_ids,
            defaults=device.generation_defaults if defaults is None else defaults,
            speculates=True,
            grammars=Grammars(
                device.tokenizer,
                vocab_size=device.vocab_size,
                stop_token_ids=device.stop_token_ids,
            ),
            fingerprint=f"fp_{(device.identity.tokenizer_hash or 'edge')[:12]}",
        )

    async def start(self) -> None:
        """See `TextSource`."""
        self._room = asyncio.Semaphore(self._limits.active)

    async def close(self) -> None:
        """See `TextSource`."""
        for job in tuple(self._jobs):
            await job.refuse(BusyError("The server is shutting down."))
        for seat in tuple(self._seats):
            await self._clear(seat)

    def open(self, jobs: Sequence[Job]) -> list[Updates]:
        """See `TextSource`."""
        for job in jobs:
            check_prompt(job.prompt_ids, self.facts.vocab_size, self.facts.max_positions)
            check_bias(job.sampling, self.facts.vocab_size)
            if job.sampling.top_logprobs:
                raise InputError("At the edge there are no alternatives: top_logprobs must be 0.")
            if job.sampling.logprobs and self._options.on_cut == "keep":
                raise InputError("Kept text has no log-probabilities; logprobs must be off.")
        most = self._limits.active + self._limits.waiting
        client = jobs[0].client
        share = share_of(most, self._limits.share, client)
        check_number(len(jobs), share)
        own = sum(one.client == client for one in self._jobs)
        if own + len(jobs) > share:
            raise BusyError(
                f"This key has {own} requests here, and may have {share}. Try again later."
            )
        if len(self._jobs) + len(jobs) > most:
            raise BusyError(
                f"The device has {len(self._jobs)} requests, and takes {most}. Try again later."
            )
        opened = [_EdgeUpdates(self, job) for job in jobs]
        self._jobs.update(opened)
        return list[Updates](opened)

    @property
    def load(self) -> Load:
        """See `TextSource`."""
        return Load(self._active, len(self._jobs) - self._active)

    @property
    def link(self) -> LinkState | None:
        """Of the session that was used last; bytes of all."""
        stats = [seat.session.stats for seat in self._seats]
        latest = max(self._seats, key=lambda seat: seat.used, default=None)
        return LinkState(
            state="up" if latest is None else link_state(latest.session),
            round_trip_s=None if latest is None else latest.session.stats.rtt_s,
            bytes_sent=self._gone[0] + sum(one.bytes_up for one in stats),
            bytes_received=self._gone[1] + sum(one.bytes_down for one in stats),
            can_cut=self._faults is not None,
            cut=self._faults is not None and self._faults.cut,
        )

    def cut(self, cut: bool) -> bool:
        """See `TextSource`."""
        if self._faults is not None:
            self._faults.cut = cut
        return self._faults is not None

    async def decode(self, job: Job) -> AsyncGenerator[Update]:
        """One text, from when there is a session for it."""
        assert self._room is not None, "start() comes first"
        async with self._turn(job.client), self._room:
            self._active += 1
            drafted = job.speculation or job.sampling.logprobs or self._alone is None
            updates = self._decode_here(job) if drafted else self._decode_alone(job)
            try:
                async with contextlib.aclosing(updates):
                    async for update in updates:
                        yield update
            finally:
                self._active -= 1

    def _turn(self, client: str) -> asyncio.Semaphore:
        """Keeps a client to its share of what is decoded at a time."""
        if client not in self._turns:
            share = share_of(self._limits.active, self._limits.share, client)
            self._turns[client] = asyncio.Semaphore(share)
        return self._turns[client]

    async def _decode_here(self, job: Job) -> AsyncGenerator[Update]:
        """Drafted here, verified there."""
        options = row_options(job, await self._ruled(job))
        reader = Reader(job, keep=self._options.on_cut == "keep")
        seat, ends = self._take_seat(job)
        try:
            if ends is not None:
                await self._clear(ends)
            events: Any = seat.session.stream(job.prompt_ids, **options)
            async with contextlib.aclosing(events):
                async for event in events:
                    yield reader.take(event, seat.session)
        except Exception:
            await self._clear(seat)  # a session that was refused stays refused
            raise
        finally:
            seat.busy = False
            seat.token_ids = (*job.prompt_ids, *seat.session.result.token_ids)

    async def _decode_alone(self, job: Job) -> AsyncGenerator[Update]:
        """By the server, for comparison; what an emulated link holds back comes when it is back."""
        assert self._alone is not None, "decode() has asked"
        options = row_options(job, await self._ruled(job))
        events: Any = self._alone.stream(job.prompt_ids, **options)
        first = True
        async with contextlib.aclosing(events):
            async for event in events:
                while self._faults is not None and self._faults.cut:
                    await asyncio.sleep(CUT_POLL_S)
                yield Update(
                    token_ids=event.token_ids,
                    sources=event.sources,
                    round=None if first else Round(DraftTree(), (), len(event.token_ids)),
                    stop_reason=event.stop_reason,
                    seed=job.sampling.seed,
                )
                first = False

    def leave(self, job: _EdgeUpdates) -> None:
        """A job has ended, however it did."""
        self._jobs.discard(job)

    async def _ruled(self, job: Job) -> tuple[GrammarProcessor, ...]:
        """The grammar, which the server will keep to; what was compiled may be forgotten by now."""
        if job.grammar is None:
            return ()
        length, compiled = len(job.prompt_ids), self.facts.grammars.processor
        return (await asyncio.to_thread(compiled, job.grammar, length),)

    def _take_seat(self, job: Job) -> tuple[_Seat, _Seat | None]:
        """A session for the job, and another tenant's that must end for it.

        It is the tenant's free one that holds most of the prompt, else a new one while there is
        room, else the tenant's oldest, else a new one in the place of another tenant's.
        """
        free = [seat for seat in self._seats if not seat.busy]
        own = [seat for seat in free if seat.tenant == job.tenant]
        best = max(own, key=lambda one: common_length(one.token_ids, job.prompt_ids), default=None)
        full, ends = len(self._seats) >= self._limits.active, None
        if best is None or not common_length(best.token_ids, job.prompt_ids):
            best = min(own, key=_last_used) if own and full else self._new_seat(job.tenant)
            ends = None
            if full and not own:
                ends = first_to_go(sorted(free, key=_last_used), lambda seat: seat.tenant)
        self._count += 1
        best.tenant, best.busy, best.used = job.tenant, True, self._count
        return best, ends

    def _new_seat(self, tenant: str) -> _Seat:
        options = replace(self._options, tenant=tenant)
        seat = _Seat(RemoteSession(self._device, self._transport, options))
        self._seats.append(seat)
        return seat

    async def _clear(self, seat: _Seat) -> None:
        """End a session, and forget what it holds."""
        self._seats.remove(seat)
        await seat.session.close()
        stats = seat.session.stats
        self._gone = (self._gone[0] + stats.bytes_up, self._gone[1] + stats.bytes_down)


class _EdgeUpdates:
    """What becomes of one job; decoding goes on whether or not somebody reads."""

    def __init__(self, source: EdgeSource, job: Job) -> None:
        self._source, self.client = source, job.client
        self._told: asyncio.Queue[Update | Exception] = asyncio.Queue()
        self._ended = False
        self._task = asyncio.create_task(self._decode(job))
        self._task.add_done_callback(lambda _: source.leave(self))  # even if it never began

    def __aiter__(self) -> _EdgeUpdates:
        return self

    async def __anext__(self) -> Update:
        if self._ended:
            raise StopAsyncIteration
        news = await self._told.get()
        self._ended = isinstance(news, Exception) or news.stop_reason is not None
        if isinstance(news, Exception):
            raise news
        return news

    async def aclose(self) -> None:
        """See `Updates`."""
        self._ended = True
        await self._end()

    async def refuse(self, error: BusyError) -> None:
        """End it; whoever reads hears why."""
        self._told.put_nowait(error)
        await self._end()

    async def _end(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _decode(self, job: Job) -> None:
        try:
            async for update in self._source.decode(job):
                self._told.put_nowait(update)
        except Exception as error:  # noqa: BLE001 - whoever reads raises it
            self._told.put_nowait(error)
