"""Decoding with an engine in this process."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from moaspec.backends.fast_moa_proposer import FastMoAProposer
from moaspec.generation.drafters import load_drafter
from moaspec.generation.local_engine import local_parts
from moaspec.generation.renewal import Renew
from moaspec.model.moa import MoADrafter
from moaspec.target.target import Target, plain_torch
from moaspec_core.drafting.ngram_proposer import TOKEN_BYTES
from moaspec_core.drafting.protocols import CachingProposer, Proposer
from moaspec_core.engine.engine import Engine
from moaspec_core.engine.scheduler import STEP_S
from moaspec_core.errors import InputError
from moaspec_core.policy.policies import DraftSettings
from moaspec_core.sampling.params import GREEDY, TextLogprobs
from moaspec_serve.sources.engine_worker import EngineWorker, QueuedJob, RowBytes, WorkerLimits
from moaspec_serve.sources.source import (
    Cancel,
    Job,
    Load,
    Report,
    SourceInfo,
    StepCounts,
    TextSource,
    Update,
)

if TYPE_CHECKING:
    from moaspec_train.learning_process import LearningProcess, LearningStatus


class LocalSource(TextSource):
    """A `TextSource` whose target and drafter are in this process.

    Args:
        drafter: proposes tokens; None decodes plainly.
        name: model name in responses; None takes the target's name.
        shaping: draft policy, with the drafter's N.
        renew: measures costs while there is no job, see `EngineWorker`; None: `shaping` stays.
        limits: see `WorkerLimits`; None takes the defaults.
        learning: trains `drafter` on the texts; None: it stays as it is.

    Raises:
        InputError: `learning` for a drafter of another kind, or for none.
    """

    def __init__(
        self,
        target: Target,
        drafter: MoADrafter | Proposer | None = None,
        *,
        name: str | None = None,
        shaping: DraftSettings | None = None,
        renew: Renew | None = None,
        limits: WorkerLimits | None = None,
        learning: LearningProcess | None = None,
    ) -> None:
        if learning is not None and not isinstance(drafter, MoADrafter):
            raise InputError("Only Mixture-of-Attentions drafters learn; name one.")
        shaping, limits = shaping or DraftSettings(), limits or WorkerLimits()
        verifier, drafting = local_parts(
            target, drafter, num_target_layers=shaping.num_target_layers
        )
        self._target, self._drafting, self._learning = target, drafting, learning
        self._outbox: _Outbox | None = None
        self.engine = Engine(verifier, drafting, target=target, step_s=STEP_S)
        self.cache = verifier.cache

        def release() -> None:
            verifier.release()
            if isinstance(drafting, CachingProposer):
                drafting.release()

        caches = [verifier.cache]
        if isinstance(drafting, CachingProposer):
            caches += drafting.caches

        def row_bytes(slots: int) -> int:
            return sum(cache.row_bytes(slots) for cache in caches) + slots * TOKEN_BYTES

        self._worker = EngineWorker(
            self.engine,
            release=release,
            room=RowBytes(
                slot=sum(cache.slot_bytes for cache in caches) + TOKEN_BYTES,
                state=target.state_bytes,
                of_slots=row_bytes,
                follows_use=verifier.cache.follows_use,
            ),
            shaping=shaping,
            stop_token_ids=target.stop_token_ids,
            limits=limits,
            renew=renew,
            use=self._use,
            on_text=None if learning is None else learning.offer,
        )
        self.info = SourceInfo(
            name=name or target.name,
            mode="local",
            target=target,
            defaults=target.generation_defaults,
            speculates=drafter is not None,
            places=limits.places,
            fingerprint=_fingerprint(target),
        )

    async def start(self) -> None:
        self._worker.start()
        if self._learning is not None:
            self._learning.start(self._adopt)

    async def close(self) -> None:
        await asyncio.to_thread(self._worker.stop)
        if self._learning is not None:
            await asyncio.to_thread(self._learning.close)

    def _use(self, shaping: DraftSettings) -> None:
        """Draft with the N of these settings; no row is in use where it is another one."""
        if isinstance(self._drafting, FastMoAProposer) and shaping.num_target_layers is not None:
            self._drafting.use_exit(shaping.num_target_layers)

    def _adopt(self, directory: Path) -> None:
        """Draft with a new version of the drafter, which is loaded and packed in this thread."""
        drafting = self._drafting
        assert isinstance(drafting, FastMoAProposer), "only these learn"
        drafter = load_drafter(directory, target=self._target)
        with plain_torch():
            drafting.modules(drafter, self._target)
        self._worker.between_steps(lambda: drafting.adopt(drafter))

    def submit(self, jobs: Sequence[Job], report: Report) -> Cancel:
        for job in jobs:
            self.info.check(job)
        loop = asyncio.get_running_loop()
        if self._outbox is None or self._outbox.loop is not loop:
            self._outbox = _Outbox(loop)
        outbox = self._outbox

        def forward(index: int, news: Update | Exception) -> None:
            outbox.put(lambda: report(index, news))

        queued = [
            QueuedJob(_with_grammar(job), partial(forward, index)) for index, job in enumerate(jobs)
        ]
        self._worker.submit(queued)

        async def cancel() -> None:
            for item in queued:
                self._worker.cancel(item)

        return cancel

    async def score(self, jobs: Sequence[Job]) -> list[TextLogprobs]:
        """See `TextSource`: the prompts are read by turns, as those of any text."""
        found: list[asyncio.Future[TextLogprobs]] = []

        def settle(index: int, news: Update | Exception) -> None:
            if found[index].done():  # cancelled: the client has left
                return
            if isinstance(news, Exception):
                found[index].set_exception(news)
            elif news.scores is not None:
                found[index].set_result(news.scores)

        found += [asyncio.get_running_loop().create_future() for _ in jobs]
        cancel = self.submit([_reading_of(job) for job in jobs], settle)
        try:
            return await asyncio.gather(*found)
        finally:
            await cancel()

    @property
    def learning(self) -> LearningStatus | None:
        return None if self._learning is None else self._learning.status

    @property
    def steps(self) -> StepCounts:
        return self._worker.steps

    @property
    def load(self) -> Load:
        return self._worker.load


class _Outbox:
    """Calls from another thread to an event loop, which those of one step wake once."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._calls: deque[Callable[[], None]] = deque()
        self._is_awake = False

    def put(self, call: Callable[[], None]) -> None:
        self._calls.append(call)
        if not self._is_awake:
            self._is_awake = True
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self.loop.call_soon_threadsafe(self._take)

    def _take(self) -> None:
        self._is_awake = False  # before the calls are taken: a later one wakes the loop again
        while self._calls:
            self.loop.call_soon(self._calls.popleft())


def _reading_of(job: Job) -> Job:
    """A job that reads another's prompt, and chooses one token."""
    sampling = replace(GREEDY, logprobs=True, top_logprobs=job.sampling.top_logprobs)
    return replace(
        job,
        max_new_tokens=1,
        stop=(),
        sampling=sampling,
        grammar=None,
        speculation=False,
        scored=True,
    )


def _with_grammar(job: Job) -> Job:
    return replace(job, sampling=replace(job.sampling, processors=job.processors))


def _fingerprint(target: Target) -> str:
    # Unquantised targets keep the dtype's name, so existing fingerprints do not change.
    precision = str(target.dtype) if target.quantize is None else target.precision
    info = f"{target.identity} {precision} {target.device.type}"
    return "fp_" + hashlib.sha256(info.encode()).hexdigest()[:12]
