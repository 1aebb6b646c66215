"""Text of tokens as they come, one by one."""

from __future__ import annotations

from copy import copy
from typing import Any

from tokenizers.decoders import DecodeStream


class TextStream:
    """What each further token adds to a text.

    Tokenizers that fall back to bytes read neighbouring byte tokens together, so a byte that is no
    character can undo one that was given out before; their `DecodeStream` raises then. Here the
    text goes on with the token that showed it, without the bytes that were no character. A function
    of the tokens alone, so speculation changes nothing of it.

    Args:
        tokenizer: the target's, of transformers, of the kind that it calls fast.
        skip_special_tokens: whether those give no text.
    """

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool) -> None:
        self._backend, self._skip = tokenizer.backend_tokenizer, skip_special_tokens
        self._stream = self._new()

    def _new(self) -> DecodeStream:
        return DecodeStream(skip_special_tokens=self._skip)

    def fork(self) -> TextStream:
        """Another stream that goes on from here on its own."""
        twin = copy(self)
        twin._stream = copy(self._stream)
        return twin

    def step(self, token_id: int) -> str:
        """The text that a token completes; empty while a character is not whole."""
        try:
            return self._stream.step(self._backend, token_id) or ""
        except Exception as error:  # tokenizers raises nothing narrower
            if "Invalid prefix" not in str(error):
                raise
            self._stream = self._new()
            return self._stream.step(self._backend, token_id) or ""
