"""Conversion of tokens to text pieces, held back while a stop string may have begun."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moaspec_core.chat.call_reader import begun
from moaspec_core.sampling.incremental_text import TextStream
from moaspec_core.sampling.params import Alternatives
from moaspec_serve.sources.source import TokenSource, Update


@dataclass(frozen=True)
class Piece:
    """A token and the text that it adds."""

    text: str  # see `docs/serve.md`. All pieces joined are the text.
    token_id: int
    source: TokenSource  # proposer of the token
    hidden: bool = False  # whether the token is not part of the text: a special or final token
    # logprob, top_logprobs: log-probabilities, if requested.
    logprob: float | None = None
    top_logprobs: Alternatives = ()
    begins_turn: bool = False  # whether it is the first token of a turn's text


class TextWriter:
    """Turns the updates of one text into pieces.

    A stop string is not part of the text, so a possible beginning of one is held back.

    Args:
        after: token ids of the prompt, which the text continues.
        specials: whether special tokens are part of the text; the final one never is.
        hidden: tokens that are not part of the text.
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
        self._pending: list[Piece] = []
        self._tokenizer, self._silent = tokenizer, list[int]()  # latest tokens without text

    def take(self, update: Update) -> list[Piece]:
        self._pending += self._pieces(update)
        if update.stop_reason is not None and self._silent and self._pending:
            self._flush()
        if update.stop_reason == "stop_string":
            self._cut()
        elif update.stop_reason is None:
            return self._release(len(self._text) - begun(self._text, self._stop))
        return self._release(len(self._text))

    @property
    def _text(self) -> str:
        return "".join(piece.text for piece in self._pending)

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
        """Add a replacement character for an incomplete last character, as tokenizers do."""
        text = str(self._tokenizer.decode(self._silent, skip_special_tokens=True))
        self._pending[-1] = replace(self._pending[-1], text=self._pending[-1].text + text)

    def _cut(self) -> None:
        text = self._text
        starts = [start for start in map(text.find, self._stop) if start >= 0]
        remaining = min(starts, default=len(text))
        for i, piece in enumerate(self._pending):
            hidden = piece.hidden or not remaining
            self._pending[i] = replace(piece, text=piece.text[:remaining], hidden=hidden)
            remaining -= len(self._pending[i].text)

    def _release(self, length: int) -> list[Piece]:
        """Release the pieces inside the first `length` characters."""
        count = 0
        for piece in self._pending:
            length -= len(piece.text)
            if length < 0:
                break
            count += 1
        released, self._pending = self._pending[:count], self._pending[count:]
        return released
