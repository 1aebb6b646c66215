"""Copies of a text with one spelling for equal text, and the way back to the text.

Compatibility forms, capitals, digits of other scripts, white space, dashes, quotation marks and
angle brackets become the usual ones; accents and characters that nobody sees go. A second copy has
the escapes of JSON, HTML, URLs and Markdown decoded. Both take time in proportion to the text.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from unicodedata import category, decimal, normalize
from urllib.parse import unquote

_UNSEEN = frozenset("\u034f\u115f\u1160\u17b4\u17b5")
"""Besides control and format characters."""
_SAME = {
    **dict.fromkeys("\u2212\u2043", "-"),
    **dict.fromkeys("\u2044\u2215", "/"),
    **dict.fromkeys("\u2018\u2019\u201b\u2032\u02bc\u02b9`", "'"),
    **dict.fromkeys("\u2039\u2329\u3008\u27e8\u276c\u276e\u02c2\u227a\u29fc\u1438", "<"),
    **dict.fromkeys("\u203a\u232a\u3009\u27e9\u276d\u276f\u02c3\u227b\u29fd\u1433", ">"),
    "\u2800": " ",
}

_ESCAPE = re.compile(
    r"(?:\\u[0-9a-f]{4})+|\\u\{[0-9a-f]{1,6}\}|\\x[0-9a-f]{2}|(?:%[0-9a-f]{2})+"
    r"|&(?:#[0-9]{1,8}|#x[0-9a-f]{1,8}|[a-z][a-z0-9]{1,31});?"
    r"|\\[nrt]|\\(?=[!-/:-@\[-`{-~])|[*`]+|~~|__",
    re.IGNORECASE,
)
_DECODINGS = 4
"""Escapes within escapes are decoded so many times."""


@dataclass(frozen=True)
class Folded:
    """A copy of a text.

    Attributes:
        text: the copy.
        starts, stops: where in the text each of its characters begins and ends; both ascend.
        source: the text.
    """

    text: str
    starts: Sequence[int]
    stops: Sequence[int]
    source: str

    def span(self, start: int, stop: int) -> tuple[int, int]:
        """Where characters `start` to `stop - 1` stand in the text, their accents included."""
        end = self.stops[stop - 1]
        while end < len(self.source) and _is_mark(self.source[end]):
            end += 1
        return self.starts[start], end


def copies(text: str) -> Iterator[Folded]:
    """The text folded; where it has escapes or emphasis, also without these."""
    read = same(text)
    yield _folded(read)
    plain = read
    for _ in range(_DECODINGS):
        decoded = _decoded(plain)
        if decoded.text == plain.text:
            break
        plain = decoded
    if plain is not read:
        yield _folded(plain)


def fold(text: str) -> Folded:
    """The first of the `copies` of a text."""
    return _folded(same(text))


def same(text: str) -> Folded:
    """A text as its own copy."""
    return Folded(text, range(len(text)), range(1, len(text) + 1), text)


def _folded(read: Folded) -> Folded:
    chars, starts, stops = list[str](), list[int](), list[int]()
    last = ""
    for place, char in enumerate(read.text):
        for new in _usual(char):
            if new != " " or last != " ":
                chars.append(new)
                starts.append(read.starts[place])
                stops.append(read.stops[place])
                last = new
    return Folded("".join(chars), starts, stops, read.source)


def _decoded(read: Folded) -> Folded:
    """A copy whose escapes are decoded; each character of one stands for all of it."""
    parts, starts, stops, place = list[str](), list[int](), list[int](), 0
    for found in _ESCAPE.finditer(read.text):
        first, end = found.span()
        new = _meaning(found[0])
        parts += [read.text[place:first], new]
        starts += read.starts[place:first]
        starts += [read.starts[first]] * len(new)
        stops += read.stops[place:first]
        stops += [read.stops[end - 1]] * len(new)
        place = end
    starts += read.starts[place:]
    stops += read.stops[place:]
    return Folded("".join([*parts, read.text[place:]]), starts, stops, read.source)


def _meaning(escape: str) -> str:
    """What an escape stands for; nothing for emphasis and for a backslash before punctuation."""
    if escape[0] == "%":
        return unquote(escape)
    if escape[0] == "&":
        return html.unescape(escape if escape.endswith(";") else f"{escape};")
    digits = re.findall(r"[0-9a-f]+", escape.lower().replace("\\u", " ").replace("\\x", " "))
    if escape[:2].lower() in ("\\u", "\\x"):
        codes = [min(int(one, 16), 0x10FFFF) for one in digits]
        pairs = "".join(map(chr, codes)).encode("utf-16-le", "surrogatepass")
        return pairs.decode("utf-16-le", "replace")
    return " " if len(escape) == 2 and escape[0] == "\\" else ""


@lru_cache(1 << 12)
def _usual(char: str) -> str:
    """A character as others like it are written; several for a ligature, none for an accent."""
    found = normalize("NFKD", normalize("NFKD", char).casefold())
    return "".join(_SAME.get(one, _one(one)) for one in found)


def _one(char: str) -> str:
    if char.isspace():
        return " "
    if _is_mark(char) or _is_unseen(char):
        return ""
    digit = decimal(char, None)
    if digit is not None:
        return str(digit)
    return "-" if category(char) == "Pd" else char


def _is_mark(char: str) -> bool:
    return category(char).startswith("M")


def _is_unseen(char: str) -> bool:
    """Format and control characters, and fillers; selectors of variants are marks."""
    return category(char) in {"Cf", "Cc"} or char in _UNSEEN
