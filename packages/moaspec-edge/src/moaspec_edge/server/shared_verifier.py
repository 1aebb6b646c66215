"""Batches the requests of many rows into passes of one target.

Each caller asks for one row and waits. Requests that arrive during a pass form the next one. Owners
take turns by the work that they were served, and each has a share of a pass, so no owner waits
longer than a pass of such shares. An owner here is who shares both (`share_key`): the credentials
of a device, or a single text where there are none.
"""

import asyncio
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from moaspec.engine.local_verifier import LocalVerifier
from moaspec.generation.renewal import Renewal
from moaspec_core.drafting.draft_tree import DraftTree
from moaspec_core.drafting.protocols import Verifier, VerifyRequest, VerifyResult
from moaspec_core.drafting.tree_shapes import beginning
from moaspec_core.engine.engine import run_now
from moaspec_core.engine.scheduler import Scheduler
from moaspec_core.policy.pass_budget import PassBudget
from moaspec_core.policy.policies import DraftSettings
from moaspec_core.process_memory import end_idle_threads
from moaspec_core.sampling.params import GREEDY
from moaspec_core.support.tasks import end_tasks
from moaspec_edge.server.auth import ANONYMOUS
from moaspec_edge.server.row_room import RowRoom

Adopt = Callable[[DraftSettings], None]
PREFILL_TOKENS = 128
"""Prompt tokens of a pass; longer prompts are encoded in pieces of this size, or whole where the
verifier reads prompts whole."""
MAX_PASS_DRAFTED = 1024
"""Drafted tokens of a pass, of all owners together: four of the longest messages."""
OWNER_DRAFTED = 64
"""Drafted tokens of one owner, if several owners asked within `RECENT_S`. Longer drafts are cut,
which changes no text."""
RECENT_S = 5.0
ROOM_S = 0.05
"""Seconds until a request that waits for room looks again, if no other comes."""


@dataclass(frozen=True, kw_only=True)
class PassOptions:
    """Limits of one pass.

    Attributes:
        max_rows: requests.
        owner_rows: requests of one owner, see `OWNER_DRAFTED` and `client_rows`.
        owner_tokens: tokens of one owner, of texts and drafts, if another owner waits or was in
            one of the last two passes. More of a text waits for the next pass.
        min_pass_s: least duration of a pass, which fixes a server's speed in experiments.
    """

    max_rows: int = 64
    owner_rows: int = 64
    owner_tokens: int = 1 << 30
    min_pass_s: float = 0.0


@dataclass(eq=False)
class _QueuedRequest:
    request: VerifyRequest
    share_key: str  # requests with the same one share turns and a part of a pass
    answer: asyncio.Future[tuple[VerifyResult, float]]
    rest: VerifyRequest | None = None
    num_verified: int = 0  # tokens that were verified when it came

    @property
    def tokens(self) -> int:
        """Number of tokens of the text and of drafts."""
        return len(self.request.new_tokens) + self.drafted

    @property
    def prefill(self) -> int:
        """Number of text tokens to encode, without the newest."""
        return len(self.request.new_tokens) - 1

    @property
    def drafted(self) -> int:
        return len(self.request.tree.tokens)

    def cut(self, most: int) -> None:
        """Drop drafted tokens after the first `most`; parents always precede their children."""
        tree = self.request.tree
        if len(tree.tokens) > most:
            self.request = replace(self.request, tree=beginning(tree, most))

    def split(self, room: int, piece: int) -> None:
        """Take the first tokens of the text only; `rest` is what remains to be done.

        Args:
            room: most tokens of text and drafts.
            piece: most tokens of the text; `sys.maxsize` does not split it.
        """
        most = piece if piece == sys.maxsize else min(room, piece)
        whole = self.request
        known, length = whole.new_tokens, whole.num_verified + len(whole.new_tokens)
        if len(known) > most:
            self.rest = replace(
                whole, num_verified=whole.num_verified + most, new_tokens=known[most:]
            )
            # The last part makes up for what is not encoded here.
            self.request = replace(
                whole,
                new_tokens=known[:most],
                tree=DraftTree(),
                sampling=GREEDY,
                encode=False,
                text_length=whole.text_length or length,
                read_again=whole.num_verified + most <= self.num_verified,
            )
        self.cut(max(0, room - len(self.request.new_tokens)))


