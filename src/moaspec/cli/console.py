"""What all commands share: consoles, styles, threads, streamed text."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.status import Status
from rich.text import Text
from transformers.utils import logging

from moaspec.data.chat_template import ChatTemplate
from moaspec.decode import CostTable, calibrate
from moaspec.decode.incremental import TextStream
from moaspec.decode.result import Event, Source
from moaspec.errors import InputError
from moaspec.model import MoADrafter
from moaspec.target import Target

DEBUG: ContextVar[bool] = ContextVar("debug", default=False)
MOST_THREADS = 1024
"""Torch ends without a word when it is asked for far more threads than it can start."""

STYLES: dict[Source, str] = {"draft": "bold green", "target": "", "copy": "bold cyan"}

# Texts, names and paths are shown as they are: no [markup], no :emoji: in them.
out = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
err = Console(stderr=True, highlight=False, soft_wrap=True, markup=False, emoji=False)


def nowhere() -> Console:
    """A console for processes other than the first, which say nothing."""
    return Console(quiet=True)


def error(message: str) -> None:
    """One clear line on standard error."""
    err.print(Text("Error: ", style="bold red") + Text(message))


def status(message: str) -> Status:
    """A line that shows what is being done, until it is done."""
    return err.status(Text(message))


def quiet_libraries() -> None:
    """Loading is shown by our own status line; transformers' bars would tear the text."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def set_threads(threads: int | None) -> None:
    """Use that many CPU threads for torch.

    Raises:
        InputError: fewer than one, or more than any machine has.
    """
    if threads is None:
        return
    if not 1 <= threads <= MOST_THREADS:
        raise InputError(f"--threads must be within 1..{MOST_THREADS}, got {threads}.")
    torch.set_num_threads(threads)


@contextmanager
def bar(name: str, total: int) -> Iterator[Callable[[], None]]:
    """A progress bar; what is yielded moves it by one."""
    columns = (TextColumn(name), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True) as shown:
        task = shown.add_task("", total=total)
        yield lambda: shown.advance(task)


def measure(
    target: Target, drafter: MoADrafter | None, *, num_target_layers: int | None = None
) -> CostTable:
    """Calibrate with a status line that says what is being timed."""
    with err.status("Measuring this machine") as status:
        return calibrate(
            target,
            drafter,
            num_target_layers=num_target_layers,
            advance=lambda part: status.update(f"Measuring this machine, once: {part}"),
        )


class TokenPrinter:
    """Prints tokens as they are verified, accepted drafts apart from the target's own."""

    def __init__(self, target: Target) -> None:
        self._stream = TextStream(target.tokenizer, skip_special_tokens=True)
        self.token_ids: list[int] = []

    def show(self, event: Event) -> None:
        """Print one event's text; a character split over tokens waits for its last one."""
        self.token_ids += event.token_ids
        for token, source in zip(event.token_ids, event.sources, strict=True):
            piece = self._stream.step(token)
            if piece:
                out.print(Text(piece, style=STYLES[source]), end="")
        sys.stdout.flush()

    def close(self) -> None:
        """End the line."""
        out.print()


PATIENCE_S = 2.0
"""A Ctrl-C that comes so long after one that was noted ends what hangs."""


class Interrupts:
    """Whether Ctrl-C was pressed; inside `noted_interrupts` it raises nothing."""

    def __init__(self) -> None:
        self._first: float | None = None

    def __bool__(self) -> bool:
        return self._first is not None

    def note(self, *_: object) -> None:
        """A signal handler: output in progress is not torn, so it is neither lost nor doubled."""
        now = time.monotonic()
        if self._first is not None and now - self._first > PATIENCE_S:
            raise KeyboardInterrupt
        self._first = now if self._first is None else self._first


@contextmanager
def noted_interrupts() -> Iterator[Interrupts]:
    """Around streamed output and what is printed behind it."""
    interrupts = Interrupts()
    if threading.current_thread() is not threading.main_thread():
        yield interrupts
        return
    before = signal.signal(signal.SIGINT, interrupts.note)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)


def show_events(
    events: Generator[Event], printer: TokenPrinter | None, interrupts: Interrupts
) -> bool:
    """Decode to the end, printing tokens as they are verified.

    Returns:
        True when the user stopped it with Ctrl-C; what had been verified by then stays.
    """
    try:
        for event in events:
            if printer is not None:
                printer.show(event)
            if interrupts:
                return True
    except KeyboardInterrupt:
        return True
    finally:
        events.close()
    return False


def chat_ids(target: Target, prompt: str, *, raw: bool = False) -> list[int]:
    """Token ids of a user's prompt, in the target's chat template where it has one.

    Raises:
        InputError: an empty prompt, or a target without tokenizer.
    """
    if not prompt.strip():
        raise InputError("The prompt is empty; write what the model should answer.")
    return message_ids(target, [{"role": "user", "content": prompt}], raw=raw)


def message_ids(
    target: Target, messages: Sequence[Mapping[str, str]], *, raw: bool = False
) -> list[int]:
    """Token ids of a conversation, up to where the answer begins.

    Raises:
        InputError: a target without tokenizer, or a conversation that its template refuses.
    """
    tokenizer: Any = target.tokenizer
    if tokenizer is None:
        raise InputError(f"The target {target.name} has no tokenizer, so it cannot read text.")
    if raw or not tokenizer.chat_template:
        _require_text(messages)
        return list(tokenizer("\n".join(one["content"] for one in messages))["input_ids"])
    return conversation_ids(target, messages)


def conversation_ids(target: Target, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Token ids of a whole conversation, up to where the next answer begins.

    Raises:
        InputError: no chat template, or one that refuses these messages.
    """
    template = ChatTemplate(target.tokenizer, target.name)
    if not template.exists:
        raise InputError(
            f"The target {target.name} has no chat template, so it holds no conversation; use "
            "`moaspec generate`."
        )
    _require_text(messages)
    return template.ids([dict(message) for message in messages])


def _require_text(messages: Sequence[Mapping[str, str]]) -> None:
    """Refuse what the terminal or a pipe gave that is no text, which no tokenizer takes."""
    try:
        for message in messages:
            message["content"].encode()
    except UnicodeEncodeError as error:
        raise InputError("The prompt is not valid UTF-8 text.") from error
