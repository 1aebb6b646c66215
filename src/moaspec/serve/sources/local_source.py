"""Text from an engine in this process."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace

from moaspec.drafting.policy.policies import DraftSettings
from moaspec.drafting.protocols import Drafter
from moaspec.engine.engine import Engine
from moaspec.engine.request_state import check_bias, check_prompt
from moaspec.generation.local_engine import local_parts
from moaspec.model.moa import MoADrafter
from moaspec.sampling.grammar import Grammars
from moaspec.serve.sources.engine_worker import EngineWorker, Ticket, WorkerLimits
from moaspec.serve.sources.source import Job, LinkState, Load, SourceFacts, Update, Updates
from moaspec.target.target import Target

LIMITS = WorkerLimits()
"""Of a machine with a few gigabytes to spare."""


class LocalSource:
    """A `TextSource` with target and drafter in this process.

    Args:
        target: the model whose text is produced.
        drafter: proposes tokens; None decodes plainly.
        name: how responses call the model; None takes the target's own name.
        shaping: what rows draft, and with which N.
        limits: how much is decoded at a time.
    """

    def __init__(
        self,
        target: Target,
        drafter: MoADrafter | Drafter | None = None,
        *,
        name: str | None = None,
        shaping: DraftSettings | None = None,
        limits: WorkerLimits = LIMITS,
    ) -> None:
        shaping = shaping or DraftSettings()
        verifier, drafting = local_parts(
            target, drafter, num_target_layers=shaping.num_target_layers
        )
        self.engine = Engine(verifier, drafting, target=target)
        self.cache = verifier.cache

        def release() -> None:
            verifier.release()
            give_back: Callable[[], None] | None = getattr(drafting, "release", None)
            if give_back is not None:
                give_back()

        self._worker = EngineWorker(
            self.engine,
            release=release,
            slot_bytes=verifier.cache.slot_bytes,
            shaping=shaping,
            stop_token_ids=target.stop_token_ids,
            limits=limits,
        )
        self.facts = SourceFacts(
            name=name or target.name,
            mode="local",
            tokenizer=target.tokenizer,
            vocab_size=target.vocab_size,
            max_positions=target.max_positions,
            stop_token_ids=target.stop_token_ids,
            defaults=target.generation_defaults,
            speculates=drafter is not None,
            grammars=Grammars(
                target.tokenizer,
                vocab_size=target.vocab_size,
                stop_token_ids=target.stop_token_ids,
            ),
            fingerprint=_fingerprint(target),
        )

    async def start(self) -> None:
        """See `TextSource`."""
        self._worker.start()

    async def close(self) -> None:
        """See `TextSource`."""
        await asyncio.to_thread(self._worker.stop)

    def open(self, jobs: Sequence[Job]) -> list[Updates]:
        """See `TextSource`."""
        for job in jobs:
            check_prompt(job.prompt_ids, self.facts.vocab_size, self.facts.max_positions)
            check_bias(job.sampling, self.facts.vocab_size)
        streams = [_TicketUpdates(self._ruled(job), self._worker) for job in jobs]
        self._worker.submit([stream.ticket for stream in streams])
        return list[Updates](streams)

    def _ruled(self, job: Job) -> Job:
        """The job with its grammar as a logits processor."""
        if job.grammar is None:
            return job
        processor = self.facts.grammars.processor(job.grammar, len(job.prompt_ids))
        return replace(job, sampling=replace(job.sampling, processors=(processor,)))

    @property
    def load(self) -> Load:
        """See `TextSource`."""
        return self._worker.load

    @property
    def link(self) -> LinkState | None:
        """There is none."""
        return None

    def cut(self, _cut: bool) -> bool:
        """There is no link."""
        return False


class _TicketUpdates:
    """What the worker tells of a ticket, as an asynchronous iterator."""

    def __init__(self, job: Job, worker: EngineWorker) -> None:
        self._worker, self._ended = worker, False
        self._told: asyncio.Queue[Update | Exception] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def tell(news: Update | Exception) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
                loop.call_soon_threadsafe(self._told.put_nowait, news)

        self.ticket = Ticket(job, tell)

    def __aiter__(self) -> _TicketUpdates:
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
        if not self._ended:
            self._ended = True
            self._worker.cancel(self.ticket)


def _fingerprint(target: Target) -> str:
    # Plain dtypes as they have always been written, so that nobody's fingerprint changes.
    precision = str(target.dtype) if target.quantize is None else target.precision
    facts = f"{target.identity} {precision} {target.device.type}"
    return "fp_" + hashlib.sha256(facts.encode()).hexdigest()[:12]
