"""Stop strings, found in the text as it grows, token by token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from typing import Any

from moaspec_core.errors import InputError
from moaspec_core.sampling.incremental_text import TextStream


def stop_strings(stop: str | Iterable[str] | None) -> tuple[str, ...]:
    """One or several stop strings as a tuple; None is none.

    Raises:
        InputError: an empty string, or a value that is no string.
    """
    if stop is None:
        return ()
    if not isinstance(stop, Iterable):
        raise InputError(f"stop must be one or more non-empty strings, got {stop!r}.")
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    for string in strings:
        if not isinstance(string, str) or not string:
            raise InputError(f"stop must be one or more non-empty strings, got {string!r}.")
        if not string.isascii() and any("\ud800" <= char <= "\udfff" for char in string):
            raise InputError(f"The stop string {string!r} holds half of a surrogate pair.")
    return strings


class StopStrings:
    """Watches one row's generated text.

    Push every token of the text, one by one: a stop string then ends the text exactly where it ends
    in plain decoding, also inside a round. Special tokens count as text.

    Args:
        after: the prompt, which is not searched.

    Raises:
        InputError: no tokenizer, or a tokenizer that cannot decode incrementally.
    """

    def __init__(self, strings: tuple[str, ...], tokenizer: Any, after: Sequence[int] = ()) -> None:
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            raise InputError(
                "Stop strings need the target's tokenizer, of the kind that transformers calls "
                "fast; this target has none. Use stop_token_ids instead."
            )
        self._strings = strings
        self._stream = TextStream(tokenizer, skip_special_tokens=False, after=after)
        self._tail = ""
        self._keep = max(map(len, strings)) - 1

    def completing(self, tokens: Sequence[int], parents: Sequence[int]) -> set[int]:
        """Nodes of a draft tree below the text so far that would complete a stop string.

        Args:
            tokens: of the nodes, parents first.
            parents: index of each node's parent; -1 is the end of the text.
        """
        nodes: set[int] = set()
        watchers = {-1: self}
        for node, (parent, token) in enumerate(zip(parents, tokens, strict=True)):
            if parent in watchers:
                watcher = watchers[parent]._fork()
                if watcher.push(token):
                    nodes.add(node)
                else:
                    watchers[node] = watcher
        return nodes

    def _fork(self) -> StopStrings:
        twin = copy(self)
        twin._stream = self._stream.fork()
        return twin

    def push(self, token_id: int) -> str | None:
        """Add the next token; the stop string that it completes, the earliest in the text."""
        piece = self._stream.step(token_id)
        if not piece:
            return None
        text = self._tail + piece
        ends = [
            (text.find(string) + len(string), string) for string in self._strings if string in text
        ]
        self._tail = text[-self._keep :] if self._keep else ""
        return min(ends)[1] if ends else None
