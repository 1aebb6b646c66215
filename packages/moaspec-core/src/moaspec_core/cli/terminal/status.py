"""Status lines while something loads; hides the output of libraries meanwhile."""

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points

from rich.console import Console
from rich.status import Status
from rich.text import Text

from moaspec_core.cli.entry import exit_on_interrupt
from moaspec_core.cli.terminal import console
from moaspec_core.cli.terminal.console import escape_unsafe
from moaspec_core.errors import InputError
from moaspec_core.support.extras import require

MAX_THREADS = 1024
"""PyTorch aborts without a message when it is asked for far more threads than it can start."""
NO_BARS = {"TQDM_DISABLE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
SLOW_IMPORTS = "moaspec.slow_imports"
"""Entry points that name modules whose import takes seconds."""
QUANTIZE = ("int8", "int4", "inputs")
REDRAWS_PER_S = 4.0  # few: they take CPU time from measurements
log = logging.getLogger("moaspec")


@contextmanager
def status(message: str) -> Iterator[Status]:
    """Show a message during the block; in files and pipes, print it once."""
    if not console.err.is_terminal:
        console.err.print(message)
    line = console.err.status(Text(message), refresh_per_second=REDRAWS_PER_S)
    with line as shown, show_log_records(console.err, shown.update):
        yield shown


@contextmanager
def loading(
    what: str, threads: int | None = None, quantize: str | None = None, *, torch: bool = True
) -> Iterator[None]:
    """Show a status line while PyTorch, transformers and then the model are loaded.

    Args:
        quantize: the option, refused before anything is loaded.
        torch: False loads neither PyTorch nor transformers.

    Raises:
        InputError: see `set_threads`; or an unknown `quantize`, or its extra is not installed.
    """
    require_threads(threads)
    if quantize is not None:
        if quantize not in QUANTIZE:
            raise InputError(f"Unknown quantize={quantize!r}; choose one of {', '.join(QUANTIZE)}.")
        if quantize != "inputs":
            require("--quantize", "moaspec[quantize]")
    with status(f"Loading {what}") as shown:
        shown.update(spinner="dots")  # drawn now; by itself it waits for its thread's first turn

        def leave() -> None:
            shown.stop()
            console.warn("Stopped by Ctrl-C: nothing had begun.")

        with exit_on_interrupt(leave):
            quiet_libraries(torch=torch)
            if torch:
                for point in entry_points(group=SLOW_IMPORTS):
                    point.load()
        if torch:
            set_threads(threads)
        yield


@contextmanager
def measuring() -> Iterator[Callable[[str], None]]:
    """Show a status line for `calibrate`; yields a function that sets the timed part in it."""
    said = "Measuring this machine, once"
    announced = console.err.is_terminal
    with console.err.status("Preparing", refresh_per_second=REDRAWS_PER_S) as shown:

        def advance(part: str) -> None:
            nonlocal announced
            shown.update(f"{said}: {part}")
            if not announced:
                console.err.print(said)
                announced = True

        yield advance


class _StatusHandler(logging.Handler):
    """Shows long steps (INFO) in the status line, or prints them where there is no terminal."""

    def __init__(self, screen: Console, show: Callable[[Text], object]) -> None:
        super().__init__(logging.INFO)
        self._screen, self._show = screen, show

    def emit(self, record: logging.LogRecord) -> None:
        text = Text(record.getMessage())
        if record.levelno > logging.INFO:
            self._screen.print(text, style="yellow")
        elif self._screen.is_terminal:
            self._show(text)
        else:
            self._screen.print(text)


@contextmanager
def show_log_records(screen: Console, show: Callable[[Text], object]) -> Iterator[None]:
    """Show the package's log records: long steps by `show` on a terminal, others printed."""
    handler, level = _StatusHandler(screen, show), log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.setLevel(level)
        log.removeHandler(handler)


def quiet_libraries(*, torch: bool = True) -> None:
    """Hide progress bars and warnings of libraries, of transformers with `torch`; not with --debug.

    Call it before the libraries are imported. Log records of `moaspec` and errors are shown.
    """
    if console.DEBUG.get():
        return
    os.environ.update(NO_BARS)
    warnings.simplefilter("ignore")
    if logging.lastResort is not None:
        logging.lastResort.addFilter(_is_ours)
        logging.lastResort.setFormatter(_SafeFormatter())
    if not torch:
        return
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


class _SafeFormatter(logging.Formatter):
    """Escapes names of files and answers of servers in log records."""

    def format(self, record: logging.LogRecord) -> str:
        return escape_unsafe(super().format(record))


def _is_ours(record: logging.LogRecord) -> bool:
    return record.name.startswith("moaspec") or _is_error(record)


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def set_threads(threads: int | None) -> None:
    """Set PyTorch's number of CPU threads; InputError for a number that no machine has."""
    require_threads(threads)
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def require_threads(threads: int | None) -> None:
    """Refuse a number of threads that PyTorch cannot start; see `set_threads`."""
    if threads is not None and not 1 <= threads <= MAX_THREADS:
        raise InputError(f"--threads must be within 1..{MAX_THREADS}, got {threads}.")
