"""`--learn` in a server: texts go to a training process, and its versions draft."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from moaspec_core.bundled import bundled_drafters
from moaspec_core.errors import InputError
from moaspec_core.support.locks import writing
from moaspec_core.support.paths import make_private, require_writable

if TYPE_CHECKING:
    from moaspec_core.cli.options import LoadOptions
    from moaspec_edge.server.service import TargetService
    from moaspec_train.learning_process import LearningProcess


def with_learning(
    asked: LoadOptions, directory: Path | None, hold: Callable[[AbstractContextManager[None]], None]
) -> tuple[LoadOptions, LearningProcess | None]:
    """What to load, and the process that trains the drafter; None without `--learn`.

    Args:
        hold: keeps the directory's lock until the command ends.

    Raises:
        InputError: the directory cannot be written, another process writes it, or no drafter is
            named, and none is bundled.
        TrainingError: the directory's state is damaged.
    """
    if directory is None:
        return asked, None
    require_writable("--learn", directory)
    hold(writing(directory))
    try:
        make_private(directory)
    except OSError as error:
        raise InputError(f"--learn {directory} cannot be made: {error.strerror}.") from error
    from moaspec.backends.load import chosen_dtype
    from moaspec_train.learning_process import LearningProcess, LearningSettings

    initial = asked.drafter or asked.model
    if asked.drafter is None and asked.model not in bundled_drafters():
        raise InputError(f"--learn: no drafter is bundled for {asked.model}. Give --drafter.")
    settings = LearningSettings(
        target=asked.model,
        dtype=chosen_dtype(asked.dtype, packed=False),
        adapter=asked.adapter,
        tokenizer=asked.tokenizer,
        initial=initial,
        directory=directory,
    )
    return replace(asked, drafter=settings.newest()), LearningProcess(settings, _tell)


def _tell(said: str) -> None:
    """Print a line, from a thread that must survive a closed standard error."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"{said}\n")
        sys.stderr.flush()


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
