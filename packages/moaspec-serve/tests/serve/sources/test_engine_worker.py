"""An error in one step ends the jobs of that step and nothing else."""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

import serving
from costs import rated, watch_reused
from moaspec.generation.renewal import Renewal
from moaspec_core.drafting.tree_shapes import Chain
from moaspec_core.errors import BusyError, InputError, ServerError
from moaspec_core.policy.policies import DraftSettings
from moaspec_core.sampling.params import SamplingParams
from moaspec_serve.sources.engine_worker import EngineWorker, QueuedJob, WorkerLimits
from moaspec_serve.sources.local_source import LocalSource
from moaspec_serve.sources.source import AnswerLength, Job, Update


@pytest.fixture
def worker() -> Any:
    source = serving.source(active=2, waiting=1)
    made = source._worker
    made.start()
    yield made
    made.stop()


def queued(client: str = "", **sampling: Any) -> tuple[QueuedJob, queue.Queue[Update | Exception]]:
    updates: queue.Queue[Update | Exception] = queue.Queue()
    settings = SamplingParams(**sampling)
    job = Job(prompt_ids=(1, 2, 3), max_new_tokens=4, sampling=settings, client=client)
    return QueuedJob(job, updates.put), updates


def last(updates: queue.Queue[Update | Exception]) -> Update | Exception:
    """What ends a queued."""
    while True:
        news = updates.get(timeout=300)
        if isinstance(news, Exception) or news.stop_reason is not None:
            return news


def broken(_: Any, __: Tensor) -> Tensor:
    raise RuntimeError("broken")


def test_a_failing_step_ends_its_requests_only(worker: EngineWorker) -> None:
    bad, bad_updates = queued(processors=(broken,))
    good, good_updates = queued()
    worker.submit([bad, good])
    assert isinstance(last(bad_updates), RuntimeError)
    last(good_updates)
    again, updates = queued()
    worker.submit([again])
    ended = last(updates)
    assert isinstance(ended, Update)
    assert ended.stop_reason == "max_new_tokens"
    assert worker.load.active == worker.load.waiting == 0


def test_all_or_none(worker: EngineWorker) -> None:
    with pytest.raises(InputError, match="takes 3"):
        worker.submit([queued()[0] for _ in range(4)])
    goes_on = threading.Event()

    def waiting(_: Any, logits_V: Tensor) -> Tensor:
        assert goes_on.wait(timeout=300)
        return logits_V

    held = [queued(processors=(waiting,)) for _ in range(2)]
    worker.submit([one for one, _ in held])
    with pytest.raises(BusyError):
        worker.submit([queued()[0] for _ in range(2)])
    goes_on.set()
    for _, updates in held:
        last(updates)
    assert worker.load.waiting == 0


def test_unfinished_jobs_get_an_error() -> None:
    source = serving.source(active=1)
    source._worker.start()
    batch = [queued() for _ in range(3)]
    source._worker.submit([one for one, _ in batch])
    source._worker.stop()
    ends = [last(updates) for _, updates in batch]
    assert all(isinstance(one, ServerError) or one.stop_reason for one in ends)  # type: ignore[union-attr]


def test_a_key_has_a_share_of_the_places() -> None:
    source = serving.source(active=4, waiting=4)
    worker = source._worker
    worker.submit([queued("mallory")[0] for _ in range(4)])
    with pytest.raises(InputError, match="takes 4"):
        worker.submit([queued("bob")[0] for _ in range(5)])
    with pytest.raises(BusyError, match="may have 4"):
        worker.submit([queued("mallory")[0]])
    worker.submit([queued("alice")[0] for _ in range(4)])


def test_keys_take_turns() -> None:
    """Of the rows, too, a key has a share; who has the fewest rows joins first."""
    source = serving.source(active=4, waiting=8)
    worker = source._worker
    updates = [(name, *queued(name)) for name in ["mallory"] * 5 + ["alice", "bob"]]
    for _, one, _ in updates:
        worker.submit([one])
    while not worker._inbox.empty():
        command = worker._inbox.get()
        assert command is not None
        command()
    worker._admit()
    joined = [one.job.client for one in worker._active.values()]
    assert joined == ["mallory", "alice", "bob", "mallory"]
    worker.start()
    for _, _, news in updates:
        assert isinstance(last(news), Update)
    assert worker.load.active == worker.load.waiting == 0
    worker.stop()


def test_a_long_prompt_joins_while_others_are_decoded() -> None:
    source = serving.source(active=2)
    worker = source._worker
    (short, news), (long, later) = queued(), queued()
    long.job = replace(long.job, prompt_ids=tuple(range(60)) * 10, max_new_tokens=1)
    for one in (short, long):
        worker._waiting.append(one)
        worker._places.take(one.job.client, 1)
        worker._advance()
    assert {short.handle, long.handle} == set(worker._active)
    worker.start()
    assert isinstance(last(news), Update)
    assert isinstance(last(later), Update)
    worker.stop()


