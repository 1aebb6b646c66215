"""Parses tool calls in a model's text as the text grows.

A call ends where its JSON or Python ends. Marks that stand within its strings are part of them.
Where a call ends between tags, see `TaggedScanner`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moaspec_core.chat.argument_types import Schema
from moaspec_core.chat.call_forms import CALL_ID, CallForm, new_call_id, short_call_id
from moaspec_core.chat.call_scanners import OPENINGS, JsonScanner, PythonScanner, TaggedScanner

BETWEEN = " \t\r\n;,"  # what may stand between calls that follow one another


@dataclass(frozen=True)
class Call:
    """A call that the model made; `arguments` is JSON text."""

    name: str
    arguments: str
    id: str

    def as_json(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


Scanner = JsonScanner | TaggedScanner | PythonScanner


class CallReader:
    """Splits a growing text into content and tool calls.

    Args:
        functions: that exist, by name, with the schemas of their arguments. Calls of others are
            taken for text.
        parallel: whether there may be several calls; else those after the first are left out.
        forced: whether the text consists of calls only, so that it has no content.
    """

    def __init__(
        self,
        form: CallForm,
        functions: Mapping[str, Schema],
        *,
        parallel: bool = True,
        forced: bool = False,
    ) -> None:
        self._form, self._functions, self._parallel = form, functions, parallel
        self._forced, self._cut = forced, False
        self._buffer = ""
        # Bare calls begin with the text, all others behind their trigger.
        self._read: Callable[[bool], str | None] = (
            self._emit_content if form.trigger else self._begin_bare
        )
        self._scanner: Scanner = JsonScanner()
        self._mark = ""  # text before the JSON; it is content if there is no call
        self._block_open = False  # the mark that ends a call has not been read
        self._name, self._given_id = "", ""  # read before the arguments of a call
        self._silent = True  # nothing has been said yet
        self._ids = set[str]()
        self.calls: list[Call] = []

    def feed(self, text: str, *, last: bool, cut: bool = False) -> tuple[str, list[Call]]:
        """Add text (the `last`, where nothing follows); return certain content and whole calls.

        Args:
            cut: whether the text ended without its model: at a limit or a stop string. A call that
                has begun there is left out; else it is content.
        """
        self._buffer += text
        self._cut = cut
        known, said = len(self.calls), ""
        while (part := self._read(last)) is not None:
            said += part
            self._silent = self._silent and not part
        return "" if self._forced else said, self.calls[known:]

    def _begin_bare(self, last: bool) -> str | None:
        """Start of a text in a form without trigger: it begins with a call or has none."""
        rest = self._buffer.lstrip()
        if not rest and not last:
            return None
        if rest.startswith(OPENINGS):
            return self._begin_call(0)
        self._read = self._emit_content
        return ""

    def _emit_content(self, last: bool) -> str | None:
        """Say everything up to the next trigger."""
        trigger = self._form.trigger
        place = self._buffer.find(trigger) if trigger else -1
        if place >= 0:
            said = self._take(place)
            self._begin_call(len(trigger))
            return "" if self._silent and said.isspace() else said
        withheld = begun(self._buffer, [trigger]) if trigger else 0
        if last and not (self._cut and 2 * withheld > len(trigger)):  # half a mark is no other text
            withheld = 0
        certain = self._buffer[: len(self._buffer) - withheld]
        if self._silent and not last and not certain.strip():
            return None
        return self._take(len(certain)) or None

    def _begin_call(self, mark: int) -> str:
        """Take a mark of `mark` characters, then expect a call."""
        self._mark, self._name = self._take(mark), ""
        self._read = self._head if self._form.named else self._begin_scan
        return ""

    def _begin_scan(self, last: bool) -> str | None:
        """Choose how to read a call by its first character: JSON stands for itself in any form."""
        opening = self._buffer.lstrip()[:1]
        if not opening and not last:
            return None
        self._scanner, self._read = JsonScanner(), self._call
        if self._form.tags and opening not in OPENINGS:
            self._scanner = TaggedScanner(self._form, self._functions)
        elif self._form.python and opening == "[":
            self._scanner = PythonScanner(self._functions)
        return ""

    def _head(self, last: bool) -> str | None:
        """Read the name, and the id if there is one, before the arguments of a call."""
        head, mark, _ = self._buffer.partition(self._form.named)
        if not mark and not last and self._may_name(head.lstrip()):
            return None
        if not mark and self._cut and self._may_name(head.lstrip()):
            return self._without_end()
        name, _, given_id = head.lstrip().partition(CALL_ID)
        if mark and name in self._functions:
            self._name, self._given_id = name, given_id
            self._mark += self._take(len(head) + len(mark))
        self._read = self._begin_scan
        return ""

    def _may_name(self, head: str) -> bool:
        """Whether a text may go on to be the name of a function and what follows it."""
        ends = (CALL_ID, self._form.named)
        return any(
            f"{name}{end}".startswith(head) or head.startswith(f"{name}{CALL_ID}")
            for name in self._functions
            for end in ends
        )

    def _call(self, last: bool) -> str | None:
        """Read a call; text that proves to be none is content."""
        start = len(self._buffer) - len(self._buffer.lstrip())
        self._scanner.scan(self._buffer[start:], last=last)
        if self._scanner.end is None:
            if self._scanner.broken and self._buffer[start:]:
                return self._treat_as_content(0)
            return self._without_end() if last else None
        end = start + self._scanner.end
        calls = self._parsed(self._buffer[start:end])
        if not calls:
            return self._treat_as_content(end)
        self._take(end)
        room = len(calls) if self._parallel else max(1 - len(self.calls), 0)
        self.calls += calls[:room]
        self._block_open, self._read = True, self._after_call
        return ""

    def _treat_as_content(self, length: int) -> str:
        """Treat the mark and `length` characters as content, then look for the next call."""
        self._read = self._emit_content
        return self._mark + self._take(length)

    def _without_end(self) -> str:
        """The last text, which begins with a call without an end."""
        said = self._treat_as_content(len(self._buffer))
        return "" if self._cut and self._mark else said

    def _after_call(self, last: bool) -> str | None:
        """Skip the end mark and the separators before the next call; other text is content."""
        rest = self._buffer.lstrip(BETWEEN)
        between = len(self._buffer) - len(rest)
        end, trigger = self._form.end if self._block_open else "", self._form.trigger
        if not rest:
            self._take(between if last else 0)
            return None
        if end and rest.startswith(end):
            self._take(between + len(end))
            self._block_open = False
            return ""
        if trigger and rest.startswith(trigger):
            return self._begin_call(between + len(trigger))
        if any(mark.startswith(rest) for mark in (end, trigger)):
            self._take(len(self._buffer) if last else 0)
            return None
        if self._block_open and rest.startswith(OPENINGS):
            return self._begin_call(between)
        self._read = self._emit_content
        return ""

    def _parsed(self, text: str) -> list[Call]:
        """The calls in a text; none where something in it is no call."""
        try:
            value = self._scanner.value(text)
        except (ValueError, RecursionError):
            return []
        if self._name:
            value = {"name": self._name, "arguments": value, "id": self._given_id}
        calls = [self._one(each) for each in (value if isinstance(value, list) else [value])]
        found = [call for call in calls if call is not None]
        return found if len(found) == len(calls) else []

    def _one(self, value: Any) -> Call | None:
        if isinstance(value, dict) and isinstance(value.get("function"), dict):
            value = {"id": value.get("id"), **value["function"]}  # as in OpenAI's messages
        name = value.get("name") if isinstance(value, dict) else None
        if not isinstance(name, str) or name not in self._functions:
            return None
        arguments = value.get("arguments", value.get("parameters"))
        arguments = {} if arguments is None else arguments
        try:
            if not isinstance(arguments, str):
                arguments = json.dumps(arguments, allow_nan=False)
            arguments.encode()
        except (ValueError, RecursionError):
            return None
        return Call(name, arguments, self._id(value.get("id")))

    def _id(self, given: Any) -> str:
        """The id that the model wrote, as Mistral's do, or a new one."""
        is_id = isinstance(given, str) and short_call_id(given) == given
        found = str(given) if is_id and given not in self._ids else new_call_id()
        self._ids.add(found)
        return found

    def _take(self, length: int) -> str:
        taken, self._buffer = self._buffer[:length], self._buffer[length:]
        return taken


def begun(text: str, marks: Sequence[str]) -> int:
    """Characters at the end of a text with which one of these marks may begin."""
    longest = max(map(len, marks), default=1) - 1
    for start in range(max(len(text) - longest, 0), len(text)):
        if any(mark.startswith(text[start:]) for mark in marks):
            return len(text) - start
    return 0
