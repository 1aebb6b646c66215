"""One text on its way to the client, and what is counted of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from moaspec.data.templates.call_reader import Call, CallReader
from moaspec.serve.openai.counts import TokenCounts
from moaspec.serve.openai.extension import Reporter
from moaspec.serve.openai.hiding import Hiding, Restorer
from moaspec.serve.openai.schema import (
    CompletionDetails,
    Extension,
    FinishReason,
    PromptDetails,
    Speculation,
    Usage,
)
from moaspec.serve.server_context import ServerContext
from moaspec.serve.sources.source import Job, SourceFacts, Update
from moaspec.serve.sources.text_writer import Piece, TextWriter

LEAST_LOGPROB = -9999.0
"""What stands for minus infinity, which JSON does not have; the same as OpenAI's."""


@dataclass(frozen=True, kw_only=True)
class Delta:
    """What one update adds to a choice.

    Attributes:
        pieces: tokens, with their text.
        text: what is said, without calls.
        calls: number and call of those that are complete.
        finish_reason: at the end; never "function_call", which is the older word for "tool_calls".
        moaspec: the extension's object.
    """

    pieces: list[Piece]
    text: str
    calls: list[tuple[int, Call]]
    finish_reason: FinishReason | None
    moaspec: dict[str, Any] | None

    def matters(self, *, logprobs: bool) -> bool:
        """Whether there is anything that a client would want to hear, beside the end."""
        said = self.text or self.calls or self.moaspec
        return bool(said or (logprobs and self.pieces))


class Choice:
    """One text on its way to the client.

    Args:
        index: of the choice.
        desk: of the server.
        job: what is decoded.
        tally: of the job.
        asked: of the extension.
        reader: finds calls; None where there are no tools.
        begins_turn: whether the text is a turn of its own, not the continuation of a text.
        hiding: what is private in the request; None where nothing is.
        as_json: whether the text is JSON.
    """

    def __init__(
        self,
        index: int,
        desk: ServerContext,
        job: Job,
        tally: TokenCounts,
        *,
        asked: Extension,
        reader: CallReader | None = None,
        begins_turn: bool = False,
        hiding: Hiding | None = None,
        as_json: bool = False,
    ) -> None:
        facts = desk.facts
        specials = reader is not None and bool(desk.template.special_marks)
        special_ids = frozenset() if specials else facts.token_bytes.special_ids
        self.index, self._source, self._tally, self._reader = index, desk.source, tally, reader
        self._writer = TextWriter(
            facts.tokenizer,
            job.stop,
            after=job.prompt_ids,
            specials=specials,
            hidden=facts.stop_token_ids | special_ids,
        )
        self._token_bytes, self._begins_turn = facts.token_bytes, begins_turn
        made = [hiding.restorer(as_json=as_json) if hiding else None for _ in range(2)]
        self._restorer, self._talk = made
        self._reporter = Reporter(index, asked, facts)
        self.pieces: list[Piece] = []
        self.text = ""
        self.calls: list[Call] = []
        self.finish_reason: FinishReason | None = None

    def take(self, update: Update) -> Delta:
        """Take in an update; what it adds."""
        ended = update.stop_reason is not None
        written = self._begun(self._writer.take(update))
        pieces = _restored(self._restorer, written, last=ended)
        text, calls = _text_of(pieces), list[Call]()
        if self._reader is not None:
            # Calls are read before private text is back, which may hold quotation marks.
            text, calls = self._reader.feed(_text_of(written), last=ended)
            text = _text_of(_restored(self._talk, [Piece(text, 0, "target")], last=ended))
            calls = calls if self._restorer is None else list(map(self._restorer.call, calls))
        numbered = list(enumerate(calls, start=len(self.calls)))
        self.pieces += pieces
        self.text += text
        self.calls += calls
        if ended:
            self.finish_reason = self._finish_reason(str(update.stop_reason))
        link = self._source.link
        return Delta(
            pieces=pieces,
            text=text,
            calls=numbered,
            finish_reason=self.finish_reason,
            moaspec=self._reporter.chunk(update, pieces, self._tally, link),
        )

    def whole(self) -> dict[str, Any]:
        """The extension of the finished text."""
        return self._reporter.whole(self.pieces, self._tally)

    def _begun(self, pieces: list[Piece]) -> list[Piece]:
        """Take off the space that SentencePiece's words have at the start of a turn."""
        place = next((i for i, piece in enumerate(pieces) if not piece.hidden), None)
        if self._begins_turn and place is not None:
            self._begins_turn, piece = False, pieces[place]
            loses = piece.text[:1] == " " and self._token_bytes.loses_space(piece.token_id)
            pieces[place] = replace(piece, text=piece.text[loses:], begins_turn=True)
        return pieces

    def _finish_reason(self, stop_reason: str) -> FinishReason:
        if stop_reason in ("max_new_tokens", "context"):
            return "length"
        return "tool_calls" if self.calls else "stop"


def _text_of(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def _restored(restorer: Restorer | None, pieces: list[Piece], *, last: bool) -> list[Piece]:
    return pieces if restorer is None else restorer.take(pieces, last=last)


def usage(jobs: Sequence[Job], tallies: Sequence[TokenCounts], n: int) -> Usage:
    """Of a whole request; a prompt counts once, however many choices it has."""
    prompt = sum(len(job.prompt_ids) for job in jobs[::n])
    written = sum(one.tokens for one in tallies)
    accepted, drafted = sum(one.accepted for one in tallies), sum(one.drafted for one in tallies)
    rounds, emitted = sum(one.rounds for one in tallies), sum(one.emitted for one in tallies)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=written,
        total_tokens=prompt + written,
        prompt_tokens_details=PromptDetails(cached_tokens=sum(one.reused for one in tallies[::n])),
        completion_tokens_details=CompletionDetails(
            accepted_prediction_tokens=accepted,
            rejected_prediction_tokens=max(drafted - accepted, 0),
        ),
        speculation=Speculation(
            rounds=rounds,
            tau=emitted / rounds if rounds else None,
            drafted=drafted,
            accepted=accepted,
            copied=sum(one.copied for one in tallies),
        ),
    )


def extension_of(asked: Extension | None, choices: Sequence[Choice]) -> dict[str, Any] | None:
    """The extension of an answer that is no stream."""
    return None if asked is None else {"choices": [choice.whole() for choice in choices]}


def token_logprob(
    facts: SourceFacts, token_id: int, logprob: float, *, begins_turn: bool = False
) -> dict[str, Any]:
    """One token's log-probability as chats report it.

    Args:
        facts: of the target.
        token_id: the token.
        logprob: of it.
        begins_turn: whether it stands where a turn begins; its bytes are then without the space
            that the turn's text lacks.
    """
    own = facts.token_bytes(token_id)
    return {
        "token": facts.token_bytes.name(token_id),
        "logprob": max(logprob, LEAST_LOGPROB),
        "bytes": list(own[begins_turn and facts.token_bytes.loses_space(token_id) :]),
    }