def long_job(
    client: str, number: int, new: int = 40
) -> tuple[QueuedJob, queue.Queue[Update | Exception]]:
    made, updates = queued(client)
    prompt = tuple((7 * number + 3 * i) % 60 for i in range(30))
    sampling = SamplingParams(temperature=0.9 * (number % 2), seed=number, logprobs=True)
    made.job = replace(
        made.job,
        prompt_ids=prompt,
        max_new_tokens=new,
        sampling=sampling,
        ignore_eos=True,
        tenant=f"{number}",
    )
    return made, updates


def texts_of(source: LocalSource, number: int) -> list[tuple[list[int], list[float]]]:
    """Token ids and log-probabilities of jobs of three keys, all at once."""
    worker = source._worker
    jobs = [long_job("abc"[one % 3], one) for one in range(number)]
    worker.submit([jobs[0][0]])
    for client in "abc":
        own = [one for one, _ in jobs[1:] if one.job.client == client]
        worker.submit(own)
    worker.start()
    assert all(isinstance(last(updates), Update) for _, updates in jobs)
    worker.stop()
    return [(one.result.token_ids, one.result.logprobs) for one, _ in jobs]


def test_rows_that_are_set_back_go_on_with_the_same_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for about two rows, the texts are those of a cache where all fit."""
    monkeypatch.setattr("moaspec_core.engine.cache_room.LEAST_TURN_S", 0.0)
    monkeypatch.setattr("moaspec_core.engine.cache_room.READ_AGAIN", 0.5)
    small, large = serving.source(active=16), serving.source(active=16)
    small._worker._limits = replace(
        small._worker._limits, cache_bytes=2 * small._worker._room.of(100), parked=1
    )
    found, quiet = texts_of(small, 16), texts_of(large, 16)
    assert [ids for ids, _ in found] == [ids for ids, _ in quiet]
    for (_, some), (_, others) in zip(found, quiet, strict=True):
        assert some == pytest.approx(others, abs=1e-4)  # passes of another width, in float32
    assert large._worker.rows_set_back == 0
    assert small._worker.rows_set_back >= 100


def test_a_refusal_says_when_to_come_back() -> None:
    """By the work of the texts that must end before: those of the key, or of all."""

    def retry_s(client: str, *new_tokens: int) -> float:
        worker = serving.source(active=4, waiting=4)._worker
        for number, new in enumerate(new_tokens):
            one, _ = long_job("ab"[number % 2], number, new)
            worker._places.take(one.job.client, 1)
            worker._waiting.append(one)
        with pytest.raises(BusyError) as refused:
            worker._places.take(client, 4 if len(new_tokens) < 8 else 1)
        assert f"Try again in {math.ceil(refused.value.retry_s)} s" in str(refused.value)
        return refused.value.retry_s

    short, long = retry_s("c", *[400] * 8), retry_s("c", *[4000] * 8)
    assert 5 * short < long  # the first of all texts ends; its prompt takes its part
    one_is_short = retry_s("c", 400, *[4000] * 7)
    assert one_is_short == pytest.approx(short)
    own = retry_s("a", 4000, 400, 4000, 400)  # both texts of the key must go on to make room
    assert own > retry_s("b", 4000, 400, 4000, 400)


def test_long_answers_beside_short_ones_are_not_taken_for_nearly_ended() -> None:
    length = AnswerLength()
    assert length.tokens_left(10, 100, endless=False) == 90  # nothing is known
    length.add(64)
    assert length.tokens_left(10, 900, endless=False) == 54
    assert length.tokens_left(300, 900, endless=False) == 300
    assert length.tokens_left(800, 900, endless=False) == 100
    assert length.tokens_left(10, 900, endless=True) == 890  # ignore_eos: its limit is its end


def test_texts_without_a_place_do_not_make_a_refusal_longer() -> None:
    def retry_s(waiting: int) -> float:
        worker = serving.source(active=4, waiting=waiting)._worker
        worker._waiting += [long_job("a", number, 400)[0] for number in range(4 + waiting)]
        return worker._wait_s("", 1)

    assert retry_s(40) == pytest.approx(retry_s(0))


def test_prompts_that_are_scored_take_turns_with_texts() -> None:
    """Else many of them, or a long one, would hold up all others."""
    source, order = serving.source(active=64), list[str]()

    async def score(first: int) -> None:
        prompt = tuple((first + number) % 250 for number in range(400))
        sampling = SamplingParams(logprobs=True)
        job = Job(prompt_ids=prompt, max_new_tokens=1, sampling=sampling, client="mallory")
        (found,) = await source.score([job])
        assert len(found.logprobs) == len(prompt) - 1
        order.append("mallory")

    async def run() -> None:
        scored = [asyncio.create_task(score(first)) for first in range(24)]
        await asyncio.sleep(0)
        one, ended = long_job("alice", 1, 2)
        source._worker.submit([one])
        await source.start()
        await asyncio.to_thread(last, ended)
        order.append("alice")
        await asyncio.gather(*scored)
        await source.close()

    asyncio.run(run())
    assert order.index("alice") < 12
    assert source.load.active == source.load.waiting == 0


def test_bytes_of_owners_include_what_is_kept_and_end_with_it() -> None:
    source = serving.source()
    worker = source._worker
    worker.start()
    one, updates = queued("alice")
    worker.submit([one])
    last(updates)
    kept = worker._room.of(3 + 4)
    while worker.steps.owners["alice"].cache_bytes != kept:  # the thread is about to count it
        time.sleep(0.01)
    freed = threading.Event()
    worker.between_steps(worker._forget_all)
    worker.between_steps(freed.set)
    assert freed.wait(60)
    assert worker.steps.owners["alice"].cache_bytes == 0
    worker.stop()


def ended(worker: EngineWorker, tenant: str, first: int) -> None:
    """A row that is kept after its end."""
    made, updates = queued()
    made.job = replace(made.job, tenant=tenant, prompt_ids=(first, 2, 3))
    worker.submit([made])
    last(updates)


def test_a_tenants_rows_do_not_push_out_anothers(worker: EngineWorker) -> None:
    ended(worker, "alice", 1)
    for number in range(8):
        ended(worker, "mallory", 10 + number)
    assert [one.tenant for one in worker._parked] == ["alice", *["mallory"] * 3]
    assert worker._parked[-1].token_ids[0] == 17


def test_memory_goes_back_where_nobody_asks_for_long() -> None:
    source = serving.source(parked_s=0.05)
    worker = source._worker
    worker.start()
    try:
        ended(worker, "alice", 1)
        deadline = time.monotonic() + 60
        while (source.cache.num_bytes or worker._parked) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert source.cache.num_bytes == 0
        assert worker._parked == []
        ended(worker, "alice", 1)
    finally:
        worker.stop()


def test_a_text_of_many_minutes_does_not_make_the_server_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its end begins the wait after which caches are freed and costs are measured."""
    now_s, asked = 0.0, list[DraftSettings]()
    # Of this module only: the clock of all modules would stop event loops of other threads.
    clock = SimpleNamespace(monotonic=lambda: now_s)
    for module in ("moaspec_serve.sources.engine_worker", "moaspec.generation.renewal"):
        monkeypatch.setattr(f"{module}.time", clock)
    worker = serving.source(parked_s=120.0)._worker
    worker._renewal = Renewal(lambda old, _: asked.append(old), 5.0, 60.0)

    def slow(_: Any, logits_V: Tensor) -> Tensor:
        nonlocal now_s
        now_s += 1000.0
        return logits_V

    worker.start()
    try:
        job, updates = queued(processors=(slow,))
        worker.submit([job])
        last(updates)
        with pytest.raises(queue.Empty):  # time for what an idle server does at once
            updates.get(timeout=0.2)
        assert len(worker._parked) == 1
        assert asked == []
    finally:
        worker.stop()


