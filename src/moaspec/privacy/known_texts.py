"""Finds texts that are known to be private, in any spelling, in one pass over another text."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from unicodedata import category

from moaspec.errors import InputError
from moaspec.privacy.folding import Folded, fold
from moaspec.privacy.spans import Span

_PART_OF_WORD = 3
"""Shorter private text is looked for as a whole word only: two letters are in every third word."""

_SURE = 8
"""Private text of so many letters is looked for within words too, however it is spaced."""

_WORK = 64
"""Private texts within one another that are looked at, for each character on average."""


@dataclass(frozen=True)
class Letters:
    """What of a folded text counts: letters, digits and signs, without what stands between them.

    Attributes:
        text: the letters.
        places: of each in the folded text.
        breaks: how many breaks stand before each letter. Between digits none count, as digits may
            be grouped in any way.
        edges: whether a word may begin at each letter; one more for the end.
    """

    text: str
    places: list[int]
    breaks: list[int]
    edges: list[bool]


def letters(folded: Folded | str) -> Letters:
    """The letters of a text."""
    text = folded if isinstance(folded, str) else folded.text
    places = [place for place, char in enumerate(text) if _counts(char)]
    breaks, edges, last = list[int](), list[bool](), -2
    for place in places:
        char, before = text[place], text[last] if last >= 0 else ""
        apart = place != last + 1
        digits = char.isdigit() and before.isdigit()
        breaks.append((breaks[-1] if breaks else 0) + (apart and bool(before) and not digits))
        edges.append(apart or char.isdigit() != before.isdigit() or _is_word(char, before))
        last = place
    return Letters("".join(text[one] for one in places), places, breaks, [*edges, True])


def _counts(char: str) -> bool:
    return char.isalnum() or (not char.isascii() and category(char).startswith("S"))


def _is_word(*chars: str) -> bool:
    """Whether one of the characters is of a script that writes words without spaces."""
    return any(category(char) == "Lo" for char in chars if char)


@dataclass
class _Node:
    """One state of the automaton.

    Attributes:
        after: the next states.
        shorter: the state of the longest other beginning that ends here.
        ends: the longest private text that ends here: its length, breaks and kind.
        next_end: the state of the next shorter one.
    """

    after: dict[str, _Node] = field(default_factory=dict)
    shorter: _Node | None = None
    ends: tuple[int, frozenset[int], str] | None = None
    next_end: _Node | None = None


class Finder:
    """An automaton (Aho and Corasick, 1975) of private texts.

    Args:
        kinds: private texts, and their kinds.
    """

    def __init__(self, kinds: Mapping[str, str]) -> None:
        self._root = _Node()
        for value, kind in kinds.items():
            self._add(letters(fold(value)), kind)
        self._link()

    def find(self, folded: Folded) -> Iterator[Span]:
        """Where they stand, in other capitals, spacing, hyphenation or accents, too.

        Raises:
            InputError: more private texts within one another than can be told apart in time.
        """
        read, node, work = letters(folded), self._root, 0
        for end, char in enumerate(read.text, start=1):
            node = self._step(node, char)
            ending: _Node | None = node if node.ends else node.next_end
            while ending is not None:
                work += 1
                if work > _WORK * (len(read.text) + _WORK):
                    raise InputError(
                        "Too many of the private texts are parts of one another; mark fewer."
                    )
                length, breaks, kind = ending.ends or (0, frozenset(), "")
                if _is_here(read, end - length, end, breaks):
                    place = folded.span(read.places[end - length], read.places[end - 1] + 1)
                    yield Span(*place, kind)
                    break  # the shorter ones are within
                ending = ending.next_end

    def _step(self, node: _Node, char: str) -> _Node:
        while char not in node.after and node.shorter is not None:
            node = node.shorter
        return node.after.get(char, self._root)

    def _add(self, value: Letters, kind: str) -> None:
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


def _is_here(read: Letters, start: int, end: int, breaks: frozenset[int]) -> bool:
    """Whole words are; parts of words where they are long, or as long as one and spaced alike."""
    if end - start >= _SURE or (read.edges[start] and read.edges[end]):
        return True
    if end - start <= _PART_OF_WORD:
        return False
    return read.breaks[end - 1] - read.breaks[start] in breaks
