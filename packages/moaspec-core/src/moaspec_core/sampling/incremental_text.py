"""Text of tokens, decoded one by one, and bytes of single tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import copy
from typing import Any

from tokenizers.decoders import DecodeStream

CONTEXT_TOKENS = 16
"""Tokens of the prompt that are decoded with a continuation; doubled until they contain text."""

UNKNOWN = "\N{REPLACEMENT CHARACTER}"  # decoders write it for bytes that are not valid UTF-8


class TextStream:
    """Decodes a text token by token.

    SentencePiece decoders drop the first space of a text. A continuation needs this space, so the
    stream decodes its tokens together with the last tokens of the prompt.

    Tokenizers with byte tokens decode neighbouring bytes together, so an invalid byte can change a
    character that was returned before, and `DecodeStream` raises an error. Then the text continues
    with the next token, without the invalid bytes.

    Args:
        tokenizer: the target's, a fast tokenizer of transformers.
        skip_special_tokens: whether special tokens are left out of the text.
        after: the prompt, if the text is a continuation.
    """

    def __init__(
        self, tokenizer: Any, *, skip_special_tokens: bool, after: Sequence[int] = ()
    ) -> None:
        self._backend, self._skip = tokenizer.backend_tokenizer, skip_special_tokens
        self._context, pending = self._split(after)
        self._stream = DecodeStream(ids=self._context, skip_special_tokens=skip_special_tokens)
        for token in pending:
            self._stream.step(self._backend, token)

    def _split(self, after: Sequence[int]) -> tuple[list[int], list[int]]:
        """The prompt's last tokens up to a whole character, and those of an unfinished one."""
        size = CONTEXT_TOKENS
        while True:
            tail = list(after[-size:])
            end = len(tail)
            while end and self._decode(tail[:end]).endswith(UNKNOWN):
                end -= 1
            if self._decode(tail[:end]):
                return tail[:end], tail[end:]
            if size >= len(after):
                return [], []
            size *= 2

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._backend.decode(token_ids, skip_special_tokens=self._skip))

    def fork(self) -> TextStream:
        """Another stream that goes on from here on its own."""
        twin = copy(self)
        twin._stream = copy(self._stream)
        return twin

    def step(self, token_id: int) -> str:
        """The text that a token completes; empty while a character is not whole."""
        for context in (self._context, []):
            try:
                return self._stream.step(self._backend, token_id) or ""
            except Exception as error:  # tokenizers raises nothing narrower
                if "Invalid prefix" not in str(error):
                    raise
            # More tokens changed text that was already returned. The context may end in bytes, too.
            self._stream = DecodeStream(ids=context, skip_special_tokens=self._skip)
        return self._stream.step(self._backend, token_id) or ""


def continuation(tokenizer: Any, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> str:
    """The text of `token_ids` as a continuation of the prompt."""
    before, whole = (
        str(tokenizer.decode(ids, skip_special_tokens=True))
        for ids in (list(prompt_ids), [*prompt_ids, *token_ids])
    )
    if whole.startswith(before):
        return whole.removeprefix(before)
    return str(tokenizer.decode(list(token_ids), skip_special_tokens=True))


class TokenBytes:
    """Bytes of single tokens inside a text; joined, they are the text's UTF-8."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._decoder = None if backend is None else backend.decoder
        added = tokenizer.added_tokens_decoder.items()
        self._special = {token_id: str(one).encode() for token_id, one in added if one.special}
        self.special_ids = frozenset(self._special)

    def __call__(self, token_id: int) -> bytes:
        """The bytes of one token; empty for an id outside the tokenizer's vocabulary."""
        if token_id in self._special:
            return self._special[token_id]
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if token is None:
            return b""
        text = self._within_text(token)
        return text.encode() if UNKNOWN not in text else _raw_bytes(token)

    def name(self, token_id: int) -> str:
        """The token's text; for partial characters its bytes, for unknown ids the id."""
        own = self(token_id)
        try:
            return own.decode() if own else f"token_id:{token_id}"
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in own)

    def loses_space(self, token_id: int) -> bool:
        """Whether the token has a first space that decoders drop at the start of a text."""
        if not self(token_id).startswith(b" "):
            return False
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        alone = token if self._decoder is None else str(self._decoder.decode([token]))
        return len(alone) < len(self._within_text(token))

    def _within_text(self, token: str) -> str:
        """Decode after a letter, which keeps the token's first space."""
        if self._decoder is None:
            return f" {token}"
        return str(self._decoder.decode(["a", token])).removeprefix("a")


_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _raw_bytes(token: str) -> bytes:
    """Bytes of a token with partial characters: byte fallback (`<0xE2>`) or byte-level BPE."""
    fallback = _BYTE.fullmatch(token)
    if fallback is not None:
        return bytes([int(fallback[1], 16)])
    if all(letter in _BYTE_OF for letter in token):
        return bytes(_BYTE_OF[letter] for letter in token)
    return token.encode()


def _bytes_by_letter() -> dict[str, int]:
    """The alphabet of byte-level BPE: printable bytes as they are, others from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _bytes_by_letter()
