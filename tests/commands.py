"""What a command leaves behind, and the target that commands are run on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tiny
from moaspec.target import Target


@dataclass(frozen=True)
class Output:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def words(self) -> str:
        """Standard output with its line breaks forgotten."""
        return " ".join(self.out.split())


Cli = Callable[..., Output]


def text_target(**changes: Any) -> Target:
    """A tiny target whose tokenizer has one word per id."""
    return tiny.fresh_target(tokenizer=tiny.tokenizer(), **changes)
