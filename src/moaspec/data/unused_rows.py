"""Counts the data that readers do not use, so that nothing is dropped silently."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

MESSAGES = "messages."
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of one key, which transformers hands to templates under all of them."""


@dataclass
class ReadReport:
    """Counts what readers leave out.

    Attributes:
        unused_columns: rows with text in a column that no shape reads, by its name.
        skipped_files: files of a directory that are no data, and files without rows.
        without_response: examples left out because no response is within the length.
        cut: examples that were cut to the length.
        turns_without_loss: assistant turns that the chat template rewrites, or of weight 0.
    """

    unused_columns: Counter[str] = field(default_factory=Counter)
    skipped_files: list[str] = field(default_factory=list)
    without_response: int = 0
    cut: int = 0
    turns_without_loss: int = 0

    def forget_columns_of(self, source: str) -> None:
        """Keys of messages that a chat template reads are used after all.

        Args:
            source: of the template.
        """
        for column in [one for one in self.unused_columns if one.startswith(MESSAGES)]:
            key = column.removeprefix(MESSAGES)
            names = REASONING if key in REASONING else (key,)
            if any(name in source for name in names):
                del self.unused_columns[column]

    def as_json(self) -> dict[str, Any]:
        """The counts as a JSON object."""
        return {**vars(self), "unused_columns": dict(self.unused_columns)}

    def lines(self) -> list[str]:
        """One line for each kind of thing that was left out."""
        columns = ", ".join(f"{name} ({n} rows)" for name, n in self.unused_columns.most_common())
        told = {
            f"Columns with text that are not used: {columns}.": bool(columns),
            f"Files that hold no data: {', '.join(self.skipped_files)}.": bool(self.skipped_files),
            f"{self.without_response} examples left out: no response within the length.": (
                self.without_response
            ),
            f"{self.cut} examples cut to the length.": self.cut,
            f"{self.turns_without_loss} assistant turns carry no loss.": self.turns_without_loss,
        }
        return [line for line, holds in told.items() if holds]
