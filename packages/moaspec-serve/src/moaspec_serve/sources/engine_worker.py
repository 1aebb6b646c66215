"""A thread that owns an engine and decodes all jobs of a server in one batch.

Only this thread touches the engine. Other threads send commands through a queue and receive news
through the `report` callback of their job, which must neither block nor raise.
"""

import contextlib
import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from moaspec.generation.renewal import QUIET_S, RENEWAL_S, Renew, Renewal
from moaspec_core.engine.cache_room import CacheRoom, CacheRow
from moaspec_core.engine.engine import Engine, context_message
from moaspec_core.engine.request_state import Event, GenerationResult
from moaspec_core.engine.scheduler import STEP_S, Work
from moaspec_core.errors import ContextError, InputError, ServerError
from moaspec_core.policy.policies import DraftSettings
from moaspec_core.process_memory import end_idle_threads, return_freed_memory
from moaspec_core.sampling.token_ids import common_length
from moaspec_serve.sources.source import (
    AnswerLength,
    Job,
    Load,
    OwnerWork,
    Places,
    SourceLimits,
    StepCounts,
    Update,
    client_share,
    entry_to_evict,
)

LOG = logging.getLogger("moaspec.sources.engine_worker")

SPARE_SLOTS = 64
"""Slots of a row behind its text: a tree of drafts."""

MIN_REUSED_TOKENS = 16  # shortest common prefix for which a kept row is reused


@dataclass(frozen=True, kw_only=True)
class WorkerLimits(SourceLimits):
    """Limits of an engine."""

    active: int = 64
    waiting: int = 256
    # Maximum size of the keys, values and recurrent states in use. Where memory does not follow use
    # (on GPUs), the cache grows by half its size, so it may allocate half as much again.
    cache_bytes: int = 4 * 2**30
    # Number of ended rows whose keys and values are kept for a conversation's next turn.
    parked: int = 4
    # Seconds without a request after which all kept rows and caches are freed.
    parked_s: float = 120.0
    # Seconds without a request after which costs may be measured, and between two tries.
    quiet_s: float = QUIET_S
    renewal_s: float = RENEWAL_S


@dataclass(frozen=True, kw_only=True)
class RowBytes:
    """Bytes of the rows of all caches, and of what is kept of a text to copy from it."""

    slot: int  # keys and values of one token, and its part of the index of n-grams
    state: int  # of one row's recurrent states
    of_slots: Callable[[int], int]  # memory of so many slots of one row, without states
    follows_use: bool  # whether rows take memory, and give it back, one by one

    def of(self, slots: int) -> int:
        return self.of_slots(slots) + self.state


@dataclass(eq=False)
class QueuedJob:
    """A job that waits or is decoded."""

    job: Job
    # Receives updates, or the exception that ended the job.
    report: Callable[[Update | Exception], None]
    handle: int | None = None  # the engine's handle; None while it waits
    result: GenerationResult = field(default_factory=GenerationResult)  # the engine's result so far
    ended: bool = False  # whether the last update was reported

    @property
    def slots(self) -> int:
        return len(self.job.prompt_ids) + self.job.max_new_tokens


@dataclass(frozen=True)
class _Parked:
    """An ended row that is kept for a later prompt with the same beginning."""

    handle: int
    tenant: str
    owner_label: str
    token_ids: tuple[int, ...]


