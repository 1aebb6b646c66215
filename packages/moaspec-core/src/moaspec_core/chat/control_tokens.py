"""Encodes control tokens in the text of users and tools as text.

A chat template writes a conversation as one text. The tokenizer cannot tell a user's control tokens
in it from the template's, so a user's are guarded before rendering: a noncharacter is put between
their characters. Text between two control tokens of the template that has guarded ones is encoded
without control tokens. A conversation without guarded tokens has the same ids as in transformers.
"""

import copy
import re
from collections.abc import Iterator
from functools import cached_property
from typing import Any

GUARD = "\ufdd0"
"""Stands between the characters of a guarded token; Unicode gives it to no character."""


class ControlTokens:
    """The special tokens of transformers' tokenizer; nothing is guarded without `tokenizers`."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        found = getattr(tokenizer, "added_tokens_decoder", {}).values()
        exact = getattr(tokenizer, "backend_tokenizer", None) is not None
        self._tokens = {
            one.content: one for one in found if exact and one.special and len(one.content) > 1
        }

    def guard(self, text: str) -> str:
        """A text whose control tokens the tokenizer does not find."""
        if not self._tokens:
            return text
        return self._own.sub(lambda found: GUARD.join(found[0]), text)

    def guarded(self, text: str) -> bool:
        """Whether a text holds guarded control tokens."""
        return GUARD in text and bool(self._tokens) and self._theirs.search(text) is not None

    def ids(self, text: str) -> list[int]:
        """Tokens of a rendered text; it has all control tokens that it needs."""
        if not self.guarded(text):
            return self._encode(text)
        ids, waiting = list[int](), ""
        for part, is_plain in self._parts(text):
            if is_plain:
                ids += self._encode(waiting) if waiting else []
                ids += self._plain.encode(part, add_special_tokens=False).ids
                waiting = ""
            else:
                waiting += part
        return ids + (self._encode(waiting) if waiting else [])

    def starts(self, text: str) -> list[int]:
        """Places in a rendered text, but for its start, where it can be cut and encoded in parts.

        Control tokens begin there that take nothing of what is before them.
        """
        if not self._cutting:
            return []
        return [found.start() for found in self._own.finditer(text) if self._cuts(found)]

    def cuts(self, text: str, place: int) -> bool:
        """Whether a rendered text can be cut at this place; see `starts`."""
        found = self._own.match(text, place) if self._cutting else None
        return found is not None and self._cuts(found)

    def _cuts(self, found: re.Match[str]) -> bool:
        return found.start() > 0 and found[0] in self._cutting

    @cached_property
    def _cutting(self) -> set[str]:
        return {
            content
            for content, token in self._tokens.items()
            if not (token.lstrip or token.single_word or token.normalized)
        }

    def _parts(self, text: str) -> Iterator[tuple[str, bool]]:
        """Parts of a text, and whether each is encoded without control tokens.

        White space that belongs to a control token beside it stays with that.
        """
        pieces = self._own.split(text)
        for i, piece in enumerate(pieces):
            if i % 2 or not self.guarded(piece):
                yield piece, False
                continue
            start, stop = 0, len(piece)
            if i and self._tokens[pieces[i - 1]].rstrip:
                start = len(piece) - len(piece.lstrip())
            if i + 1 < len(pieces) and self._tokens[pieces[i + 1]].lstrip:
                stop = len(piece.rstrip())
            yield piece[:start], False
            plain = self._theirs.sub(lambda found: found[0].replace(GUARD, ""), piece[start:stop])
            yield plain, True
            yield piece[stop:], False

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    @cached_property
    def _own(self) -> re.Pattern[str]:
        """Control tokens, the longest that fits first; as a group, so that `split` keeps them."""
        tokens = sorted(self._tokens, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, tokens))})")

    @cached_property
    def _theirs(self) -> re.Pattern[str]:
        """Matches guarded control tokens."""
        tokens = sorted(self._tokens, key=len, reverse=True)
        return re.compile("|".join(GUARD.join(map(re.escape, token)) for token in tokens))

    @cached_property
    def _plain(self) -> Any:
        """A copy of the tokenizer that knows no control tokens; threads share the original."""
        found = copy.deepcopy(self._tokenizer.backend_tokenizer)
        found.encode_special_tokens = True
        return found
