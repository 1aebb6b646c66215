"""Reads conversations from data sets whose rows have different formats."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, fields
from typing import Any

from moaspec.data.formats import read_row
from moaspec.data.rows import OnMalformed, Row, read_rows, refuse
from moaspec_core.chat.messages import REASONING, MalformedError, Message
from moaspec_core.errors import DataError

MESSAGES = "messages."


@dataclass
class ReadReport:
    """Counts what readers leave out."""

    # Rows with a column that is not read and not empty, by its name.
    unused_columns: Counter[str] = field(default_factory=Counter)
    # Files of a directory that are no data, and files without rows.
    skipped_files: list[str] = field(default_factory=list)
    without_response: int = 0  # examples left out: no response with loss is within the length
    cut: int = 0  # examples that were cut to the length
    turns_without_loss: int = 0  # assistant turns that the chat template rewrites, or of weight 0

    def add(self, other: "ReadReport") -> None:
        """Count what another reader left out, too."""
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))

    def forget_columns_of(self, source: str) -> None:
        """Keys of messages that a chat template reads are used after all."""
        for column in [one for one in self.unused_columns if one.startswith(MESSAGES)]:
            key = column.removeprefix(MESSAGES)
            names = REASONING if key in REASONING else (key,)
            if any(re.search(rf"\b{re.escape(name)}\b", source) for name in names):
                del self.unused_columns[column]

    def lines(self) -> list[str]:
        """One line for each kind of thing that was left out."""
        columns = ", ".join(f"{name} ({n} rows)" for name, n in self.unused_columns.most_common())
        told = {
            f"Columns that are not used: {columns}.": bool(columns),
            f"Files that hold no data: {', '.join(self.skipped_files)}.": bool(self.skipped_files),
            f"{self.without_response} examples left out: no response with loss in the length.": (
                self.without_response
            ),
            f"{self.cut} examples cut to the length.": self.cut,
            f"{self.turns_without_loss} assistant turns carry no loss.": self.turns_without_loss,
        }
        return [line for line, holds in told.items() if holds]


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """One row of data."""

    where: str  # its place, for messages
    name: str = ""  # the row's own `id`, or ""
    # The conversation, of the normal form; empty where only token ids are given.
    messages: tuple[Message, ...] = ()
    tools: tuple[Any, ...] = ()  # descriptions of functions, of the normal form
    # Further ones of the chat template (`chat_template_kwargs`).
    variables: Mapping[str, Any] = field(default_factory=dict)
    plain: bool = False  # a single text, which also makes sense without a chat template
    # prompt_ids, response_ids: token ids, where the row has them.
    prompt_ids: tuple[int, ...] = ()
    response_ids: tuple[int, ...] | None = None
    unused: tuple[str, ...] = ()  # see `ReadReport.unused_columns`


def read_conversations(
    sources: Iterable[str], on_malformed: OnMalformed = refuse, report: ReadReport | None = None
) -> Iterator[Conversation]:
    """Conversations of all sources, in order.

    Args:
        sources: see `read_rows`.
        on_malformed: called with a message that names file and line for each malformed row.
        report: counts columns and files that are not used.

    Raises:
        DataError: a source cannot be read; or an error of `on_malformed`.
    """
    report = ReadReport() if report is None else report
    for source in sources:
        with closing(read_rows(source, on_malformed, report.skipped_files)) as rows:
            for row in rows:
                try:
                    conversation = parse(row)
                except DataError as error:
                    on_malformed(error)
                    continue
                report.unused_columns.update(conversation.unused)
                yield conversation


def parse(row: Row) -> Conversation:
    """Read one row, of a format of docs/data.md; DataError for another, or wrong types in it."""
    try:
        return Conversation(where=row.where, **read_row(row.value))
    except MalformedError as error:
        raise DataError(f"{row.where}: {error}") from error
