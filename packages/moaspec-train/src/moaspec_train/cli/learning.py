"""`--learn` in a server: texts go to a training process, and its versions draft."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from moaspec_core.bundled import bundled_drafters
from moaspec_core.errors import InputError
from moaspec_core.support.locks import writing
from moaspec_core.support.paths import make_private, require_writable

if TYPE_CHECKING:
    from moaspec_core.cli.options import LoadOptions
    from moaspec_train.learning_process import LearningProcess


def with_learning(
    asked: LoadOptions, directory: Path, hold: Callable[[AbstractContextManager[None]], None]
) -> tuple[LoadOptions, LearningProcess]:
    """What to load, and the process that trains the drafter.

    Args:
        hold: keeps the directory's lock until the command ends.

    Raises:
        InputError: the directory cannot be written, another process writes it, or no drafter is
            named, and none is bundled.
        TrainingError: the directory's state is damaged.
    """
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