@dataclass
class _Pass:
    """Requests of the pass that is being formed.

    Attributes:
        prompt_piece: most tokens of one prompt.
        owner_drafted: most drafted tokens of one owner.
        owner_rows: most requests of one owner, or as many as all others have in this pass.
        owner_tokens: most tokens of one owner. With as many as all others have, owners would double
            a pass one after another.
        rows, drafted, tokens: requests, drafted tokens and all tokens by owner.
    """

    options: PassOptions
    prompt_piece: int
    owner_drafted: int
    owner_rows: int
    owner_tokens: int
    jobs: list[_QueuedRequest] = field(default_factory=list)
    prefill: int = 0
    rows: Counter[str] = field(default_factory=Counter)
    drafted: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)

    def take(self, job: _QueuedRequest) -> bool:
        """Add a request, or the first part of its text, if it fits; the first always does."""
        key = job.share_key
        rows, own = self.rows[key], self.tokens[key]
        room = self.owner_tokens - own
        left = max(0, room - len(job.request.new_tokens))
        drafted = min(job.drafted, self.owner_drafted, left)
        prefill = min(job.prefill, room, PREFILL_TOKENS)
        fits = (
            len(self.jobs) < self.options.max_rows
            and rows < max(self.owner_rows, len(self.jobs) - rows)
            and room > 0
            and (not prefill or self.prefill + prefill <= PREFILL_TOKENS)
            and self.drafted[key] + drafted <= self.owner_drafted
            and self.drafted.total() + drafted <= MAX_PASS_DRAFTED
        )
        if not fits and self.jobs:
            return False
        job.cut(self.owner_drafted)
        job.split(max(1, room), self.prompt_piece)
        self.jobs.append(job)
        self.rows[key] += 1
        self.tokens[key] += job.tokens
        self.prefill += job.prefill
        self.drafted[key] += job.drafted
        return True


@dataclass
class PassCounts:
    """Totals of all passes."""

    passes: int = 0
    rows: int = 0
    tokens: int = 0
    seconds: float = 0.0


