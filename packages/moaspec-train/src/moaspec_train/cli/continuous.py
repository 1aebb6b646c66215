"""`moaspec train --continuous`: its options, and its line a minute."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moaspec.data.conversations import ReadReport, read_conversations
from moaspec.data.rows import refuse
from moaspec_core.cli.entry import INTERRUPTED
from moaspec_core.cli.terminal import console
from moaspec_core.cli.terminal.interrupts import TERMINATED
from moaspec_core.cli.terminal.status import show_log_records, status
from moaspec_core.errors import InputError
from moaspec_train.stopping import EXIT_UNFINISHED, StopCause

if TYPE_CHECKING:
    from moaspec.target.target import Target
    from moaspec_train.dataset.examples import Example
    from moaspec_train.run_config import TrainConfig
    from moaspec_train.write_and_train import Progress

UNITS = {"MB": 1e6, "GB": 1e9, "TB": 1e12}


@dataclass(frozen=True)
class ContinuousOptions:
    """A run without an end, which writes its own data."""

    continuous: Annotated[
        bool,
        "Let the target answer the setting prompts and train on all answers so far, alternating "
        "without an end.",
    ] = False
    disk: Annotated[
        str | None, "With --continuous: write no more answers when the run has this much: 40GB."
    ] = None

    def check(self, settings: TrainConfig) -> None:
        """Refuse settings that do not go with these options."""
        from moaspec_train.run_config import launched_processes
        from moaspec_train.write_and_train import continuous_settings

        self._disk_bytes()
        if self.continuous:
            continuous_settings(settings)
            if launched_processes() > 1:
                raise InputError("--continuous runs in one process: start it without torchrun.")
        elif self.disk is not None:
            raise InputError("--disk goes with --continuous, which writes answers.")
        elif settings.prompts:
            raise InputError("prompts are answered with --continuous only: add it, or drop them.")
        elif settings.quantize:
            raise InputError("quantize is for writing with --continuous: add it, or drop quantize.")

    def _disk_bytes(self) -> float:
        return math.inf if self.disk is None else parse_size(self.disk)

    def run(
        self,
        target: Target,
        settings: TrainConfig,
        data: list[Example],
        held_out: list[Example],
        *,
        seconds: float | None,
    ) -> None:
        """Go on until a signal or the time limit; leave with the exit code that says which."""
        from moaspec_train.dataset.regenerate import check_prompts
        from moaspec_train.write_and_train import WriteAndTrain

        with status("Reading prompts"):
            found = list(read_conversations(settings.prompts, refuse, ReadReport()))
        longest = settings.max_length - 2  # an answer needs two tokens, to learn one
        with status(f"Checking {len(found)} prompts"):
            conversations = check_prompts(target, found, refuse, longest=longest)
        if len(conversations) < len(found):
            console.err.print(
                f"{len(found) - len(conversations)} prompts are left out: they have more than "
                f"{longest} tokens (max_length={settings.max_length})."
            )
        run = WriteAndTrain(
            target,
            settings,
            conversations,
            data=data,
            held_out=held_out,
            disk_bytes=self._disk_bytes(),
            report=_Lines(),
        )
        with show_log_records(console.err, console.err.print):
            cause = run.run(seconds=seconds)
        console.out.print(_ending(Path(settings.output)))
        codes = {StopCause.INTERRUPTED: INTERRUPTED, StopCause.TERMINATED: TERMINATED}
        raise typer.Exit(codes.get(cause, EXIT_UNFINISHED))


class _Lines:
    """Prints a line for each report, and once that more training does not pay."""

    def __init__(self) -> None:
        self._told_end = False

    def __call__(self, progress: Progress) -> None:
        console.err.print(line(progress))
        if not self._told_end and not progress.pays:
            self._told_end = True
            console.err.print(
                "Another doubling of the trained tokens no longer pays. Stop with Ctrl-C; other "
                "prompts or a larger drafter need another output."
            )


def _ending(output: Path) -> str:
    """What a stopped run has, and how to go on."""
    found = [
        f"{what} is {output / name}"
        for name, what in (("best", "the best drafter on held-out text"), ("drafter", "the last"))
        if (output / name).exists()
    ]
    has = ", ".join(found) or f"answers are in {output}, and no drafter yet"
    return f"Stopped and saved: {has}. Run the same command again to go on."


def line(progress: Progress) -> str:
    """A progress as one line."""
    minutes = round(progress.seconds / 60)
    parts = [
        f"{minutes // 60}:{minutes % 60:02}",
        f"written {_tokens(progress.written)} ({progress.written_per_s:.0f}/s)",
        f"trained {_tokens(progress.trained)} ({progress.trained_per_s:.0f}/s)",
    ]
    if progress.tau is not None:
        parts.append(f"held-out tau {progress.tau:.2f}")
    if progress.doubling is not None:
        gain, hours = progress.doubling
        parts.append(f"next doubling {gain:+.2f} in {hours:.1f} h")
        parts.append(f"{gain * math.log2(1 + 1 / hours):+.2f} an hour")
    return ", ".join(parts)


def _tokens(count: int) -> str:
    if count < 1e4:
        return str(count)
    return f"{count / 1e6:.2f}M" if count >= 1e6 else f"{count / 1e3:.0f}k"


def parse_size(text: str) -> float:
    """Convert "40GB" to bytes; InputError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([MGT]B)", text.strip(), re.IGNORECASE)
    if match is None or not float(match[1]):
        raise InputError(f"Expected a size such as 40GB or 500MB, got {text!r}.")
    return float(match[1]) * UNITS[match[2].upper()]
