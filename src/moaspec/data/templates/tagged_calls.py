"""Tool calls between XML-like tags: Qwen3-Coder's and GLM-4.5's.

Values are not escaped, so they may contain any tag. A call ends at the last end mark before the
next call, or before the end of the text. A value ends before the tag of another argument.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from moaspec.data.templates.argument_types import Schema, properties_of, typed, types_of

if TYPE_CHECKING:
    from moaspec.data.templates.call_forms import CallForm, Tags


class TaggedScanner:
    """Finds the end of one call at the start of a text that grows; the trigger is before it.

    Args:
        form: with `tags`.
        functions: schemas of the arguments, by function.

    Attributes:
        end: where the call ends; None as long as it is open.
        broken: whether the text is no call.
    """

    def __init__(self, form: CallForm, functions: Mapping[str, Schema]) -> None:
        assert form.tags is not None
        self.end: int | None = None
        self.broken = False
        self._form, self._tags, self._functions = form, form.tags, functions
        self._place = 0  # before it no next call begins
        self._close = form.tags.close or form.tags.value_end
        head = _head(form.tags, functions)
        self._whole = (
            re.compile(rf"{head}\s*{re.escape(form.end)}") if not form.tags.close else None
        )
        between = rf"{re.escape(form.end)}\s*{re.escape(form.trigger)}"
        self._next = re.compile(rf"{re.escape(self._close)}\s*(?={between}{head})")
        self._last = re.compile(rf"{re.escape(self._close)}\s*(?={re.escape(form.end)})")

    def scan(self, text: str, *, last: bool) -> None:
        """Go on where the last scan ended; `text` begins as it did then."""
        self.broken = not self._may_begin(text.lstrip())
        whole = self._whole and self._whole.match(text)
        if whole:  # no argument can hide the end
            self.end = whole.end() - len(self._form.end)
        following = self._next.search(text, self._place)
        if following and self.end is None:
            self.end = following.end()
        self._place = max(self._place, text.rfind(self._close, self._place))
        if last and self.end is None:
            self.end = self._last_end(text)

    def value(self, text: str) -> dict[str, Any]:
        """The call's name and arguments.

        Raises:
            ValueError: it is not complete.
        """
        return _parsed(text, self._tags, self._functions)

    def _last_end(self, text: str) -> int | None:
        found = [one.end() for one in self._last.finditer(text)]
        if found:
            return found[-1]
        complete = bool(self._tags.close) and text.rstrip().endswith(self._tags.close)
        return len(text) if complete else None

    def _may_begin(self, text: str) -> bool:
        """Whether a text is the start of a call, or may become it."""
        tags = self._tags
        ends = [tags.name_end] if tags.name_end else [tags.key, self._form.end]
        for name in self._functions:
            opening = f"{tags.name}{name}"
            if opening.startswith(text):
                return True
            rest = text.removeprefix(opening).lstrip()
            if text.startswith(opening) and any(map(_agree, [rest] * len(ends), ends)):
                return True
        return False


def _agree(text: str, mark: str) -> bool:
    return text.startswith(mark) or mark.startswith(text)


def _head(tags: Tags, functions: Mapping[str, Schema]) -> str:
    """Pattern of a call's start; its group is the name."""
    names = "|".join(map(re.escape, sorted(functions, key=len, reverse=True)))
    after = re.escape(tags.name_end) if tags.name_end else r"(?=\s*<)"
    return rf"\s*{re.escape(tags.name)}({names}){after}"


def _parsed(text: str, tags: Tags, functions: Mapping[str, Schema]) -> dict[str, Any]:
    text = text.rstrip().removesuffix(tags.close).rstrip()
    head = re.match(_head(tags, functions), f"{text}<")
    if head is None:
        raise ValueError("no function's name")
    schema, place = functions[head[1]], head.end()
    properties, arguments = properties_of(schema), dict[str, Any]()
    key = re.compile(tags.key_pattern)
    while begun := key.match(text, place):
        name, start = begun[1], begun.end()
        end = _value_end(text, start, tags, {name, *arguments}, properties)
        types = types_of(properties.get(name, {}), schema)
        arguments[name] = typed(_unpadded(text[start:end], tags.padding), types)
        place = end + len(tags.value_end)
    if text[place:].strip():
        raise ValueError("text that is no argument")
    return {"name": head[1], "arguments": arguments}


def _value_end(
    text: str, start: int, tags: Tags, given: set[str], properties: Mapping[str, Schema]
) -> int:
    """Where a value ends: before the next argument, or at the last end tag.

    A name that the schema does not have begins an argument only where it stands as templates write
    it, on a line of its own.
    """
    for found in re.finditer(rf"{re.escape(tags.value_end)}{tags.key_pattern}", text[start:]):
        own_line = found[0][len(tags.value_end)] == "\n"
        if found[1] not in given and (found[1] in properties or own_line):
            return start + found.start()
    return text.rindex(tags.value_end, start)


def _unpadded(value: str, padding: str) -> str:
    return value.removeprefix(padding).removesuffix(padding)
