"""Long steps of the package are told while a status line is shown."""

from __future__ import annotations

import io
import logging

import pytest
from rich.console import Console

from moaspec_core.cli.terminal.status import show_log_records


@pytest.mark.parametrize("terminal", [False, True])
def test_long_steps_are_told(terminal: bool) -> None:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=80)
    log = logging.getLogger("moaspec.backends.cpu")
    with console.status("Loading") as status, show_log_records(console, status.update):
        log.info("Compiling, once")
        assert (str(status.status) == "Compiling, once") is terminal
    log.info("Later")
    assert isinstance(console.file, io.StringIO)
    assert "Compiling, once" in console.file.getvalue()
    assert "Later" not in console.file.getvalue()
