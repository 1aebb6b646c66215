"""Decoding with a device's sessions with a remote target.

A session decodes one text at a time and keeps its caches between turns. `EdgeSource` has a pool of
sessions and continues a conversation in the session that holds its beginning.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from heapq import heapify, heappop, heappush
from operator import attrgetter
from typing import Any, Literal, cast

from moaspec_core.engine.generate_options import GenerateOptions
from moaspec_core.errors import InputError, LinkError, RefusedError, ServerError, WireError
from moaspec_core.sampling.generation_defaults import GenerationDefaults
from moaspec_core.sampling.token_ids import common_length
from moaspec_core.support.tasks import end_tasks
from moaspec_edge.device.device_parts import Device
from moaspec_edge.device.events import RemoteEvent
from moaspec_edge.device.remote_session import RemoteOptions, RemoteSession
from moaspec_edge.device.server_text import RemoteText
from moaspec_edge.emulation import Faults
from moaspec_edge.protocol.fleet import Fleet
from moaspec_edge.protocol.transport import Transport
from moaspec_serve.sources.source import (
    AnswerLength,
    Cancel,
    Job,
    LinkState,
    Load,
    Places,
    RecentMean,
    Report,
    SourceInfo,
    SourceLimits,
    TextSource,
    TokenSource,
    Update,
    client_share,
    entry_to_evict,
)

log = logging.getLogger("moaspec.http.edge_source")

UPDATE_EVERY_S = 60.0  # interval at which a device asks for a new version of its drafter
REACH_EVERY_S = 2.0  # the same while no server has answered
CUT_POLL_S = 0.05  # interval at which a text checks whether its cut emulated link is restored


@dataclass(frozen=True, kw_only=True)
class EdgeLimits(SourceLimits):
    """Limits of a device. Each text that is decoded has its own session."""

    active: int = 8
    waiting: int = 64


@dataclass(eq=False)
class _PooledSession:
    """One session of the pool."""

    session: RemoteSession
    # tenant, token_ids: the text that its caches hold, and the text's owner.
    tenant: str = ""
    token_ids: Sequence[int] = ()
    busy: bool = False
    used: int = 0  # sequence number of its latest text; the least recently used is replaced first


_last_used = attrgetter("used")
News = Callable[[Update | Exception], None]
"""Receives the updates of a job, or the error that ended it."""


@dataclass(eq=False)
class _RunningJob:
    """A job that waits or is decoded."""

    job: Job
    report: News
    started_s: float | None = None  # when its decoding began
    written: int = 0  # tokens that were reported

    @property
    def seconds(self) -> float:
        """Time since its decoding began."""
        return 0.0 if self.started_s is None else time.monotonic() - self.started_s


@dataclass
class _EventReader:
    """Turns a session's events, which replace the end of a text, into updates, which extend it."""

    job: Job
    keep: bool  # whether provisional tokens become final without verification after a cut
    provisional: tuple[int, ...] = ()  # tokens after the final ones, which may still change
    begun: bool = False  # whether there are final tokens

    def update(self, event: RemoteEvent, session: RemoteSession) -> Update:
        verified, num_final = event.verified, len(event.token_ids) - event.num_provisional
        sources: list[TokenSource] = list(event.sources[:num_final])
        if self.keep:
            kept = min(len(self.provisional), num_final)
            sources[:kept] = ["device"] * kept
        earlier = self.provisional if verified is None else ()
        self.provisional = (*earlier, *event.token_ids[num_final:])
        begun, self.begun = self.begun, self.begun or num_final > 0
        return Update(
            token_ids=event.token_ids[:num_final],
            sources=tuple(sources),
            logprobs=() if verified is None else verified.logprobs,
            round=verified if begun else None,
            provisional=self.provisional if self.job.provisional else (),
            stop_reason=event.stop_reason,
            num_reused_tokens=session.result.num_reused_tokens,
        )


