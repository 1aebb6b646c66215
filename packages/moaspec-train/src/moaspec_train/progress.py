"""Log records of how far a long phase is, and of the time that it will still take."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")
log = logging.getLogger("moaspec.progress")

REPORT_EVERY_S = 5.0
"""Seconds between two records."""


def reported(
    items: Iterable[T], what: str, unit: str, total: int, size: Callable[[T], int]
) -> Iterator[T]:
    """Yield the items, and log now and then how many units of `total` are done.

    Args:
        size: units of one item.
    """
    started = told = time.monotonic()
    done = 0
    for item in items:
        now = time.monotonic()
        if done and now >= told + REPORT_EVERY_S:
            told, left_s = now, (now - started) / done * (total - done)
            log.info("%s %d of %d %s, %.0f s left", what, done, total, unit, left_s)
        yield item
        done += size(item)
