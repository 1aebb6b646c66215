"""The number of requests at once follows what a server takes."""

import heapq
from collections.abc import Callable

from moaspec_train.dataset.concurrency import FIRST, Concurrency


def asked(pace: Concurrency, answers: int, tokens_per_s: Callable[[int], float]) -> list[int]:
    """Limits after each answer of a server that gives each of n requests a share of its speed."""
    now, number = 0.0, 0
    limits: list[int] = []
    running: list[tuple[float, int]] = []
    while len(limits) < answers:
        while pace.running < pace.limit:
            pace.running += 1
            number += 1
            tokens = 100 + 37 * (number * 7919 % 11)  # answers differ in length
            share = tokens_per_s(pace.running) / pace.running
            heapq.heappush(running, (now + tokens / share, tokens))
        now, tokens = heapq.heappop(running)
        pace.running -= 1
        pace.answered(tokens, now)
        limits.append(pace.limit)
    return limits


def test_it_grows_while_that_is_faster() -> None:
    """A server that is fastest from 200 requests on gets about so many, and not thousands."""
    limits = asked(Concurrency(), 8000, lambda n: 50.0 * min(n, 200))
    assert limits[0] == FIRST
    assert 128 <= sorted(limits)[len(limits) // 2] <= 512


def test_a_server_of_one_request_at_a_time_keeps_few() -> None:
    assert max(asked(Concurrency(), 2000, lambda _: 50.0)) <= 2 * FIRST


def test_a_fixed_number_stays() -> None:
    pace = Concurrency(5)
    assert set(asked(pace, 500, lambda n: 50.0 * n)) == {5}
    pace.refused()
    assert pace.limit == 5


def test_refusals_halve_it_once_for_all_requests_under_way() -> None:
    pace = Concurrency()
    pace.running = pace.limit
    for _ in range(FIRST):
        pace.refused()
    assert pace.limit == FIRST // 2
    pace.running = pace.limit
    pace.refused()
    assert pace.limit == FIRST // 4
    for _ in range(10):
        pace.refused()
        pace.running = pace.limit
    assert pace.limit == 1
    pace.running = 0
    assert asked(pace, 3000, lambda n: 50.0 * n)[-1] > 4
