"""One thread that owns an engine: requests join, all advance together, cancelled ones leave.

Everything that touches the engine happens in this thread. Others post commands to it and are told
what happened through the `tell` of their ticket, which must neither block nor raise.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from moaspec.backends.pack import return_freed_memory
from moaspec.drafting.policy.policies import DraftSettings, FixedPolicy
from moaspec.engine.engine import Engine
from moaspec.engine.result import Event, GenerationResult
from moaspec.errors import BusyError, InputError
from moaspec.sampling.token_ids import common_length
from moaspec.serve.sources.source import (
    Job,
    Load,
    Round,
    Update,
    check_number,
    first_to_go,
    share_of,
)

FRESH_TOKENS = 2048
"""Tokens of prompts that join in one step: while they are read, all others wait."""

LEAST_REUSED = 16
"""A shorter common beginning is not worth keeping an old row for."""


@dataclass(frozen=True, kw_only=True)
class WorkerLimits:
    """How much an engine takes on.

    Attributes:
        active: rows that are decoded together.
        waiting: requests that may wait for room; more are refused.
        cache_bytes: of keys and values. The cache grows by half, so it may hold half as much again.
        share: of `active` rows, and of all places, that one key may take.
        parked: ended rows whose keys and values are kept for the next turn of a conversation.
        parked_s: an engine that has had no request for so long keeps none, and gives the memory
            of its caches back.
    """

    active: int = 64
    waiting: int = 256
    cache_bytes: int = 4 * 2**30
    share: float = 0.5
    parked: int = 4
    parked_s: float = 120.0


@dataclass(eq=False)
class Ticket:
    """One job in the worker's care.

    Attributes:
        job: what is to be written.
        tell: hears of updates, and of the exception that ended it.
    """

    job: Job
    tell: Callable[[Update | Exception], None]
    handle: int | None = None
    result: GenerationResult = field(default_factory=GenerationResult)
    cancelled: bool = False

    @property
    def slots(self) -> int:
        """Places in the cache that it may come to need."""
        return len(self.job.prompt_ids) + self.job.max_new_tokens


@dataclass(frozen=True)
class _Parked:
    """An ended row that is kept."""

    handle: int
    tenant: str
    token_ids: tuple[int, ...]


class EngineWorker:
    """Decodes tickets.

    Args:
        engine: nobody else may touch it.
        release: gives the memory of the engine's caches back; called when it has no row.
        slot_bytes: what one token of one row takes in them.
        shaping: what rows draft.
        stop_token_ids: ids that end a row.
        limits: see `WorkerLimits`.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        release: Callable[[], None],
        slot_bytes: int,
        shaping: DraftSettings,
        stop_token_ids: frozenset[int],
        limits: WorkerLimits,
    ) -> None:
        self._engine, self._shaping, self._stops = engine, shaping, stop_token_ids
        self._give_back, self._slot_bytes, self._limits = release, slot_bytes, limits
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._waiting: deque[Ticket] = deque()
        self._active: dict[int, Ticket] = {}
        self._parked: list[_Parked] = []
        self._high = (0, 0)  # rows and slots that the cache has had to hold
        self._lock = threading.Lock()
        self._accepted: Counter[str] = Counter()  # by client
        self._thread = threading.Thread(target=self._work, name="moaspec-engine", daemon=True)

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def stop(self) -> None:
        """End after the current step; what is unfinished hears of it."""
        self._inbox.put(None)
        self._thread.join()

    @property
    def load(self) -> Load:
        """Of the latest step."""
        active = len(self._active)
        return Load(active, max(self._accepted.total() - active, 0))

    def submit(self, tickets: Sequence[Ticket]) -> None:
        """Take on all of these or none.

        Raises:
            BusyError: too many wait already.
            InputError: one needs more of the cache than there is.
        """
        for ticket in tickets:
            if ticket.slots * self._slot_bytes > self._limits.cache_bytes:
                raise InputError(
                    f"A prompt of {len(ticket.job.prompt_ids)} tokens with up to "
                    f"{ticket.job.max_new_tokens} more does not fit this server's cache; ask for "
                    "fewer."
                )
        limits, (client,) = self._limits, {ticket.job.client for ticket in tickets}
        places = limits.active + limits.waiting
        share = share_of(places, limits.share, client)
        check_number(len(tickets), share)
        with self._lock:
            if self._accepted.total() + len(tickets) > places:
                raise BusyError(
                    f"The server has {self._accepted.total()} requests, and takes {places}. Try "
                    "again later."
                )
            if self._accepted[client] + len(tickets) > share:
                raise BusyError(
                    f"This key has {self._accepted[client]} requests here, and may have {share}. "
                    "Try again later."
                )
            self._accepted[client] += len(tickets)
        self._inbox.put(lambda: self._waiting.extend(tickets))

    def cancel(self, ticket: Ticket) -> None:
        """Let it go; nothing more is told."""
        ticket.cancelled = True
        self._inbox.put(lambda: self._drop(ticket))

    def _work(self) -> None:
        """The thread: take commands, let requests join, advance."""
        while True:
            idle = not self._active and not self._waiting
            try:
                # Without caches there is nothing to give back.
                most_s = self._limits.parked_s if self._high[0] else None
                command = self._inbox.get(block=idle, timeout=most_s)
            except queue.Empty:
                self._forget_all() if idle else self._advance()
                continue
            if command is None:
                break
            command()
        for ticket in [*self._active.values(), *self._waiting]:
            self._end(ticket, BusyError("The server is shutting down."))
        self._engine.abort_all()

    def _advance(self) -> None:
        """One step of the engine. Whatever fails in it ends the requests, not the server."""
        try:
            self._admit()
            for event in self._engine.step():
                self._report(event)
        except Exception as error:  # noqa: BLE001 - see above
            for ticket in list(self._active.values()):
                self._leave(ticket)
                self._end(ticket, error)

    def _admit(self) -> None:
        """Let waiting requests join, as long as there is room."""
        fresh = 0
        while len(self._active) < self._limits.active and (ticket := self._first()) is not None:
            fresh += len(ticket.job.prompt_ids)
            if not self._make_room(ticket) or (self._active and fresh > FRESH_TOKENS):
                return
            self._waiting.remove(ticket)
            self._join(ticket)

    def _first(self) -> Ticket | None:
        """Who joins next: the oldest of the client that has the fewest rows and may have more."""
        rows = Counter(ticket.job.client for ticket in self._active.values())
        active, share = self._limits.active, self._limits.share
        may = [
            ticket
            for ticket in self._waiting
            if rows[ticket.job.client] < share_of(active, share, ticket.job.client)
        ]
        return min(may, key=lambda ticket: rows[ticket.job.client], default=None)

    def _make_room(self, ticket: Ticket) -> bool:
        """Whether the cache may hold one more row of this length; old rows go where they must."""
        while True:
            rows = max(self._high[0], len(self._active) + len(self._parked) + 1)
            slots = max(self._high[1], ticket.slots)
            if rows * slots * self._slot_bytes <= self._limits.cache_bytes:
                self._high = (rows, slots)
                return True
            if self._parked:
                self._unpark()
            elif self._active:
                return False
            else:  # nobody is left who needs it: begin anew with an empty cache
                self._forget_all()

    def _join(self, ticket: Ticket) -> None:
        job, after = ticket.job, self._beginning(ticket.job)
        try:
            ticket.handle = self._engine.add(
                job.prompt_ids,
                max_new_tokens=job.max_new_tokens,
                stop_token_ids=self._stops,
                stop=job.stop,
                sampling=job.sampling,
                shape=self._shaping.policy(job.sampling) if job.speculation else FixedPolicy(None),
                free_branches=self._shaping.branches(job.sampling) if job.speculation else None,
                keep=True,
                after=after,
            )
        except InputError as error:
            if after is not None:
                self._engine.forget(after)
            self._end(ticket, error)
            return
        ticket.result = self._engine.result(ticket.handle)
        self._active[ticket.handle] = ticket

    def _beginning(self, job: Job) -> int | None:
        """The kept row of the same tenant that has the most in common with the prompt."""
        own = [old for old in self._parked if old.tenant == job.tenant]
        best = max(own, key=lambda old: common_length(old.token_ids, job.prompt_ids), default=None)
        if best is None or common_length(best.token_ids, job.prompt_ids) < LEAST_REUSED:
            return None
        self._parked.remove(best)
        return best.handle

    def _report(self, event: Event) -> None:
        ticket = self._active[event.handle]
        first = len(ticket.result.token_ids) == len(event.token_ids)
        done = None if first else Round(event.tree, event.accepted, len(event.token_ids))
        update = Update(
            token_ids=event.token_ids,
            sources=event.sources,
            logprobs=event.logprobs,
            top_logprobs=event.top_logprobs,
            round=done,
            stop_reason=event.stop_reason,
            num_reused_tokens=ticket.result.num_reused_tokens,
            seed=ticket.result.seed,
        )
        if event.stop_reason is not None:
            self._park(ticket)
            self._end(ticket, update)
        else:
            ticket.tell(update)

    def _park(self, ticket: Ticket) -> None:
        """Keep a row for the next turn."""
        assert ticket.handle is not None, "only rows that joined can end"
        text = (*ticket.job.prompt_ids, *ticket.result.token_ids)
        self._parked.append(_Parked(ticket.handle, ticket.job.tenant, text))
        if len(self._parked) > self._limits.parked:
            self._unpark()

    def _unpark(self) -> None:
        """Let go of a kept row."""
        old = first_to_go(self._parked, lambda one: one.tenant)
        self._engine.forget(old.handle)
        self._parked.remove(old)

    def _forget_all(self) -> None:
        """Keep no row and no cache; no request is active."""
        while self._parked:
            self._unpark()
        self._give_back()
        return_freed_memory()
        self._high = (0, 0)

    def _drop(self, ticket: Ticket) -> None:
        """A cancelled request leaves at once, and its row is free."""
        if ticket in self._waiting:
            self._waiting.remove(ticket)
            self._release(ticket)
        elif ticket.handle in self._active:
            self._leave(ticket)
            self._release(ticket)

    def _leave(self, ticket: Ticket) -> None:
        """Out of the engine, unfinished, with nothing kept."""
        assert ticket.handle is not None, "only rows that joined can leave"
        # After a step that failed, some rows may have ended already.
        with contextlib.suppress(InputError):
            self._engine.abort(ticket.handle)
        with contextlib.suppress(InputError):
            self._engine.forget(ticket.handle)

    def _end(self, ticket: Ticket, last: Update | Exception) -> None:
        self._release(ticket)
        ticket.tell(last)

    def _release(self, ticket: Ticket) -> None:
        if ticket.handle is not None:
            self._active.pop(ticket.handle, None)
        with self._lock:
            self._accepted[ticket.job.client] -= 1
            self._accepted += Counter()  # forgets clients that have none
