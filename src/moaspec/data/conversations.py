"""Reads conversations from data sets whose rows have different shapes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from moaspec.data.messages import MalformedError, Message
from moaspec.data.row_shapes import DataRow, read_row
from moaspec.data.row_sources import OnMalformed, Record, read_records, refuse
from moaspec.data.unused_rows import ReadReport
from moaspec.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """One row of data.

    Attributes:
        where: its place, for messages.
        name: the row's own `id`, or "".
        messages: the conversation, of the normal form; empty where only token ids are given.
        tools: descriptions of functions, of the normal form.
        variables: further ones of the chat template (`chat_template_kwargs`).
        plain: a single text, which also makes sense without a chat template.
        prompt_ids, response_ids: token ids, where the row has them.
        unused: columns with text that no shape reads.
    """

    where: str
    name: str = ""
    messages: tuple[Message, ...] = ()
    tools: tuple[Any, ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    plain: bool = False
    prompt_ids: tuple[int, ...] = ()
    response_ids: tuple[int, ...] | None = None
    unused: tuple[str, ...] = ()


def read_conversations(
    sources: Iterable[str], on_malformed: OnMalformed = refuse, report: ReadReport | None = None
) -> Iterator[Conversation]:
    """Conversations of all sources, in order.

    Args:
        sources: see `read_records`.
        on_malformed: called with a message that names file and line for each malformed row.
        report: counts columns and files that are not used.

    Raises:
        DataError: a source cannot be read; or an error of `on_malformed`.
    """
    report = ReadReport() if report is None else report
    for source in sources:
        with closing(read_records(source, on_malformed, report.skipped_files)) as records:
            for record in records:
                try:
                    conversation = parse(record)
                except DataError as error:
                    on_malformed(error)
                    continue
                report.unused_columns.update(conversation.unused)
                yield conversation


def parse(record: Record) -> Conversation:
    """Read one row; see docs/data.md for the shapes.

    Raises:
        DataError: no known shape, or something of the wrong type in it.
    """
    row = DataRow(record.value)
    try:
        fields = read_row(row)
    except MalformedError as error:
        raise DataError(f"{record.where}: {error}") from error
    identifier = row.get("id")
    name = identifier if isinstance(identifier, str) else ""
    return Conversation(where=record.where, name=name, unused=row.unused(), **fields)
