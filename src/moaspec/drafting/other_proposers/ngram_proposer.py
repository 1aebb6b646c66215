"""Prompt lookup: what followed the last few tokens when the text had them before.

`NgramIndex` finds it, for one text as it grows. `NgramProposer` is a drafter that does nothing
else; the engine's n-gram branches put the same candidates beside those of any drafter.
"""

from collections.abc import Iterator, Sequence
from itertools import islice

from moaspec.drafting.draft_tree import DraftTree, Tree
from moaspec.drafting.protocols import RequestText, TextProposer
from moaspec.drafting.tree_shapes import merged
from moaspec.errors import InputError

NUM_COMPARED = 16  # occurrences of a text's end whose lengths are compared


class NgramIndex:
    """Where stretches of these sizes, looked up in this order, occur in a text that grows."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = tuple(sizes)
        self._text: list[int] = []
        self._followers: dict[tuple[int, ...], list[int]] = {}

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take in what is new of a text; another text than before is read from its start."""
        read = len(self._text)
        if list(token_ids[:read]) != self._text:
            self._text, self._followers, read = [], {}, 0
        self._text += token_ids[read:]
        for place in range(read, len(self._text)):
            for size in self._sizes:
                if size <= place:
                    stretch = tuple(self._text[place - size : place])
                    self._followers.setdefault(stretch, []).append(place)

    def paths(self, shape: Tree) -> list[tuple[int, ...]]:
        """At most `breadth` different continuations of the text's end, each up to `depth` long.

        The longest stretch that occurs earlier comes first, and of each the latest occurrence.
        """
        paths: list[tuple[int, ...]] = []
        for place in self._places():
            path = tuple(self._text[place : place + shape.depth])
            if path not in paths:
                paths.append(path)
            if len(paths) == shape.breadth:
                break
        return paths

    def longest(self, depth: int, most: int) -> tuple[int, tuple[int, ...]]:
        """The longest end of the text that occurs earlier, among the `NUM_COMPARED` latest places.

        Returns:
            Its length, `most` at most, and the up to `depth` tokens that followed it there. 0 and
            none where no stretch occurs earlier.
        """
        text, best = self._text, (0, 0)
        for place in islice(self._places(), NUM_COMPARED):
            size = 0
            while size < min(most, place) and text[place - 1 - size] == text[-1 - size]:
                size += 1
            best = max(best, (size, place))
        size, place = best
        return size, tuple(text[place : place + depth]) if size else ()

    def _places(self) -> Iterator[int]:
        """Where the text went on after an earlier occurrence of its end."""
        for size in self._sizes:
            if size <= len(self._text):
                yield from reversed(self._followers.get(tuple(self._text[-size:]), ()))


class NgramProposer(TextProposer):
    """Copies from the row's own text, so it pays where answers repeat their prompt.

    The longest suffix that occurs earlier is looked up first, its latest occurrence first. A shape
    of breadth 1 gets one chain; a broader one as many different continuations.

    Args:
        max_ngram: longest suffix looked for.
        min_ngram: shortest one.

    Raises:
        InputError: sizes below 1, or the wrong way round.

    Source: prompt lookup decoding (Saxena, 2023); arXiv 2304.04487 has the same idea.
    """

    def __init__(self, *, max_ngram: int = 3, min_ngram: int = 1) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise InputError(
                "NgramProposer needs 1 <= min_ngram <= max_ngram, got "
                f"min_ngram={min_ngram}, max_ngram={max_ngram}."
            )
        self._sizes = range(max_ngram, min_ngram - 1, -1)
        self._rows: dict[int, NgramIndex] = {}

    def propose(self, rows: Sequence[RequestText], shape: Tree) -> list[DraftTree]:
        """Draft for every row, reading only what is new of each."""
        return [
            self._draft(self._rows.setdefault(row.cache_row, NgramIndex(self._sizes)), row, shape)
            for row in rows
        ]

    @staticmethod
    def _draft(index: NgramIndex, row: RequestText, shape: Tree) -> DraftTree:
        index.extend(row.token_ids)
        return merged(index.paths(shape), shape.total_tokens)

    def draft(self, token_ids: Sequence[int], shape: Tree) -> DraftTree:
        """The continuations found, merged where they begin alike."""
        return self._draft(NgramIndex(self._sizes), RequestText(0, token_ids), shape)

    def close(self, row: int) -> None:
        self._rows.pop(row, None)
