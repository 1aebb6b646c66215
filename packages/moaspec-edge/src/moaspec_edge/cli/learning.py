"""`--learn` in a target server: devices fetch the versions of the drafter that learns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moaspec_edge.server.service import TargetService
    from moaspec_train.learning_process import LearningProcess


def announce(service: TargetService, learning: LearningProcess | None) -> None:
    """Tell devices which versions there are, and register gauges of the learning.

    Raises:
        InputError: the versions are of another drafter than the one to begin with.
    """
    if learning is None:
        return
    learning.check(service.target)
    if len(learning.versions) > 1:
        service.capabilities.add_versions(*learning.versions)
    for name in asdict(learning.status):
        gauge = service.observer.gauge(f"learning_{name}", f"Of the learning drafter: {name}")
        gauge.set_function(lambda name=name: float(getattr(learning.status, name)))


@asynccontextmanager
async def learning_from_texts(
    service: TargetService, learning: LearningProcess | None
) -> AsyncIterator[None]:
    """Let the drafter learn from the texts served meanwhile, and adopt its versions."""
    if learning is None:
        yield
        return
    from moaspec.backends.fast_drafter import prepared
    from moaspec.generation.drafters import load_drafter
    from moaspec.model.checkpoint.moa_checkpoint import fingerprint
    from moaspec.target.target import Target, plain_torch

    loop, target = asyncio.get_running_loop(), service.target
    assert isinstance(target, Target), "--learn is refused for other engines"

    def adopt(directory: Path) -> None:
        drafter = load_drafter(directory, target=target)
        with plain_torch():
            prepared(drafter, target)  # not in the loop, where devices would wait
        loop.call_soon_threadsafe(service.adopt, drafter, fingerprint(drafter))

    service.listen(learning.offer)
    learning.start(adopt)
    try:
        yield
    finally:
        await asyncio.to_thread(learning.close)
