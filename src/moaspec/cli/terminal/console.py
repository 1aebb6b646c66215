"""What all commands share: consoles, styles, threads, streamed text."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TextIO

from rich.status import Status
from rich.text import Text

from moaspec.cli.entry import leaving
from moaspec.cli.terminal.log_lines import noted
from moaspec.cli.terminal.safe_console import Screen, harmless
from moaspec.errors import InputError

if TYPE_CHECKING:
    from moaspec.engine.result import Event, Source
    from moaspec.target.generation_defaults import GenerationDefaults
    from moaspec.target.spec import TargetSpec
    from moaspec.target.target import Target

DEBUG: ContextVar[bool] = ContextVar("debug", default=False)
MOST_THREADS = 1024
"""Torch ends without a word when it is asked for far more threads than it can start."""

STYLES: dict[Source, str] = {"draft": "bold green", "target": "", "copy": "bold cyan"}

# Texts, names and paths are shown as they are: no [markup], no :emoji: in them.
out = Screen(highlight=False, soft_wrap=True, markup=False, emoji=False)
err = Screen(stderr=True, highlight=False, soft_wrap=True, markup=False, emoji=False)


def nowhere() -> Screen:
    """A console for processes other than the first, which say nothing."""
    return Screen(quiet=True)


def error(message: str) -> None:
    """One clear line on standard error."""
    err.print(Text("Error: ", style="bold red") + Text(message))


def note(message: str, style: str = "") -> None:
    """A remark on standard output; lines of a terminal end between words."""
    out.print(Text(message, style=style), soft_wrap=not out.is_terminal)


@contextmanager
def status(message: str) -> Iterator[Status]:
    """A line that shows what is being done, until it is done."""
    with err.status(Text(message)) as shown, noted(err, shown):
        yield shown


@contextmanager
def loading(what: str, threads: int | None = None) -> Iterator[None]:
    """A status line while PyTorch, transformers, and then what is named are loaded.

    Args:
        what: is being loaded.
        threads: see `set_threads`.

    Raises:
        InputError: see `set_threads`.
    """
    require_threads(threads)
    with status(f"Loading {what}") as shown:
        shown.update(spinner="dots")  # drawn now; by itself it waits for its thread's first turn
        with leaving(shown.stop):
            quiet_libraries()
        set_threads(threads)
        yield


def quiet_libraries() -> None:
    """Keep bars, warnings and remarks of libraries off the terminal, but with --debug.

    To be called before they are imported. Ours are shown: logs of `moaspec`, and errors.
    """
    if DEBUG.get():
        return
    os.environ.update(NO_BARS)
    warnings.simplefilter("ignore")
    if logging.lastResort is not None:
        logging.lastResort.addFilter(_is_ours)
        logging.lastResort.setFormatter(_Harmless())
    logging.getLogger("DeepSpeed").addFilter(_is_error)  # has a handler of its own, on stdout
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


NO_BARS = {"TQDM_DISABLE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}


class _Harmless(logging.Formatter):
    """Log records name files, and repeat what servers say."""

    def format(self, record: logging.LogRecord) -> str:
        return harmless(super().format(record))


def _is_ours(record: logging.LogRecord) -> bool:
    return record.name.startswith("moaspec") or _is_error(record)


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def set_threads(threads: int | None) -> None:
    """Use that many CPU threads for torch.

    Raises:
        InputError: fewer than one, or more than any machine has.
    """
    require_threads(threads)
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def require_threads(threads: int | None) -> None:
    """Refuse a number of threads that torch cannot start; see `set_threads`."""
    if threads is not None and not 1 <= threads <= MOST_THREADS:
        raise InputError(f"--threads must be within 1..{MOST_THREADS}, got {threads}.")


@contextmanager
def measuring() -> Iterator[Callable[[str], None]]:
    """A status line for `calibrate`; what is yielded says what is being timed."""
    with err.status("Preparing") as status:
        yield lambda part: status.update(f"Measuring this machine, once: {part}")


def tell_defaults(target: TargetSpec, defaults: GenerationDefaults) -> None:
    """One line about what the model's own defaults change; none where they change nothing."""
    if defaults.words:
        err.print(
            f"Defaults of {target.name}: {defaults.words}. --generation-config none leaves them "
            "out.",
            style="dim",
        )


class TokenPrinter:
    """Prints tokens as they are verified, accepted drafts apart from the target's own.

    Args:
        target: whose tokens they are.
        after: tokens that the text continues; none where it is an answer of its own.
    """

    def __init__(self, target: Target, after: Sequence[int] = ()) -> None:
        from moaspec.sampling.incremental_text import TextStream

        self._stream = TextStream(target.tokenizer, skip_special_tokens=True, after=after)
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


def read_prompt(prompt: str | None) -> str:
    """The prompt of a command line; of standard input where it is "-", or left out before a pipe.

    Raises:
        InputError: there is none.
    """
    if prompt is None and (sys.stdin is None or sys.stdin.isatty()):
        raise InputError("There is no prompt; write one, or pipe one in.")
    if prompt is None or prompt == "-":
        prompt = _standard_input(sys.stdin)
    if not prompt.strip():
        raise InputError("The prompt is empty; write what the model should answer.")
    return prompt


def _standard_input(stdin: TextIO | None) -> str:
    """All of it; there is none (None) where it was closed."""
    try:
        text = "" if stdin is None else stdin.read().rstrip("\n")
        text.encode()  # in the C locale, bytes that are no UTF-8 are read as half characters
        return text
    except UnicodeError as error:
        raise InputError("Standard input is not valid UTF-8 text.") from error


def chat_ids(
    target: Target, prompt: str, *, system: str | None = None, raw: bool = False
) -> list[int]:
    """Token ids of a user's prompt, in the target's chat template where it has one.

    Raises:
        InputError: a target without tokenizer, or a template that refuses a system prompt.
    """
    messages = [{"role": "user", "content": prompt}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return message_ids(target, messages, raw=raw)


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
    from moaspec.data.templates.chat_template import ChatTemplate

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