class SharedVerifier:
    """Leases rows of a verifier and batches their requests.

    Args:
        verifier: called in a thread of its own, one pass at a time.
        on_idle: called when the last leased row is returned.
        max_bytes: bytes of the cache that all rows may have now; None where rows do not take memory
            one by one.

    Attributes:
        budget: of the drafts of all rows of a pass; None verifies all.
        room: decides which rows have keys; None: all.
        prompt_piece: most prompt tokens of one request; `sys.maxsize` where prompts are read whole.
    """

    def __init__(
        self,
        verifier: Verifier,
        options: PassOptions | None = None,
        on_idle: Callable[[], None] | None = None,
        budget: PassBudget | None = None,
        max_bytes: Callable[[], int] | None = None,
    ) -> None:
        self._verifier, self.options = verifier, options or PassOptions()
        self._on_idle, self.budget = on_idle, budget
        self.prompt_piece = sys.maxsize if verifier.reads_whole else PREFILL_TOKENS
        self.scheduler = Scheduler(PREFILL_TOKENS)
        self.room: RowRoom | None = None
        if max_bytes is not None:
            assert isinstance(verifier, LocalVerifier), "others have caches of their own"
            piece = min(self.prompt_piece, self.options.owner_tokens)
            self.room = RowRoom(verifier, self.scheduler, max_bytes, piece)
        self._share_keys: dict[int, str] = {}  # of each row
        self._num_leased = 0
        self._recent: deque[set[int]] = deque(maxlen=2)
        self._jobs: deque[_QueuedRequest] = deque()
        self._used: dict[int, str] = {}  # the owner of each row
        self._latest_pass: dict[str, int] = {}  # by share key
        self._asked_s: dict[str, float] = {}  # by share key, when the latest request came
        self._running: set[int] = set()
        self._leaving: set[int] = set()
        self._wake = asyncio.Event()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="target")
        self._task: asyncio.Task[None] | None = None
        self._rest: tuple[Renewal, DraftSettings, Adopt] | None = None
        self._used_s = time.monotonic()  # when the latest pass ended
        self.counts = PassCounts()

    @property
    def num_rows(self) -> int:
        return len(self._used)

    @property
    def num_recent_rows(self) -> int:
        """Number of rows in the newest two passes; where many ask, passes take turns."""
        return len(set[int]().union(*self._recent))

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for a pass."""
        return len(self._jobs)

    def rows_of(self, owner: str) -> int:
        return sum(one == owner for one in self._used.values())

    def owners(self) -> Counter[str]:
        """Number of rows leased to each owner that has any."""
        return Counter(list(self._used.values()))  # metrics are read by another thread

    def lease(self, owner: str = "") -> int:
        """Lease the lowest free row, which keeps caches small, until `close`."""
        row = next(i for i in range(len(self._used) + 1) if i not in self._used)
        self._used[row] = owner
        self._num_leased += 1
        # Nobody tells devices without credentials apart: each text has a share of its own.
        share_key = f"text {self._num_leased}" if owner == ANONYMOUS else owner
        self._share_keys[row] = share_key
        if self.room is not None:
            self.room.lease(row, share_key)
        if self.budget is not None:
            self.budget.forget(row)
        return row

    def close(self, row: int) -> None:
        """Return a row; if a pass is working on it, it becomes free after the pass."""
        self._jobs = deque(job for job in self._jobs if job.request.cache_row != row)
        if row in self._running:
            self._leaving.add(row)
            return
        self._verifier.close(row)
        self._used.pop(row, None)
        share_key = self._share_keys.pop(row, "")
        if share_key not in self._share_keys.values():
            self._asked_s.pop(share_key, None)  # nobody else needs a share because of it
        if self.room is not None:
            self.room.close(row)
        if self._on_idle is not None and not self._used:
            self._on_idle()

    def when_idle(self, renewal: Renewal, shaping: DraftSettings, adopt: Adopt) -> None:
        """Measure costs while no request is there; to be called before the first request.

        Args:
            shaping: the settings in use.
            adopt: called on the event loop with settings that take their place.
        """
        self._rest = (renewal, shaping, adopt)

    async def decide(self, request: VerifyRequest) -> tuple[VerifyResult, float]:
        """Verify a request of one row; returns the result and the duration of its pass.

        The result has the tree that was verified.
        """
        if self._task is None:
            end_idle_threads()
            self._task = asyncio.create_task(self._run())
        share_key = self._share_keys.get(request.cache_row, "")
        self._asked_s[share_key] = time.monotonic()
        job = _QueuedRequest(
            request,
            share_key,
            asyncio.get_running_loop().create_future(),
            num_verified=request.num_verified,
        )
        if self.room is not None:
            self.room.ask(request.cache_row)
        self._jobs.append(job)
        self._wake.set()
        return await job.answer

    async def stop(self) -> None:
        """End after the running pass and cancel waiting requests."""
        self._wake.set()  # ends a measurement
        if self._task is not None:
            await end_tasks(self._task)
        for job in self._jobs:
            job.answer.cancel()
        self._jobs.clear()
        self._pool.shutdown(wait=True)

    async def _run(self) -> None:
        while True:
            await self._rest_until_asked()
            self._wake.clear()
            while jobs := self._next():
                await self._decide_together(jobs)
                self._used_s = time.monotonic()
                # Rows that this process decodes ask again at once: they share the next pass.
                await asyncio.sleep(0)
            if self._jobs:  # they wait for room, which others leave or have had for long enough
                asyncio.get_running_loop().call_later(ROOM_S, self._wake.set)

    async def _rest_until_asked(self) -> None:
        loop = asyncio.get_running_loop()
        while self._rest is not None and not self._wake.is_set():
            renewal, shaping, adopt = self._rest
            try:
                async with asyncio.timeout(max(0.0, renewal.wait_s(self._used_s))):
                    await self._wake.wait()
            except TimeoutError:
                # In the thread of passes; a request ends the measurement and waits until then.
                found = await loop.run_in_executor(
                    self._pool, renewal.renewed, shaping, self._wake.is_set
                )
                if found is not None:
                    adopt(found)
                    self._rest = (renewal, found, adopt)
        await self._wake.wait()

    def _next(self) -> list[_QueuedRequest]:
        """Take the requests of the next pass: at least one, if any waits that has room.

        Owners take turns by the work that they were served; each one's oldest request comes first.
        """
        jobs = [job for job in self._jobs if not job.answer.cancelled()]
        # Of owners that were served alike, the one whose turn was longest ago comes first.
        longest_ago = sorted(
            {job.share_key: 0 for job in jobs}, key=lambda key: self._latest_pass.get(key, 0)
        )
        turns = {key: place for place, key in enumerate(self.scheduler.turns(longest_ago))}
        seen: Counter[str] = Counter()
        order: list[tuple[int, int, _QueuedRequest]] = []
        for job in self._with_room(jobs):
            order.append((seen[job.share_key], turns[job.share_key], job))
            seen[job.share_key] += 1
        taken = _Pass(self.options, self.prompt_piece, *self._owner_limits())
        chosen = {id(job) for *_, job in sorted(order, key=lambda one: one[:2]) if taken.take(job)}
        waiting = {id(job) for job in jobs} - chosen
        self._jobs = deque(job for job in jobs if id(job) in waiting)
        self._latest_pass.update(dict.fromkeys(taken.rows, self.counts.passes + 1))
        return taken.jobs

    def _with_room(self, jobs: list[_QueuedRequest]) -> list[_QueuedRequest]:
        """The requests whose rows have room, after the tokens that must be read again."""
        if self.room is None or not jobs:
            return jobs
        for job in jobs:
            job.request = self.room.whole(job.request)
        waiting = {job.request.cache_row: job.request for job in jobs}
        ready = self.room.ready(waiting)
        return [job for job in jobs if job.request.cache_row in ready]

    def _owner_limits(self) -> tuple[int, int, int]:
        """The drafted tokens, rows and tokens of one owner, fewer if there is another owner."""
        since = time.monotonic() - RECENT_S
        self._asked_s = {key: at for key, at in self._asked_s.items() if at >= since}
        active = {job.share_key for job in self._jobs}
        known = self._asked_s.keys() | active
        self._latest_pass = {key: at for key, at in self._latest_pass.items() if key in known}
        drafted, rows, tokens = MAX_PASS_DRAFTED, self.options.max_rows, 1 << 30
        if len(active | self._asked_s.keys()) > 1:
            drafted, rows = OWNER_DRAFTED, self.options.owner_rows
        # A text is not encoded in small parts for an owner who is idle.
        active |= {key for key, at in self._latest_pass.items() if at >= self.counts.passes - 1}
        if len(active) > 1:
            tokens = self.options.owner_tokens
        return drafted, rows, tokens

    async def _decide_together(self, jobs: list[_QueuedRequest]) -> None:
        self._running = {job.request.cache_row for job in jobs}
        self._recent.append(self._running)
        if self.budget is not None:
            asked = self.budget.applied([job.request for job in jobs])
            for job, request in zip(jobs, asked, strict=True):
                job.request = request
        started = time.monotonic()
        answers: list[VerifyResult | Exception]
        try:
            answers = await self._pass([job.request for job in jobs])
        except RuntimeError as error:  # the thread has ended
            answers = [error] * len(jobs)
        finally:
            self._free_left_rows()
        seconds = time.monotonic() - started
        if seconds < self.options.min_pass_s:
            await asyncio.sleep(self.options.min_pass_s - seconds)
            seconds = self.options.min_pass_s
        self._count(jobs, seconds)
        self._charge(jobs, seconds)
        for job, answer in zip(jobs, answers, strict=True):
            if isinstance(answer, VerifyResult):
                self._settle(job, answer, seconds)
            elif not job.answer.done():
                job.answer.set_exception(answer)

    def _settle(self, job: _QueuedRequest, result: VerifyResult, seconds: float) -> None:
        """Answer a request, or queue what is left of it."""
        if self.room is not None:
            self.room.record(job.request, result, answered=job.rest is None)
        if job.answer.done():
            return
        self.scheduler.charge_seconds(job.share_key, result.process_s)
        if job.rest is not None:
            job.request, job.rest = job.rest, None
            self._jobs.append(job)  # behind other prompts of this owner
            return
        result = replace(result, tree=result.tree or job.request.tree)
        if self.budget is not None:
            self.budget.count(job.request, result)
        job.answer.set_result((result, seconds))

    def _count(self, jobs: list[_QueuedRequest], seconds: float) -> None:
        counts = self.counts
        counts.passes += 1
        counts.rows += len(jobs)
        counts.tokens += sum(len(j.request.new_tokens) + len(j.request.tree.tokens) for j in jobs)
        counts.seconds += seconds

    def _charge(self, jobs: Sequence[_QueuedRequest], seconds: float) -> None:
        """Charge a pass to the owners of its requests."""
        tokens = Counter[str]()
        for job in jobs:
            tokens[job.share_key] += job.tokens
        costs = self.scheduler.rounds
        context = sum(job.request.num_verified for job in jobs) / len(jobs)
        costs.record(tokens.total(), context, seconds)
        self.scheduler.charge(costs, tokens, context)

    def _free_left_rows(self) -> None:
        self._running = set()
        for row in list(self._leaving):
            self._leaving.discard(row)
            self.close(row)

    async def _pass(self, requests: list[VerifyRequest]) -> list[VerifyResult | Exception]:
        """Run one pass in the thread; if it fails, run each request alone."""
        loop = asyncio.get_running_loop()
        working = loop.run_in_executor(self._pool, self._decide, requests)
        try:
            # Even if cancelled, wait for the pass before its rows can be leased again.
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            await asyncio.wait([working])
            raise

    def _decide(self, requests: list[VerifyRequest]) -> list[VerifyResult | Exception]:
        try:
            return list(run_now(self._verifier.verify(requests)))
        except Exception as error:  # noqa: BLE001 - the caller gets it, other requests go on
            if len(requests) == 1:
                return [error]
            return [answer for request in requests for answer in self._decide([request])]
