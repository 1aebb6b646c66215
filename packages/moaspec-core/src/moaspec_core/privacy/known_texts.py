"""Finds known private texts in another text, in any spelling, in one pass."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from unicodedata import category

from moaspec_core.errors import InputError
from moaspec_core.privacy.folding import FoldedText, fold
from moaspec_core.privacy.spans import Span

_MAX_WHOLE_WORD = 3
"""Private text of at most this length is found as a whole word only; many words contain it."""

_MIN_INFIX = 8  # private text of at least this length is found within words too, with any spacing

_MAX_WORK = 64  # limit of nested private texts that are checked per character, on average


@dataclass(frozen=True)
class LetterSequence:
    """The letters, digits and symbols of a folded text, without separators."""

    text: str  # these characters
    places: list[int]  # index of each in the folded text
    # Number of separators before each. Those between digits do not count, because digits may be
    # grouped in any way.
    breaks: list[int]
    edges: list[bool]  # whether a word may begin at each; one more for the end


def letters(text: str) -> LetterSequence:
    """Extract the letters, digits and symbols of a folded text."""
    places = [place for place, char in enumerate(text) if _is_significant(char)]
    breaks, edges, last = list[int](), list[bool](), -2
    for place in places:
        char, before = text[place], text[last] if last >= 0 else ""
        apart = place != last + 1
        digits = char.isdigit() and before.isdigit()
        breaks.append((breaks[-1] if breaks else 0) + (apart and bool(before) and not digits))
        edges.append(apart or char.isdigit() != before.isdigit() or _is_word(char, before))
        last = place
    return LetterSequence("".join(text[one] for one in places), places, breaks, [*edges, True])


def _is_significant(char: str) -> bool:
    return char.isalnum() or (not char.isascii() and category(char).startswith("S"))


def _is_word(*chars: str) -> bool:
    """Whether one of the characters is of a script that writes words without spaces."""
    return any(category(char) == "Lo" for char in chars if char)


@dataclass
class _Node:
    """One state of the automaton."""

    after: dict[str, _Node] = field(default_factory=dict)  # next state by character
    shorter: _Node | None = None  # failure link: the state of the longest proper suffix
    # Length, breaks and kind of the private text that ends here.
    ends: tuple[int, frozenset[int], str] | None = None
    # Output link: the state of the next shorter private text that ends here.
    next_end: _Node | None = None


class PrivateTextFinder:
    """An Aho-Corasick automaton of private texts (Aho and Corasick, 1975).

    Args:
        kinds: kinds of private texts by text.
    """

    def __init__(self, kinds: Mapping[str, str]) -> None:
        self._root = _Node()
        for value, kind in kinds.items():
            self._add_text(letters(fold(value).text), kind)
        self._link()

    def find(self, folded: FoldedText) -> Iterator[Span]:
        """Find private texts, also with other capitals, spacing, hyphenation or accents.

        Raises:
            InputError: too many private texts are parts of one another.
        """
        read, node, work = letters(folded.text), self._root, 0
        for end, char in enumerate(read.text, start=1):
            node = self._step(node, char)
            ending: _Node | None = node if node.ends else node.next_end
            while ending is not None:
                work += 1
                if work > _MAX_WORK * (len(read.text) + _MAX_WORK):
                    raise InputError(
                        "Too many of the private texts are parts of one another; mark fewer."
                    )
                length, breaks, kind = ending.ends or (0, frozenset(), "")
                if _is_match(read, end - length, end, breaks):
                    place = folded.span(read.places[end - length], read.places[end - 1] + 1)
                    yield Span(*place, kind)
                    break  # the shorter ones are within
                ending = ending.next_end

    def _step(self, node: _Node, char: str) -> _Node:
        while char not in node.after and node.shorter is not None:
            node = node.shorter
        return node.after.get(char, self._root)

    def _add_text(self, value: LetterSequence, kind: str) -> None:
        if not value.text:
            return
        node = self._root
        for char in value.text:
            node = node.after.setdefault(char, _Node())
        _, breaks, first = node.ends or (0, frozenset(), kind)
        node.ends = (len(value.text), breaks | {value.breaks[-1]}, first)

    def _link(self) -> None:
        waiting = deque([self._root])
        while waiting:
            node = waiting.popleft()
            for char, after in node.after.items():
                if node.shorter is None:
                    after.shorter = self._root
                else:
                    after.shorter = self._step(node.shorter, char)
                shorter = after.shorter
                after.next_end = shorter if shorter.ends else shorter.next_end
                waiting.append(after)


def _is_match(read: LetterSequence, start: int, end: int, breaks: frozenset[int]) -> bool:
    """Whether a range is whole words, long enough, or spaced like the private text."""
    if end - start >= _MIN_INFIX or (read.edges[start] and read.edges[end]):
        return True
    if end - start <= _MAX_WHOLE_WORD:
        return False
    return read.breaks[end - 1] - read.breaks[start] in breaks
