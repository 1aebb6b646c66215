"""Decoding with a device's sessions with a remote target.

A session decodes one text at a time and keeps its caches between turns. `EdgeSource` has a pool of
sessions and continues a conversation in the session that holds its beginning.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any, Protocol

from moaspec.drafting.draft_tree import DraftTree
from moaspec.engine.request_table import check_bias, check_prompt
from moaspec.errors import BusyError, InputError
from moaspec.remote.device.local_parts import Device
from moaspec.remote.device.remote_session import RemoteOptions, RemoteSession
from moaspec.remote.protocol.transport import Transport
from moaspec.remote.server.server_only import RemoteText
from moaspec.sampling.grammar import GrammarProcessor, Grammars
from moaspec.sampling.token_ids import common_length
from moaspec.serve.sources.edge_reader import EventReader, link_state, row_options
from moaspec.serve.sources.source import (
    Cancel,
    Job,
    LinkState,
    Load,
    Report,
    Round,
    SourceFacts,
    Update,
    check_num_texts,
    client_share,
    end_tasks,
    entry_to_evict,
)
from moaspec.target.generation_defaults import GenerationDefaults

CUT_POLL_S = 0.05
"""Interval at which a text checks whether its cut emulated link is restored."""


@dataclass(frozen=True, kw_only=True)
class EdgeLimits:
    """Limits of a device.

    Attributes:
        active: maximum number of texts decoded together, each in its own session.
        waiting: maximum number of texts that wait; further texts are refused.
        share: fraction of `active`, and of all places, that one key may use.
    """

    active: int = 8
    waiting: int = 64
    share: float = 0.5


class Cuttable(Protocol):
    """An emulated link. While `cut` is True no message passes."""

    cut: bool


@dataclass(eq=False)
class _PooledSession:
    """One session of the pool.

    Attributes:
        session: the session.
        tenant, token_ids: the text that its caches hold, and the text's owner.
        busy: whether it is decoding.
        used: sequence number of its latest text; the least recently used is replaced first.
    """

    session: RemoteSession
    tenant: str = ""
    token_ids: Sequence[int] = ()
    busy: bool = False
    used: int = 0


_last_used = attrgetter("used")


@dataclass(frozen=True)
class _Running:
    """An accepted job: its client, and the callback for its news."""

    client: str
    report: Callable[[Update | Exception], None]


class EdgeSource:
    """A `TextSource` whose target is on a server.

    Args:
        device: the device's drafter.
        transport: connects to the server.
        name: model name in responses.
        options: options of every session, except its tenant.
        limits: see `EdgeLimits`.
        faults: an emulated link that the page may cut; None for a real link.
        server_only: decodes jobs without speculation and log-probabilities; None drafts for all
            jobs, which changes no text.
        defaults: sampling defaults; None takes those of the target.
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
        server_only: RemoteText | None = None,
        defaults: GenerationDefaults | None = None,
    ) -> None:
        self._device, self._transport = device, transport
        self._options = options or RemoteOptions()
        self._limits, self._faults = limits or EdgeLimits(), faults
        self._server_only = server_only
        self._sessions: list[_PooledSession] = []
        self._closed_bytes = (0, 0)  # sent and received by closed sessions
        self._running: dict[asyncio.Task[None], _Running] = {}
        self._active = self._count = 0
        self._room: asyncio.Semaphore | None = None
        self._by_client: dict[str, asyncio.Semaphore] = {}
        self.facts = SourceFacts(
            name=name,
            mode="edge",
            tokenizer=device.target.tokenizer,
            vocab_size=device.target.vocab_size,
            max_positions=device.target.max_positions,
            stop_token_ids=device.target.stop_token_ids,
            defaults=device.target.generation_defaults if defaults is None else defaults,
            speculates=True,
            grammars=Grammars(
                device.target.tokenizer,
                vocab_size=device.target.vocab_size,
                stop_token_ids=device.target.stop_token_ids,
            ),
            fingerprint=f"fp_{(device.target.identity.tokenizer_hash or 'edge')[:12]}",
        )

    async def start(self) -> None:
        """Create the semaphore on the running event loop."""
        self._room = asyncio.Semaphore(self._limits.active)

    async def close(self) -> None:
        """End all jobs and close all sessions."""
        tasks = tuple(self._running)
        for task in tasks:
            self._running[task].report(BusyError("The server is shutting down."))
        await end_tasks(*tasks)
        for pooled in tuple(self._sessions):
            await self._close_session(pooled)

    def submit(self, jobs: Sequence[Job], report: Report) -> Cancel:
        """Accept all jobs or none, see `TextSource`."""
        for job in jobs:
            check_prompt(job.prompt_ids, self.facts.vocab_size, self.facts.max_positions)
            check_bias(job.sampling, self.facts.vocab_size)
            if job.sampling.top_logprobs:
                raise InputError("At the edge there are no alternatives: top_logprobs must be 0.")
            if job.sampling.logprobs and self._options.on_cut == "keep":
                raise InputError("Kept text has no log-probabilities; logprobs must be off.")
        places, client = self._limits.active + self._limits.waiting, jobs[0].client
        share = client_share(places, self._limits.share, client)
        check_num_texts(len(jobs), share)
        own = sum(running.client == client for running in self._running.values())
        if own + len(jobs) > share:
            raise BusyError(
                f"This key has {own} requests here, and may have {share}. Try again later."
            )
        if len(self._running) + len(jobs) > places:
            raise BusyError(
                f"The device has {len(self._running)} requests, and takes {places}. Try again "
                "later."
            )
        tasks = [self._start(job, partial(report, index)) for index, job in enumerate(jobs)]
        return partial(end_tasks, *tasks)

    def _start(self, job: Job, report: Callable[[Update | Exception], None]) -> asyncio.Task[None]:
        task = asyncio.create_task(self._run(job, report))
        self._running[task] = _Running(job.client, report)
        task.add_done_callback(self._running.pop)  # also if it never began
        return task

    async def _run(self, job: Job, report: Callable[[Update | Exception], None]) -> None:
        try:
            async for update in self._decode(job):
                report(update)
        except Exception as error:  # noqa: BLE001 - the request raises it
            report(error)

    @property
    def load(self) -> Load:
        """Number of jobs in decoding, and of jobs that wait."""
        return Load(self._active, len(self._running) - self._active)

    @property
    def link(self) -> LinkState | None:
        """State of the session that was used last, and bytes of all sessions."""
        stats = [pooled.session.stats for pooled in self._sessions]
        latest = max(self._sessions, key=_last_used, default=None)
        return LinkState(
            state="up" if latest is None else link_state(latest.session),
            round_trip_s=None if latest is None else latest.session.stats.rtt_s,
            bytes_sent=self._closed_bytes[0] + sum(each.bytes_up for each in stats),
            bytes_received=self._closed_bytes[1] + sum(each.bytes_down for each in stats),
            can_cut=self._faults is not None,
            cut=self._faults is not None and self._faults.cut,
        )

    def cut(self, cut: bool) -> bool:
        """Cut or restore the emulated link; returns False if there is none."""
        if self._faults is not None:
            self._faults.cut = cut
        return self._faults is not None

    async def _decode(self, job: Job) -> AsyncGenerator[Update]:
        """Wait for a place, then decode."""
        assert self._room is not None, "start() comes first"
        async with self._client_places(job.client), self._room:
            self._active += 1
            drafted = job.speculation or job.sampling.logprobs or self._server_only is None
            updates = self._draft(job) if drafted else self._decode_on_server(job)
            try:
                async with contextlib.aclosing(updates):
                    async for update in updates:
                        yield update
            finally:
                self._active -= 1

    def _client_places(self, client: str) -> asyncio.Semaphore:
        """Limits the number of a client's texts in decoding."""
        if client not in self._by_client:
            share = client_share(self._limits.active, self._limits.share, client)
            self._by_client[client] = asyncio.Semaphore(share)
        return self._by_client[client]

    async def _draft(self, job: Job) -> AsyncGenerator[Update]:
        """Draft on the device and verify on the server."""
        options = row_options(job, await self._processors(job))
        reader = EventReader(job, keep=self._options.on_cut == "keep")
        pooled, evicted = self._take_session(job)
        session = pooled.session
        try:
            if evicted is not None:
                await self._close_session(evicted)
            events: Any = session.stream(job.prompt_ids, **options)
            async with contextlib.aclosing(events):
                async for event in events:
                    yield reader.update(event, session)
        except Exception:
            await self._close_session(pooled)  # a refused session cannot be used again
            raise
        finally:
            pooled.busy = False
            pooled.token_ids = (*job.prompt_ids, *session.result.token_ids)

    async def _decode_on_server(self, job: Job) -> AsyncGenerator[Update]:
        """Decode by the server alone. While an emulated link is cut, updates are held back."""
        assert self._server_only is not None, "_decode() has checked"
        options = row_options(job, await self._processors(job))
        events: Any = self._server_only.stream(job.prompt_ids, **options)
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

    async def _processors(self, job: Job) -> tuple[GrammarProcessor, ...]:
        """The job's grammar as a logits processor; compiles it again if it was evicted."""
        if job.grammar is None:
            return ()
        length, compiled = len(job.prompt_ids), self.facts.grammars.processor
        return (await asyncio.to_thread(compiled, job.grammar, length),)

    def _take_session(self, job: Job) -> tuple[_PooledSession, _PooledSession | None]:
        """A session for the job, and another tenant's session that must be closed for it.

        The first of these that exists: the tenant's free session with the longest common prefix
        with the prompt; a new session, if the pool is not full; the tenant's least recently used
        session; a new session in place of another tenant's.
        """
        prompt = job.prompt_ids
        free = [pooled for pooled in self._sessions if not pooled.busy]
        own = [pooled for pooled in free if pooled.tenant == job.tenant]
        best = max(own, key=lambda pooled: common_length(pooled.token_ids, prompt), default=None)
        full, evicted = len(self._sessions) >= self._limits.active, None
        if best is None or not common_length(best.token_ids, prompt):
            best = min(own, key=_last_used) if own and full else self._new_session(job.tenant)
            if full and not own:
                oldest_first = sorted(free, key=_last_used)
                evicted = entry_to_evict(oldest_first, lambda pooled: pooled.tenant)
        self._count += 1
        best.tenant, best.busy, best.used = job.tenant, True, self._count
        return best, evicted

    def _new_session(self, tenant: str) -> _PooledSession:
        options = replace(self._options, tenant=tenant)
        pooled = _PooledSession(RemoteSession(self._device, self._transport, options))
        self._sessions.append(pooled)
        return pooled

    async def _close_session(self, pooled: _PooledSession) -> None:
        self._sessions.remove(pooled)
        await pooled.session.close()
        sent, received = self._closed_bytes
        stats = pooled.session.stats
        self._closed_bytes = (sent + stats.bytes_up, received + stats.bytes_down)
