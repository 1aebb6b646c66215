"""Measures client-server decoding over emulated links, beside a prediction by arithmetic."""

from __future__ import annotations

import sys
from pathlib import Path

_RUN = "import runpy, sys; sys.path.insert(0, {!r}); runpy.run_module({!r}, run_name={!r})"


def python_command(module: str, *arguments: str) -> list[str]:
    """The command that runs a module of this package in a new process."""
    code = _RUN.format(str(Path(__file__).parents[1]), module, "__main__")
    return [sys.executable, "-c", code, *arguments]
