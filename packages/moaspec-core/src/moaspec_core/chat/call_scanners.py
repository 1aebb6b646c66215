"""Scanners, which find the end of a tool call in a text that grows: JSON, Python lists, tags."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from moaspec_core.chat.argument_types import Schema, properties_of, typed, types_of

if TYPE_CHECKING:
    from moaspec_core.chat.call_forms import CallForm, Tags


OPENINGS = ("{", "[")
_CLOSING = {"[": "]", "(": ")", "{": "}"}
OUTSIDE_STRINGS = frozenset('{}[]:,+-.0123456789eEtrufalsnINy" \t\r\n')
"""Characters of JSON that is no string; `N`, `I` and `y` are of Python's NaN and Infinity."""


class BracketScanner:
    """Finds the bracket that closes a growing text's first one; strings may contain brackets.

    Attributes:
        end: where the object or list ends; None as long as it is open.
        broken: whether the text cannot be one.
    """

    def __init__(self, quotes: str) -> None:
        self.end: int | None = None
        self.broken = False
        self._quotes = quotes
        self._place = self._depth = 0
        self._quote, self._escaped = "", False

    def scan(self, text: str, *, last: bool) -> None:  # noqa: ARG002
        """Continue the last scan; `text` is the same text, with more at its end."""
        self.broken = self.broken or not self._may_begin(text)
        while self._place < len(text) and self.end is None and not self.broken:
            self._step(text[self._place])
            self._place += 1

    def _may_begin(self, text: str) -> bool:
        return text.startswith(OPENINGS)

    def _step(self, character: str) -> None:
        if self._quote:
            if character == self._quote and not self._escaped:
                self._quote = ""
            self._escaped = character == "\\" and not self._escaped
        elif character in self._quotes:
            self._quote = character
        elif character in _CLOSING:
            self._depth += 1
        elif character in _CLOSING.values():
            self._depth -= 1
            self.end = self._place + 1 if self._depth == 0 else None


class JsonScanner(BracketScanner):
    """Finds the end of a JSON object or list."""

    def __init__(self) -> None:
        super().__init__('"')

    def value(self, text: str) -> Any:
        """The JSON up to the end; ValueError where it is none."""
        return json.loads(text, strict=False)

    def _step(self, character: str) -> None:
        self.broken = not self._quote and character not in OUTSIDE_STRINGS
        super()._step(character)


class TaggedScanner:
    """Finds the end of a call between XML-like tags: Qwen3-Coder's and GLM-4.5's.

    Values are not escaped, so they may contain any tag. A call ends at the last end mark before the
    next call, or before the end of the text. A value ends before the tag of another argument.

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
        """The call's name and arguments; ValueError where it is not complete."""
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
            if text.startswith(opening) and any(_agree(rest, end) for end in ends):
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
        value = text[start:end].removeprefix(tags.padding).removesuffix(tags.padding)
        arguments[name] = typed(value, types)
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


CONSTANTS: Mapping[str, Any] = {
    **{"True": True, "False": False, "None": None},
    **{"true": True, "false": False, "null": None},
}
LONGEST_START = 200  # characters of a list that tell whether it begins with a function's name
_TOKEN = re.compile(
    r"""\s*(?:
    (?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
    |(?P<number>-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)
    |(?P<name>[^\W\d][\w.-]*)
    |(?P<sign>[][(){},:=])
    )\s*""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0"}


class PythonScanner(BracketScanner):
    """Finds the end of a list of calls as Llama 4 has them: `[weather(city="Paris"), time()]`."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__("\"'")
        self._names = names

    def value(self, text: str) -> list[dict[str, Any]]:
        """Names and arguments; ValueError for what is no call of constants by name."""
        return _Parser(text).calls()

    def _may_begin(self, text: str) -> bool:
        start = "".join(text[1:LONGEST_START].split())
        return any(_agree(start, f"{name}(") for name in self._names)


class _Parser:
    """Parses one list of calls."""

    def __init__(self, text: str) -> None:
        self._text, self._place = text, 0
        self._kind = self._word = ""
        self._advance()

    def calls(self) -> list[dict[str, Any]]:
        found = self._items("[", self._call)
        if self._kind:
            raise ValueError("there is more after the list")
        return found

    def _call(self) -> dict[str, Any]:
        name = self._expect("name")
        return {"name": name, "arguments": dict(self._items("(", self._argument))}

    def _argument(self) -> tuple[str, Any]:
        key = self._expect("name")
        self._sign("=")
        return key, self._value()

    def _value(self) -> Any:
        if self._word in ("[", "("):
            return self._items(self._word, self._value)
        if self._word == "{":
            return dict(self._items("{", self._pair))
        if self._kind == "text":
            return self._string()
        if self._kind == "number":
            return json.loads(self._expect("number"))
        return CONSTANTS[self._expect("name", CONSTANTS)]

    def _pair(self) -> tuple[str, Any]:
        key = self._string()
        self._sign(":")
        return key, self._value()

    def _items(self, opening: str, item: Any) -> list[Any]:
        """Items up to the closing sign; a comma may stand behind the last one."""
        self._sign(opening)
        found: list[Any] = []
        while self._word != _CLOSING[opening]:
            if found:
                self._sign(",")
                if self._word == _CLOSING[opening]:
                    break
            found.append(item())
        self._sign(_CLOSING[opening])
        return found

    def _string(self) -> str:
        text = _ESCAPE.sub(_unescaped, self._expect("text")[1:-1])
        return text.encode("utf-16", "surrogatepass").decode("utf-16")

    def _sign(self, sign: str) -> None:
        self._expect("sign", (sign,))

    def _expect(self, kind: str, among: Collection[str] = ()) -> str:
        word = self._word
        if self._kind != kind or (among and word not in among):
            raise ValueError(f"{kind} expected, got {word!r}")
        self._advance()
        return word

    def _advance(self) -> None:
        found = _TOKEN.match(self._text, self._place)
        if found is None:
            if self._text[self._place :].strip():
                raise ValueError("no Python constant")
            self._kind = self._word = ""
            return
        self._kind, self._place = str(found.lastgroup), found.end()
        self._word = found[self._kind]


def _unescaped(escape: re.Match[str]) -> str:
    what = escape[1]
    if len(what) > 1:
        return chr(int(what[1:], 16))
    if what in "\\'\"/":
        return what
    return "" if what == "\n" else _ESCAPED.get(what, escape[0])
