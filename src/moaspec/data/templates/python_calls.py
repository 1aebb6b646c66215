"""Tool calls as a Python list: `[weather(city="Paris"), time()]`, as Llama 4 writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

CONSTANTS: Mapping[str, Any] = {
    **{"True": True, "False": False, "None": None},
    **{"true": True, "false": False, "null": None},
}
LONGEST_START = 200
"""Characters of a list that tell whether it begins with a function's name."""
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
_CLOSING = {"[": "]", "(": ")", "{": "}"}


class PythonScanner:
    """Finds the end of a list of calls at the start of a text that grows.

    Args:
        names: of the functions.

    Attributes:
        end: where the list ends; None as long as it is open.
        broken: whether the text is no list of calls.
    """

    def __init__(self, names: Collection[str]) -> None:
        self.end: int | None = None
        self.broken = False
        self._names = names
        self._place = self._depth = 0
        self._quote, self._escaped = "", False

    def scan(self, text: str, *, last: bool) -> None:  # noqa: ARG002
        """Go on where the last scan ended; `text` begins as it did then."""
        self.broken = not self._may_begin("".join(text[1:LONGEST_START].split()))
        while self._place < len(text) and self.end is None:
            self._step(text[self._place])
            self._place += 1

    def value(self, text: str) -> list[dict[str, Any]]:
        """Names and arguments of the calls.

        Raises:
            ValueError: something in the list is no call of constants by name.
        """
        return _Parser(text).calls()

    def _may_begin(self, text: str) -> bool:
        starts = (f"{name}(" for name in self._names)
        return any(text.startswith(one) or one.startswith(text) for one in starts)

    def _step(self, character: str) -> None:
        if self._quote:
            if character == self._quote and not self._escaped:
                self._quote = ""
            self._escaped = character == "\\" and not self._escaped
        elif character in "\"'":
            self._quote = character
        elif character in _CLOSING:
            self._depth += 1
        elif character in _CLOSING.values():
            self._depth -= 1
            self.end = self._place + 1 if self._depth == 0 else None


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
