"""Prompt lookup: draft the tokens that followed an earlier occurrence of the text's last n-gram.

`NgramIndex` looks them up in one growing text. `NgramProposer` drafts by it alone; the engine's
n-gram branches add its candidates to those of any proposer.
"""

from array import array
from collections.abc import Iterator, Sequence
from itertools import islice

from moaspec_core.drafting.draft_tree import DraftTree, Tree
from moaspec_core.drafting.protocols import RequestText, TextProposer
from moaspec_core.drafting.tree_shapes import merged
from moaspec_core.errors import InputError

NUM_COMPARED = 16  # occurrences of a text's end whose lengths are compared
TOKEN_BYTES = 260  # memory of a token in an index of three sizes


class NgramIndex:
    """The positions after each n-gram of a growing text.

    An n-gram is one number, of 32 bits for each token. Dictionaries of numbers take less memory
    than tuples and lists, and the garbage collector, which stops all threads, skips them.

    Args:
        sizes: lengths of the n-grams, the longest first.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = tuple(sizes)
        self._text: list[int] = []
        # Of each size: the last n-gram, the position after the latest occurrence of each n-gram,
        # and for each position the one before it that follows the same n-gram; -1: none.
        self._ends = [0] * len(self._sizes)
        self._latest: list[dict[int, int]] = [{} for _ in self._sizes]
        self._earlier = [array("i") for _ in self._sizes]

    def indexes(self, token_ids: Sequence[int]) -> bool:
        """Whether a text begins with the indexed one."""
        return list(token_ids[: len(self._text)]) == self._text

    def extend(self, token_ids: Sequence[int]) -> None:
        """Index the new tokens of a text that begins with the indexed one."""
        text, ends = self._text, self._ends
        parts = [*zip(self._sizes, self._latest, self._earlier, strict=True)]
        for token in token_ids[len(text) :]:
            place = len(text)
            for i, (size, latest, earlier) in enumerate(parts):
                earlier.append(latest.get(ends[i], -1) if place >= size else -1)
                if place >= size:
                    latest[ends[i]] = place
                ends[i] = (ends[i] << 32 | token) & ((1 << 32 * size) - 1)
            text.append(token)

    def paths(self, shape: Tree) -> list[tuple[int, ...]]:
        """At most `breadth` different continuations of the text, each up to `depth` long.

        Those after longer n-grams come first, and of each n-gram those after later occurrences.
        """
        paths: list[tuple[int, ...]] = []
        for place in self._matches():
            path = tuple(self._text[place : place + shape.depth])
            if path not in paths:
                paths.append(path)
            if len(paths) == shape.breadth:
                break
        return paths

    def longest(self, depth: int, most: int) -> tuple[int, tuple[int, ...]]:
        """The longest end of the text that occurs earlier, among the `NUM_COMPARED` latest matches.

        Returns:
            Its length, `most` at most, and the up to `depth` tokens that followed it there; 0 and
            no tokens if nothing matches.
        """
        text, best = self._text, (0, 0)
        if len(text) < self._sizes[-1] or self._ends[-1] not in self._latest[-1]:
            return 0, ()  # longer ones do not occur earlier either
        for place in islice(self._matches(), NUM_COMPARED):
            size = 0
            while size < min(most, place) and text[place - 1 - size] == text[-1 - size]:
                size += 1
            best = max(best, (size, place))
        size, place = best
        return size, tuple(text[place : place + depth]) if size else ()

    def _matches(self) -> Iterator[int]:
        """Positions after earlier occurrences of the text's last n-gram, of each size."""
        for size, end, latest, earlier in zip(
            self._sizes, self._ends, self._latest, self._earlier, strict=True
        ):
            place = latest.get(end, -1) if len(self._text) >= size else -1
            while place >= 0:
                yield place
                place = earlier[place]


class NgramProposer(TextProposer):
    """Drafts continuations copied from the request's own text: answers that repeat their prompt.

    Args:
        max_ngram: longest n-gram looked up, tried first.
        min_ngram: shortest one.

    Raises:
        InputError: a size below 1, or `min_ngram` above `max_ngram`.

    Source: prompt lookup decoding (Saxena, 2023); arXiv 2304.04487 has the same idea.
    """

    def __init__(self, *, max_ngram: int = 3, min_ngram: int = 1) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise InputError(
                "NgramProposer needs 1 <= min_ngram <= max_ngram, got "
                f"min_ngram={min_ngram}, max_ngram={max_ngram}."
            )
        self._sizes = range(max_ngram, min_ngram - 1, -1)
        self._indices: dict[int, NgramIndex] = {}

    def propose(self, requests: Sequence[RequestText], shape: Tree) -> list[DraftTree]:
        """Draft for every request; only the new tokens of each are indexed."""
        return [self._draft(self._index(one), one.token_ids, shape) for one in requests]

    def _index(self, request: RequestText) -> NgramIndex:
        index = self._indices.get(request.cache_row)
        if index is None or not index.indexes(request.token_ids):
            index = self._indices[request.cache_row] = NgramIndex(self._sizes)
        return index

    @staticmethod
    def _draft(index: NgramIndex, token_ids: Sequence[int], shape: Tree) -> DraftTree:
        index.extend(token_ids)
        return merged(index.paths(shape), shape.total_tokens)

    def draft(self, token_ids: Sequence[int], shape: Tree) -> DraftTree:
        """The continuations found, as one tree."""
        return self._draft(NgramIndex(self._sizes), token_ids, shape)

    def close(self, row: int) -> None:
        self._indices.pop(row, None)
