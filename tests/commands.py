"""What a command leaves behind, and the target that commands are run on."""

from __future__ import annotations

import importlib
import itertools
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

import tiny
from moaspec.target.target import Target


@dataclass(frozen=True)
class Output:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The error on standard error, without what was said before."""
        _, start, message = self.err.partition("Error: ")
        return start + message

    @property
    def words(self) -> str:
        """Standard output with its line breaks forgotten."""
        return " ".join(self.out.split())


Cli = Callable[..., Output]
DOING = ("Loading ", "Reading examples", "Reading rows", "Checking prompts", "Comparing rows")


def complaints(said: str) -> str:
    """Standard error without the lines that say what is being done."""
    return "\n".join(line for line in said.splitlines() if not line.startswith(DOING))


def text_target(**changes: Any) -> Target:
    """A tiny target whose tokenizer has one word per id."""
    return tiny.fresh_target(tokenizer=tiny.tokenizer(), **changes)


def load_targets_by(monkeypatch: pytest.MonkeyPatch, load: Callable[..., Any]) -> None:
    """Let every command load its target by this function."""
    for place in (
        "moaspec.cli.method_loading",
        "moaspec_edge.device.bundle",
        "moaspec",
        "moaspec.backends.load",
    ):
        monkeypatch.setattr(f"{place}.load_target", load)
    monkeypatch.setattr("moaspec_edge.device.bundle.read_skeleton", load)


def interrupt_after(calls: int, function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Ctrl-C be pressed when a function, named with its module, is called once more."""
    module, _, name = function.rpartition(".")
    work, done = getattr(importlib.import_module(module), name), itertools.count()
    work = getattr(work, "uninterrupted", work)

    def interrupted(*given: Any, **named: Any) -> Any:
        if next(done) == calls:
            signal.raise_signal(signal.SIGINT)
        return work(*given, **named)

    interrupted.uninterrupted = work  # type: ignore[attr-defined]
    monkeypatch.setattr(function, interrupted)