def test_costs_are_measured_while_no_job_is_there(caplog: pytest.LogCaptureFixture) -> None:
    """A job that comes meanwhile is told of at once, and later ones have the new settings."""
    caplog.set_level(logging.INFO)
    begun, asked = threading.Event(), list[DraftSettings]()
    better = DraftSettings(Chain(1))

    def renew(old: DraftSettings, stopped: Callable[[], bool]) -> DraftSettings | None:
        asked.append(old)
        if len(asked) == 1:
            raise RuntimeError("no memory")
        begun.set()
        while not stopped():
            time.sleep(0.001)
        return better

    made = serving.source()._worker
    made._renewal = Renewal(renew, 0.0, 0.0)
    made.start()
    assert begun.wait(timeout=300)
    job, updates = queued()
    made.submit([job])
    assert isinstance(last(updates), Update)
    made.stop()
    assert asked[0] is asked[1]
    assert made._shaping is better
    assert "not measured while idle: no memory" in caplog.text
    assert "by them, with N = None" in caplog.text


def test_drafts_go_through_the_exit_that_is_chosen_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts stay as they are, and kept ones are read again: their memory is of another N."""
    seen, of = watch_reused(monkeypatch), serving.target()
    module = rated(of, 0.3, 0.9)
    chosen = threading.Event()

    def renew(old: DraftSettings, _: object) -> DraftSettings | None:
        if old.num_target_layers == 2 or not made._parked:
            return None
        chosen.set()
        return replace(old, num_target_layers=2)

    first = DraftSettings(Chain(2), num_target_layers=0)
    limits = WorkerLimits(quiet_s=0.0, renewal_s=0.0)
    made = LocalSource(of, module, shaping=first, renew=renew, limits=limits)._worker
    made.start()
    try:
        texts = list[list[int]]()
        for through in ({0}, {0, 2}):
            job, updates = queued()
            made.submit([job])
            last(updates)
            texts.append(job.result.token_ids)
            assert chosen.wait(timeout=300)
            assert seen - {0} == through - {0}
        assert texts[0] == texts[1]
    finally:
        made.stop()
