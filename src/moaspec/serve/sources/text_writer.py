"""From tokens to text that may be shown: pieces, held back where a stop string may have begun."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moaspec.data.templates.call_reader import begun
from moaspec.sampling.incremental_text import TextStream
from moaspec.sampling.params import Alternatives
from moaspec.serve.sources.source import TokenSource, Update


@dataclass(frozen=True)
class Piece:
    """One token and the text that it adds.

    Attributes:
        text: see `docs/serve.md`; pieces joined are the text.
        token_id: which token.
        source: who proposed it.
        hidden: whether the token is no part of the text: it ended it, or is a special one.
        begins_turn: whether it is the first token of a turn's text.
        logprob, top_logprobs: where asked for.
    """

    text: str
    token_id: int
    source: TokenSource
    hidden: bool = False
    logprob: float | None = None
    top_logprobs: Alternatives = ()
    begins_turn: bool = False


class TextWriter:
    """Turns the updates of one text into pieces.

    A stop string is no part of the text. So what may be its beginning is held back until it is
    known not to be.

    Args:
        tokenizer: the target's.
        stop: stop strings.
        after: the prompt, which the text continues.
        specials: whether special tokens are part of the text; those that end it never are.
        hidden: tokens that are no part of it.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: Sequence[str] = (),
        *,
        after: Sequence[int] = (),
        specials: bool = False,
        hidden: Collection[int] = (),
    ) -> None:
        self._stop, self._hidden = tuple(stop), hidden
        self._stream = TextStream(tokenizer, skip_special_tokens=not specials, after=after)
        self._held: list[Piece] = []
        self._tokenizer, self._silent = tokenizer, list[int]()  # tokens without text as yet

    def take(self, update: Update) -> list[Piece]:
        """Pieces that are certain now."""
        self._held += self._pieces(update)
        if update.stop_reason is not None and self._silent and self._held:
            self._flush()
        if update.stop_reason == "stop_string":
            self._cut()
        elif update.stop_reason is None:
            return self._release(len(self._text) - begun(self._text, self._stop))
        return self._release(len(self._text))

    @property
    def _text(self) -> str:
        return "".join(piece.text for piece in self._held)

    def _pieces(self, update: Update) -> list[Piece]:
        pieces = []
        for i, (token, source) in enumerate(zip(update.token_ids, update.sources, strict=True)):
            hidden = token in self._hidden
            text = "" if hidden else self._step(token)
            logprob = update.logprobs[i] if update.logprobs else None
            top = update.top_logprobs[i] if update.top_logprobs else ()
            pieces.append(Piece(text, token, source, hidden, logprob, top))
        return pieces

    def _step(self, token: int) -> str:
        text = self._stream.step(token)
        self._silent = [] if text else [*self._silent, token]
        return text

    def _flush(self) -> None:
        """A text that ends within a character says so, as tokenizers do."""
        text = decoded(self._tokenizer, self._silent)
        self._held[-1] = replace(self._held[-1], text=self._held[-1].text + text)

    def _cut(self) -> None:
        """Take the stop string, and what follows it, out of the text."""
        text = self._text
        ends = [place for place in map(text.find, self._stop) if place >= 0]
        left = min(ends, default=len(text))
        for i, piece in enumerate(self._held):
            hidden = piece.hidden or not left
            self._held[i] = replace(piece, text=piece.text[:left], hidden=hidden)
            left -= len(self._held[i].text)

    def _release(self, length: int) -> list[Piece]:
        """Let pieces go that lie within the first `length` characters."""
        count = 0
        for piece in self._held:
            length -= len(piece.text)
            if length < 0:
                break
            count += 1
        done, self._held = self._held[:count], self._held[count:]
        return done


def decoded(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """Text of tokens by themselves; a part of a character shows as a replacement character."""
    return str(tokenizer.decode(list(token_ids), skip_special_tokens=True))
