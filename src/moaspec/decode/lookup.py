"""Prompt lookup: what followed the last few tokens when the text had them before.

Legend: T tokens of the text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from moaspec.decode.textual import TextDrafter
from moaspec.decode.tree import DraftTree, Tree, merged
from moaspec.errors import InputError


class PromptLookup(TextDrafter):
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
                "PromptLookup needs 1 <= min_ngram <= max_ngram, got "
                f"min_ngram={min_ngram}, max_ngram={max_ngram}."
            )
        self._sizes = range(max_ngram, min_ngram - 1, -1)

    def draft(self, token_ids: Sequence[int], shape: Tree) -> DraftTree:
        """The continuations found, merged where they begin alike."""
        paths: list[tuple[int, ...]] = []
        for start in self._continuations(np.asarray(token_ids)):
            path = tuple(token_ids[start : start + shape.depth])
            if path not in paths:
                paths.append(path)
            if len(paths) == shape.breadth:
                break
        return merged(paths, shape.total_tokens)

    def _continuations(self, text_T: npt.NDArray[np.int64]) -> Iterator[int]:
        """Where the text went on after an earlier occurrence of its end."""
        for size in self._sizes:
            # The end itself is no occurrence, so every match has a token after it.
            earlier = len(text_T) - size
            if earlier < 1:
                continue
            equal = np.ones(earlier, dtype=np.bool_)
            for offset in range(size):
                equal &= text_T[offset : offset + earlier] == text_T[earlier + offset]
            yield from (equal.nonzero()[0][::-1] + size).tolist()