class EdgeSource(TextSource):
    """A `TextSource` whose target is on a server.

    Args:
        options: options of every session, except its tenant.
        faults: an emulated link that the page may cut; None for a real link.
        defaults: sampling defaults; None takes those of the target.
        server: decodes jobs without speculation and log-probabilities by itself, and has new
            versions of the device's drafter; a warning is logged if there is no link at first.
            None drafts for all jobs, which changes no text.
    """

    def __init__(
        self,
        device: Device,
        transport: Transport,
        *,
        name: str,
        options: RemoteOptions | None = None,
        limits: EdgeLimits | None = None,
        faults: Faults | None = None,
        defaults: GenerationDefaults | None = None,
        server: Fleet | None = None,
    ) -> None:
        self._device, self._transport, self._server = device, transport, server
        self._updating: asyncio.Task[None] | None = None
        self._reached = server is None  # whether the server has answered the latest question
        self._closing: asyncio.Task[None] | None = None
        self._options = options or RemoteOptions()
        self._limits, self._faults = limits or EdgeLimits(), faults
        self._places = Places("device", self._limits, self._wait_s)
        self._mean_tokens, self._token_s = AnswerLength(), RecentMean()  # of texts that ended
        stops = device.target.stop_token_ids
        self._server_only = None if server is None else RemoteText(server, stops)
        self._sessions: list[_PooledSession] = []
        self._closed_bytes = (0, 0)  # sent and received by closed sessions
        self._running: dict[asyncio.Task[None], _RunningJob] = {}
        self._count = 0
        self._room = asyncio.Semaphore(self._limits.active)
        self._by_client: dict[str, asyncio.Semaphore] = {}
        self.info = SourceInfo(
            name=name,
            mode="edge",
            target=device.target,
            defaults=device.target.generation_defaults if defaults is None else defaults,
            speculates=True,
            places=self._limits.places,
            fingerprint=f"fp_{(device.target.identity.tokenizer_hash or 'edge')[:12]}",
        )

    async def start(self) -> None:
        if self._server is not None:
            self._updating = asyncio.create_task(self._update_drafter(self._server))

    async def _update_drafter(self, server: Fleet) -> None:
        """Take new versions of the drafter while texts go on; warn once of no first link."""
        first = True
        while True:
            try:
                await server.describe()  # some devices' `update` asks nothing
                self._reached = True
                await self._device.update(server)
            except LinkError:
                self._reached = False
                if first:
                    log.warning(server.no_link)
            except (RefusedError, WireError) as error:
                log.warning("The drafter is not updated: %s", error)
                return
            first = False
            await asyncio.sleep(UPDATE_EVERY_S if self._reached else REACH_EVERY_S)

    async def close(self) -> None:
        """See `TextSource`; a second call, also during the first, waits for the same end."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        if self._updating is not None:
            await end_tasks(self._updating)
        tasks = tuple(self._running)
        for task in tasks:
            self._running[task].report(ServerError("The server is shutting down."))
        await end_tasks(*tasks)
        for pooled in tuple(self._sessions):
            await self._close_session(pooled)

    def submit(self, jobs: Sequence[Job], report: Report) -> Cancel:
        for job in jobs:
            self.info.check(job)
            if job.sampling.top_logprobs:
                raise InputError("At the edge there are no alternatives: top_logprobs must be 0.")
            if job.sampling.logprobs and self._options.on_cut == "keep":
                raise InputError("Kept text has no log-probabilities; logprobs must be off.")
        self._places.take(jobs[0].client, len(jobs))
        tasks = [self._start(job, partial(report, index)) for index, job in enumerate(jobs)]
        return partial(end_tasks, *tasks)

    def _start(self, job: Job, report: News) -> asyncio.Task[None]:
        running = _RunningJob(job, report)
        task = asyncio.create_task(self._run(running))
        self._running[task] = running

        def ended(_: object) -> None:  # also if it never began
            del self._running[task]
            self._places.free(job.client)

        task.add_done_callback(ended)
        return task

    async def _run(self, running: _RunningJob) -> None:
        try:
            async for update in self._decode(running):
                running.written += len(update.token_ids)
                running.report(update)
                if update.stop_reason is not None:
                    self._mean_tokens.add(running.written)
                    self._token_s.add(running.seconds / max(1, running.written))
        except Exception as error:  # noqa: BLE001 - the request raises it
            running.report(error)

    def _wait_s(self, client: str, number: int) -> float:
        """Seconds until so many texts of a client, or of all for "", have probably ended.

        They go on side by side, and those that wait begin where others have ended.
        """
        jobs = [one for one in self._running.values() if not client or one.job.client == client]
        ends = [self._left_s(one) for one in jobs if one.started_s is not None]
        later = iter([self._left_s(one) for one in jobs if one.started_s is None])
        heapify(ends)
        end_s = 0.0
        for _ in range(min(number, len(jobs)) if ends else 0):
            end_s = heappop(ends)
            if (next_s := next(later, None)) is not None:
                heappush(ends, end_s + next_s)
        return max(1.0, end_s)  # of texts that have just come, nothing is known

    def _left_s(self, running: _RunningJob) -> float:
        """Seconds that a text probably takes from now on, or from its start."""
        job, seconds = running.job, running.seconds
        left = self._mean_tokens.tokens_left(
            running.written, job.max_new_tokens, endless=job.ignore_eos
        )
        own_s = seconds / running.written if running.written else 0.0
        return left * (self._token_s.value or own_s)

    @property
    def load(self) -> Load:
        active = sum(one.started_s is not None for one in self._running.values())
        return Load(active, len(self._running) - active)

    @property
    def link(self) -> LinkState | None:
        """State of the session that was used last, and bytes of all sessions.

        Without a session, it says whether the server answers.
        """
        stats = [pooled.session.stats for pooled in self._sessions]
        latest = max(self._sessions, key=_last_used, default=None)
        reached: Literal["up", "down"] = "up" if self._reached else "down"
        return LinkState(
            state=reached if latest is None else _link_state(latest.session),
            round_trip_s=None if latest is None else latest.session.stats.rtt_s,
            draft_gain=None if latest is None else latest.session.draft_gain,
            bytes_sent=self._closed_bytes[0] + sum(each.bytes_up for each in stats),
            bytes_received=self._closed_bytes[1] + sum(each.bytes_down for each in stats),
            can_cut=self._faults is not None,
            cut=self._faults is not None and self._faults.cut,
        )

    def cut(self, cut: bool) -> bool:
        if self._faults is not None:
            self._faults.cut = cut
        return self._faults is not None

    async def _decode(self, running: _RunningJob) -> AsyncGenerator[Update]:
        job = running.job
        async with self._client_places(job.client), self._room:
            running.started_s = time.monotonic()
            drafted = job.speculation or job.sampling.logprobs or self._server_only is None
            updates = self._draft(job) if drafted else self._decode_on_server(job)
            async with contextlib.aclosing(updates):
                async for update in updates:
                    yield update

    def _client_places(self, client: str) -> asyncio.Semaphore:
        """Limits the number of a client's texts in decoding."""
        if client not in self._by_client:
            share = client_share(self._limits.active, client)
            self._by_client[client] = asyncio.Semaphore(share)
        return self._by_client[client]

    async def _draft(self, job: Job) -> AsyncGenerator[Update]:
        """Draft on the device and verify on the server."""
        options = self._row_options(job)
        reader = _EventReader(job, keep=self._options.on_cut == "keep")
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
        options = self._row_options(job)
        events: Any = self._server_only.stream(job.prompt_ids, **options)
        first = True
        async with contextlib.aclosing(events):
            async for event in events:
                while self._faults is not None and self._faults.cut:
                    await asyncio.sleep(CUT_POLL_S)
                yield Update(
                    token_ids=event.token_ids,
                    sources=event.sources,
                    round=None if first else event,
                    stop_reason=event.stop_reason,
                )
                first = False

    def _row_options(self, job: Job) -> GenerateOptions:
        sampling = vars(job.sampling)
        options = {
            **{name: sampling[name] for name in sampling.keys() & GenerateOptions.__annotations__},
            "max_new_tokens": job.max_new_tokens,
            "stop": job.stop,
            "stop_token_ids": () if job.ignore_eos else None,
            "generation_config": None,
            "logits_processors": job.processors,
        }
        return cast("GenerateOptions", options)

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


def _link_state(session: RemoteSession) -> Literal["up", "down", "syncing"]:
    """State of the session's link as docs/serve.md names it."""
    if session.stats.state == "up":
        return "syncing" if session.provisional else "up"
    return "down" if session.stats.state == "down" else "syncing"