class EngineWorker:
    """Decodes jobs in a thread of its own.

    Args:
        release: frees the engine's caches; called when it has no row.
        room: cache bytes of a row.
        renew: called while no job is there, see `Renew`.
        use: called with renewed settings while no row is kept.
        on_text: called with prompt and generated ids of each whole text that the target chose
            freely; must neither block nor raise.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        release: Callable[[], None],
        room: RowBytes,
        shaping: DraftSettings,
        stop_token_ids: frozenset[int],
        limits: WorkerLimits,
        renew: Renew | None = None,
        use: Callable[[DraftSettings], None] = lambda _: None,
        on_text: Callable[[Sequence[int], Sequence[int]], None] | None = None,
    ) -> None:
        self._renewal: Renewal | None = None
        if renew is not None:
            self._renewal = Renewal(renew, limits.quiet_s, limits.renewal_s)
        self._use = use
        self._on_text = on_text
        self._engine, self._shaping, self._stops = engine, shaping, stop_token_ids
        self._free_caches, self._limits = release, limits
        self._room = room
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._waiting: deque[QueuedJob] = deque()
        self._active: dict[int, QueuedJob] = {}
        self._resting: set[int] = set()  # handles of active jobs without keys, which wait for room
        self.rows_set_back = 0
        self._lost: Counter[int] = Counter()  # by handle, how often since it last wrote
        self._num_steps, self._steps_s, self._long_steps = 0, 0.0, 0
        self._read: Counter[str] = Counter()  # tokens by `Job.owner_label`, as the next two
        self._written: Counter[str] = Counter()
        self._works: Sequence[Work] = ()  # before the latest step
        self._parked: list[_Parked] = []
        # Largest number of rows and slots that the cache held; (0, 0): it is empty.
        self._high = (0, 0)
        self._used_s = time.monotonic()  # when the newest command came or the last step ended
        self._places = Places("server", limits, self._wait_s)
        self._mean_tokens = AnswerLength()  # of texts that ended
        self._thread = threading.Thread(target=self._work, name="moaspec-engine", daemon=True)

    def start(self) -> None:
        """Start the thread; call where the model was loaded."""
        end_idle_threads()
        self._thread.start()

    def stop(self) -> None:
        """Stop after the current step; unfinished jobs get a `ServerError`."""
        self._inbox.put(None)
        self._thread.join()

    @property
    def load(self) -> Load:
        active = len(self._active)
        return Load(active, max(self._places.taken - active, 0))

    @property
    def steps(self) -> StepCounts:
        """Totals; another thread may ask for them."""
        active = Counter(one.job.owner_label for one in list(self._active.values()))
        waiting = Counter(one.job.owner_label for one in list(self._waiting))
        held = self._cache_bytes()
        names = {*active, *waiting, *held, *list(self._read), *list(self._written)}
        return StepCounts(
            steps=self._num_steps,
            seconds=self._steps_s,
            long_steps=self._long_steps,
            rows_set_back=self.rows_set_back,
            owners={
                name: OwnerWork(
                    active=active[name],
                    waiting=waiting[name],
                    read_tokens=self._read[name],
                    written_tokens=self._written[name],
                    cache_bytes=held[name],
                )
                for name in names
            },
        )

    def submit(self, batch: Sequence[QueuedJob]) -> None:
        """Accept all jobs or none; BusyError for too many, InputError for too large ones."""
        for queued in batch:
            if not self._fits(1, queued.slots):
                room = (self._limits.cache_bytes - self._room.state) // self._room.slot
                given = (
                    f"you requested {queued.slots} tokens ({len(queued.job.prompt_ids)} in the "
                    f"prompt, up to {queued.job.max_new_tokens} in the completion)"
                )
                raise ContextError(
                    context_message(max(room, 0), given)
                    + "This server's cache holds no more (--cache-gib); ask for fewer."
                )
        (client,) = {queued.job.client for queued in batch}
        self._places.take(client, len(batch))
        self._inbox.put(lambda: self._waiting.extend(batch))

    def _wait_s(self, client: str, number: int) -> float:
        """Seconds until so many texts of a key, or of all for "", have probably ended.

        Texts with a place advance alike, and owners have equal parts of the time.
        """
        jobs = [*list(self._active.values()), *list(self._waiting)]
        own = [one for one in jobs if not client or one.job.client == client]
        owners = len({one.job.owner for one in jobs}) if client else 1
        # Those that wait for a place are begun when others have ended.
        left_s = [self._left_s(one) for one in own[: max(self._limits.active, number)]]
        ends_s = sorted(left_s)[: max(1, number)]
        if not ends_s:
            return 1.0  # they have not arrived in the engine's thread
        return max(1.0, owners * sum(min(one, ends_s[-1]) for one in left_s))

    def _left_s(self, queued: QueuedJob) -> float:
        """Seconds of the target that a text probably still needs, in a batch with the others."""
        written, most = len(queued.result.token_ids), queued.job.max_new_tokens
        costs, prompt = self._engine.scheduler, len(queued.job.prompt_ids)
        left = self._mean_tokens.tokens_left(written, most, endless=queued.job.ignore_eos)
        rows = max(1, len(self._active))
        round_s = costs.rounds.seconds(rows, prompt + written + left / 2) / rows
        read_s = 0.0 if written else costs.reading.seconds(prompt, prompt / 2)
        return read_s + left * round_s

    def cancel(self, queued: QueuedJob) -> None:
        """Remove a job; without effect if it has ended."""
        if not queued.ended:
            self._inbox.put(lambda: self._drop(queued))

    def between_steps(self, command: Callable[[], None]) -> None:
        """Run a command in the worker's thread, between two steps. It must not raise."""
        self._inbox.put(command)

    def _work(self) -> None:
        """The thread: run commands, then step the engine."""
        while True:
            idle = not self._active and not self._waiting
            try:
                command = self._inbox.get(block=idle, timeout=self._patience_s)
            except queue.Empty:
                if idle:
                    self._rest()
                else:
                    self._advance()
                    self._used_s = time.monotonic()
                continue
            self._used_s = time.monotonic()
            if command is None:
                break
            command()
        for queued in [*self._active.values(), *self._waiting]:
            self._end(queued, ServerError("The server is shutting down."))
        self._engine.abort_all()

    @property
    def _patience_s(self) -> float | None:
        """Seconds to wait for a command while nothing is decoded; None: forever."""
        waits = [] if self._renewal is None else [self._renewal.wait_s(self._used_s)]
        if self._high[0]:  # without caches there is nothing to free
            waits.append(self._used_s + self._limits.parked_s - time.monotonic())
        return max(0.0, min(waits)) if waits else None

    def _rest(self) -> None:
        """What an idle server does: measure costs, and free what nobody has asked for."""
        if self._high[0] and self._used_s + self._limits.parked_s <= time.monotonic():
            rows = len(self._parked)
            self._forget_all()
            LOG.info(
                "Caches and %d kept texts are freed after %g s without a request.",
                rows,
                self._limits.parked_s,
            )
        if self._renewal is not None and self._renewal.wait_s(self._used_s) <= 0:
            found = self._renewal.renewed(self._shaping, lambda: not self._inbox.empty())
            if found is None:
                return
            if found.num_target_layers != self._shaping.num_target_layers:
                self._forget_all()  # what the drafter keeps of a text is that of its N
            self._use(found)
            self._shaping = found

    def _advance(self) -> None:
        """Run one step of the engine. An error in it ends its jobs, not the server."""
        plan: dict[int, int] = {}
        try:
            self._admit()
            plan = self._plan()
            started_s = time.monotonic()
            for event in self._engine.step(plan):
                self._written[self._active[event.handle].job.owner_label] += len(event.token_ids)
                self._lost.pop(event.handle, None)
                self._report(event)
            self._count_step(time.monotonic() - started_s)
        except Exception as error:  # noqa: BLE001 - reported to the jobs
            for queued in [one for handle, one in self._active.items() if handle in plan]:
                self._leave(queued)
                self._end(queued, error)

    def _count_step(self, seconds: float) -> None:
        self._num_steps += 1
        self._steps_s += seconds
        self._long_steps += seconds > STEP_S

    def _plan(self) -> dict[int, int]:
        """What the next step contains, after what it needs has found room in the cache."""
        scheduler, active = self._engine.scheduler, self._engine.work()
        # Owners that wait for a place keep their turn.
        owners = {one.owner for one in active}
        jobs = [queued.job for queued in self._waiting if queued.job.owner not in owners]
        waiting = [Work(key=-1, owner=owner, ready=False) for owner in {job.owner for job in jobs}]
        if not self._room.follows_use:
            plan = scheduler.next_step([*active, *waiting])
            self._count_work(active, plan)
            return plan
        rows = [self._cache_row(one) for one in active]
        needed = sum(row.needed for row in rows)
        self._evict_for(needed)
        room = CacheRoom(self._limits.cache_bytes - self._kept_bytes)
        admitted: list[int] = []
        if self._resting:
            admitted = room.admitted(rows, scheduler.served)
            self._resting.difference_update(admitted)
            active = [replace(one, ready=one.key not in self._resting) for one in active]
            rows = [self._cache_row(one) for one in active]
        plan = scheduler.next_step([*active, *waiting])
        leaving = room.set_back(rows, admitted, scheduler.served) if needed > room.limit else []
        for handle in leaving:
            self._engine.set_back(handle)
            self._resting.add(handle)
            plan.pop(handle, None)
            self._lost[handle] += 1
            self.rows_set_back += 1
        self._count_work(active, plan)
        return plan

    def _count_work(self, works: Sequence[Work], plan: Mapping[int, int]) -> None:
        self._works = works
        for one in works:
            if one.unread:
                self._read[self._active[one.key].job.owner_label] += plan.get(one.key, 0)

    def _cache_bytes(self) -> Counter[str]:
        """Bytes of the texts of each owner, kept ones included, as of the latest step."""
        held = Counter({old.owner_label: 0 for old in list(self._parked)})
        for one in self._works:
            queued = self._active.get(one.key)
            if queued is not None and one.context:
                held[queued.job.owner_label] += self._room.of(one.context)
        for old in list(self._parked):
            held[old.owner_label] += self._room.of(len(old.token_ids))
        return held

    def _cache_row(self, work: Work) -> CacheRow:
        waits = work.key in self._resting
        slots = work.context + (work.unread or 1)
        return CacheRow(
            key=work.key,
            owner=work.owner,
            priority=work.priority,
            needed=self._room.of(slots + SPARE_SLOTS),
            waits=waits,
            reads=bool(work.unread) and not waits,
            lost=self._lost[work.key],
            read_s=self._engine.scheduler.reading.seconds(work.unread, work.unread / 2),
        )

    @property
    def _kept_bytes(self) -> int:
        return sum(self._room.of(len(old.token_ids)) for old in self._parked)

    def _evict_for(self, num_bytes: int) -> None:
        """Drop kept rows while active ones need their memory."""
        while self._parked and num_bytes + self._kept_bytes > self._limits.cache_bytes:
            self._unpark()

    def _admit(self) -> None:
        """Let waiting jobs join while there are places."""
        while (queued := self._next_waiting()) is not None:
            if not self._room.follows_use and not self._make_room(queued):
                return
            self._waiting.remove(queued)
            self._join(queued)

    def _next_waiting(self) -> QueuedJob | None:
        """The oldest waiting job, of the lowest priority, of the owner that was served least.

        An owner without a job may always have one, even if the places are taken.
        """
        if not self._waiting:
            return None
        rows = Counter(queued.job.owner for queued in self._active.values())
        places = self._limits.active
        full = len(self._active) >= places
        found: dict[str, QueuedJob] = {}
        for queued in self._waiting:
            job = queued.job
            first = bool(job.client) and not rows[job.owner]
            if first or (not full and rows[job.owner] < client_share(places, job.client)):
                best = found.setdefault(job.owner, queued)
                if job.priority < best.job.priority:
                    found[job.owner] = queued
        served = self._engine.scheduler.served_of
        return found[min(found, key=lambda owner: (served(owner), rows[owner]))] if found else None

    def _make_room(self, queued: QueuedJob) -> bool:
        """Whether the cache has room for one more row of this length; evicts kept rows."""
        while True:
            rows = max(self._high[0], len(self._active) + len(self._parked) + 1)
            slots = max(self._high[1], queued.slots)
            if self._fits(rows, slots):
                self._high = (rows, slots)
                return True
            if self._parked:
                self._unpark()
            elif self._active:
                return False
            else:  # the cache is unused: start with an empty one
                self._forget_all()

    def _fits(self, rows: int, slots: int) -> bool:
        """Whether the cache may have this many rows of this many slots."""
        row_bytes = slots * self._room.slot + self._room.state
        return rows * row_bytes <= self._limits.cache_bytes

    def _join(self, queued: QueuedJob) -> None:
        job = queued.job
        after = None if job.scored else self._row_to_reuse(job)
        try:
            queued.handle = self._engine.add(
                job.prompt_ids,
                max_new_tokens=job.max_new_tokens,
                stop_token_ids=frozenset() if job.ignore_eos else self._stops,
                stop=job.stop,
                sampling=job.sampling,
                shape=self._shaping.policy(job.sampling) if job.speculation else None,
                free_branches=self._shaping.branches(job.sampling) if job.speculation else None,
                keep=not job.scored,
                after=after,
                owner=job.owner,
                priority=job.priority,
                scored=job.scored,
            )
        except InputError as error:
            if after is not None:
                self._engine.forget(after)
            self._end(queued, error)
            return
        queued.result = self._engine.result(queued.handle)
        self._active[queued.handle] = queued
        self._high = max(self._high, (1, 0))
        if after is None and self._room.follows_use:
            self._resting.add(queued.handle)

    def _row_to_reuse(self, job: Job) -> int | None:
        """The tenant's kept row with the longest common prefix with the prompt."""
        own = [old for old in self._parked if old.tenant == job.tenant]
        best = max(own, key=lambda old: common_length(old.token_ids, job.prompt_ids), default=None)
        if best is None or common_length(best.token_ids, job.prompt_ids) < MIN_REUSED_TOKENS:
            return None
        self._parked.remove(best)
        return best.handle

    def _report(self, event: Event) -> None:
        queued = self._active[event.handle]
        first = len(queued.result.token_ids) == len(event.token_ids)
        update = Update(
            token_ids=event.token_ids,
            sources=event.sources,
            logprobs=event.logprobs,
            top_logprobs=event.top_logprobs,
            round=None if first else event,
            stop_reason=event.stop_reason,
            num_reused_tokens=queued.result.num_reused_tokens,
            scores=event.scores,
        )
        if event.stop_reason is not None and queued.job.scored:
            self._end(queued, update)
        elif event.stop_reason is not None:
            self._mean_tokens.add(len(queued.result.token_ids))
            free = not (queued.job.sampling.changes_logits or queued.job.ignore_eos)
            if self._on_text is not None and free:
                self._on_text(queued.job.prompt_ids, queued.result.token_ids)
            self._park(queued)
            self._end(queued, update)
        else:
            queued.report(update)

    def _park(self, queued: QueuedJob) -> None:
        assert queued.handle is not None, "only jobs that joined can end"
        text = (*queued.job.prompt_ids, *queued.result.token_ids)
        job = queued.job
        self._parked.append(_Parked(queued.handle, job.tenant, job.owner_label, text))
        if len(self._parked) > self._limits.parked:
            self._unpark()

    def _unpark(self) -> None:
        old = entry_to_evict(self._parked, lambda row: row.tenant)
        self._engine.forget(old.handle)
        self._parked.remove(old)

    def _forget_all(self) -> None:
        """Free all kept rows and the caches. No job may be active."""
        while self._parked:
            self._unpark()
        self._free_caches()
        return_freed_memory()
        self._high = (0, 0)

    def _drop(self, queued: QueuedJob) -> None:
        """Remove a cancelled job and free its row."""
        if queued in self._waiting:
            self._waiting.remove(queued)
            self._release(queued)
        elif queued.handle in self._active:
            self._leave(queued)
            self._release(queued)

    def _leave(self, queued: QueuedJob) -> None:
        """Remove an unfinished job from the engine without keeping its row."""
        assert queued.handle is not None, "only jobs that joined can leave"
        # After a failed step some rows may have ended already.
        with contextlib.suppress(InputError):
            self._engine.abort(queued.handle)
        with contextlib.suppress(InputError):
            self._engine.forget(queued.handle)

    def _end(self, queued: QueuedJob, last: Update | Exception) -> None:
        self._release(queued)
        queued.ended = True
        queued.report(last)

    def _release(self, queued: QueuedJob) -> None:
        if queued.handle is not None:
            self._active.pop(queued.handle, None)
            self._resting.discard(queued.handle)
            self._lost.pop(queued.handle, None)
        self._places.free(queued.job.client)
