"""One choice of an answer: turns updates into text, calls and the extension."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from moaspec_core.chat.call_reader import Call
from moaspec_serve.openai.chat_input import ChatInput
from moaspec_serve.openai.extension import ExtensionWriter
from moaspec_serve.openai.redaction import RequestRedactor
from moaspec_serve.openai.schema import GenerationRequest
from moaspec_serve.openai.token_counts import TokenCounts
from moaspec_serve.server_context import ServerContext
from moaspec_serve.sources.source import Job, SourceInfo, Update
from moaspec_serve.sources.text_writer import Piece, TextWriter

MIN_LOGPROB = -9999.0  # stands for minus infinity, which JSON lacks; as in OpenAI's answers


@dataclass(frozen=True, kw_only=True)
class Delta:
    """The part that one update adds to a choice."""

    index: int
    start: int  # number of characters before the part
    pieces: list[Piece]  # tokens with their text
    text: str  # text without calls
    token_ids: tuple[int, ...]  # of the update; pieces may wait for further ones
    calls: list[tuple[int, Call]]  # index and content of each completed call
    # Set at the end; "tool_calls" also for OpenAI's older `function_call`.
    finish_reason: str | None
    moaspec: dict[str, Any] | None  # the extension's object

    def matters(self, *, logprobs: bool, ids: bool) -> bool:
        """Whether the delta has content for the client, apart from the finish reason."""
        wanted = (logprobs and self.pieces) or (ids and self.token_ids)
        return bool(self.text or self.calls or self.moaspec or wanted)


class Choice:
    """One choice of an answer in decoding. `finish_reason` is set at its end."""

    def __init__(
        self,
        index: int,
        context: ServerContext,
        body: GenerationRequest,
        *,
        job: Job,
        redactor: RequestRedactor,
        chat: ChatInput,
    ) -> None:
        info, reader = context.info, chat.reader(context)
        specials = reader is not None and bool(context.template.special_marks)
        special_ids = frozenset() if specials else info.token_bytes.special_ids
        self.index, self._source, self.counts = index, context.source, TokenCounts()
        self._reader = reader
        self._writer = TextWriter(
            info.tokenizer,
            job.stop,
            after=job.prompt_ids,
            specials=specials,
            hidden=info.target.stop_token_ids | special_ids,
        )
        self._token_bytes, self._begins_turn = info.token_bytes, body.begins_turn
        as_json = chat.schema is not None
        self._piece_restorer = redactor.restorer(as_json=as_json)
        self._text_restorer = redactor.restorer(as_json=as_json)
        self._extension = ExtensionWriter(index, body.extension, info)
        self.pieces: list[Piece] = []
        self.token_ids: list[int] = []
        self.text = ""
        self.calls: list[Call] = []
        self.finish_reason: str | None = None

    def take(self, update: Update) -> Delta:
        self.counts.add(update)
        self.token_ids += update.token_ids
        ended = update.stop_reason is not None
        written = self._without_leading_space(self._writer.take(update))
        pieces = self._piece_restorer.take(written, last=ended)
        text, calls = _text_of(pieces), list[Call]()
        if self._reader is not None:
            # Calls are parsed before private text is restored, which may contain quotation marks.
            cut = update.stop_reason not in (None, "stop_token")
            text, calls = self._reader.feed(_text_of(written), last=ended, cut=cut)
            text = self._text_restorer.restore_text(text, last=ended)
            calls = [self._text_restorer.restore_call(call) for call in calls]
        numbered, start = list(enumerate(calls, start=len(self.calls))), len(self.text)
        self.pieces += pieces
        self.text += text
        self.calls += calls
        if ended:
            self.finish_reason = self._finish_reason(str(update.stop_reason))
        link = self._source.link
        return Delta(
            index=self.index,
            start=start,
            pieces=pieces,
            text=text,
            token_ids=update.token_ids,
            calls=numbered,
            finish_reason=self.finish_reason,
            moaspec=self._extension.chunk(update, pieces, self.counts, link),
        )

    def extension(self) -> dict[str, Any]:
        return self._extension.whole(self.pieces, self.counts)

    def _without_leading_space(self, pieces: list[Piece]) -> list[Piece]:
        """Remove the space that SentencePiece puts before the first word of a turn."""
        place = next((i for i, piece in enumerate(pieces) if not piece.hidden), None)
        if self._begins_turn and place is not None:
            self._begins_turn, piece = False, pieces[place]
            loses = piece.text[:1] == " " and self._token_bytes.loses_space(piece.token_id)
            pieces[place] = replace(piece, text=piece.text[loses:], begins_turn=True)
        return pieces

    def _finish_reason(self, stop_reason: str) -> str:
        if stop_reason in ("max_new_tokens", "context"):
            return "length"
        return "tool_calls" if self.calls else "stop"


def _text_of(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def token_logprob(
    info: SourceInfo, token_id: int, logprob: float, *, begins_turn: bool = False
) -> dict[str, Any]:
    """A token's log-probability in the format of chats.

    The bytes of a token that begins a turn lack the leading space that the text lacks too.
    """
    own = info.token_bytes(token_id)
    return {
        "token": info.token_bytes.name(token_id),
        "logprob": max(logprob, MIN_LOGPROB),
        "bytes": list(own[begins_turn and info.token_bytes.loses_space(token_id) :]),
    }
