"""The completions endpoint, /v1/completions."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request, Response

from moaspec_core.chat.chat_template import require_characters
from moaspec_core.sampling.incremental_text import UNKNOWN
from moaspec_core.sampling.params import Alternatives, TextLogprobs
from moaspec_serve import http_errors
from moaspec_serve.http_errors import RequestError
from moaspec_serve.openai.answer import STREAMED, ChoicesAnswer
from moaspec_serve.openai.chat_input import ChatInput
from moaspec_serve.openai.choice import MIN_LOGPROB, Choice, Delta
from moaspec_serve.openai.event_stream import unless_disconnected
from moaspec_serve.openai.redaction import RequestRedactor
from moaspec_serve.openai.schema import CompletionRequest
from moaspec_serve.server_context import ServerContext
from moaspec_serve.sources.source import SourceInfo, Update
from moaspec_serve.sources.text_writer import Piece, TextWriter

DEFAULT_TOKENS = 16  # OpenAI's default of `max_tokens`


def router(context: ServerContext) -> APIRouter:
    """Create the router of the endpoint."""
    routes = APIRouter(prefix="/v1", responses=http_errors.responses())

    @routes.post("/completions", responses=STREAMED)
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        """Continue one or several texts."""
        context.check(body)
        _check(body)
        redactor = context.redactor()
        prompts, stop = await context.preparation.run(
            request, lambda: _prompts(context, body, redactor)
        )
        jobs = context.jobs(
            request,
            body,
            prompts,
            max_tokens=context.max_tokens(body, body.max_tokens, DEFAULT_TOKENS),
            logprobs=body.logprobs,
            stop=stop,
        )
        scored = list[TextLogprobs]()
        if body.echo and body.logprobs is not None:
            own = context.source.score(jobs[:: body.num_choices])
            scored = await unless_disconnected(request.receive, own)
        answer = _CompletionAnswer(context, body, jobs, redactor, ChatInput(messages=()))
        answer.scored = scored
        return await answer.respond(request)

    return routes


def _check(body: CompletionRequest) -> None:
    if body.suffix:
        raise RequestError("suffix is not supported: the model only continues.", param="suffix")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise RequestError("best_of must equal n: nothing is sorted out.", param="best_of")


def _prompts(
    context: ServerContext, body: CompletionRequest, redactor: RequestRedactor
) -> tuple[list[list[int]], tuple[str, ...]]:
    """Token ids of all prompts, which are texts or token ids, and the stop strings."""
    prompts: Any = body.prompt
    if isinstance(prompts, str) or isinstance(prompts[0], int):
        prompts = [prompts]
    tokenizer, stop = context.info.tokenizer, body.stop_strings
    if isinstance(prompts[0], str):
        for text in prompts:
            require_characters(text)
        redacted = redactor.hide_texts([*prompts, *stop])
        prompts, stop = redacted[: len(prompts)], tuple(redacted[len(prompts) :])
    else:
        for skip_special in (False, True) if redactor.active else ():
            texts = [tokenizer.decode(ids, skip_special_tokens=skip_special) for ids in prompts]
            redactor.check_unchanged([*texts, *stop])
    redactor.check_answer(
        logprobs=body.logprobs is not None, ids=bool(body.return_token_ids), stop=stop
    )

    def tokenize(text: str) -> list[int]:
        return list(tokenizer(text)["input_ids"])

    ids = [
        context.tokens(prompt, tokenize) if isinstance(prompt, str) else prompt
        for prompt in prompts
    ]
    return ids, stop


class _CompletionAnswer(ChoicesAnswer[CompletionRequest]):
    endpoint, id_prefix = "completions", "cmpl"
    whole_object = chunk_object = "text_completion"
    scored: Sequence[TextLogprobs] = ()  # of each prompt, for `echo` with `logprobs`

    def _first_events(self) -> Iterator[dict[str, Any]]:
        for choice in self._choices:
            ids = self._prompt_ids(choice.index)
            if self._body.echo or ids:
                text = self._prompt(choice.index) if self._body.echo else ""
                part = self._part(choice.index, text, self._prompt_pieces(choice.index), 0, None)
                yield self._chunk({**part, **ids, **self._ids(())})

    def _delta_events(self, delta: Delta) -> Iterator[dict[str, Any]]:
        matters = delta.matters(
            logprobs=self._body.logprobs is not None, ids=bool(self._body.return_token_ids)
        )
        if matters or delta.finish_reason is not None:
            start = delta.start + (len(self._prompt(delta.index)) if self.scored else 0)
            part = self._part(delta.index, delta.text, delta.pieces, start, delta.finish_reason)
            yield self._chunk({**part, **self._ids(delta.token_ids)}, delta=delta)

    def _choice(self, choice: Choice) -> dict[str, Any]:
        text = (self._prompt(choice.index) if self._body.echo else "") + choice.text
        pieces = [*self._prompt_pieces(choice.index), *choice.pieces]
        part = self._part(choice.index, text, pieces, 0, choice.finish_reason)
        return {**part, **self._ids(choice.token_ids), **self._prompt_ids(choice.index)}

    def _part(
        self, index: int, text: str, pieces: Sequence[Piece], start: int, finish: str | None
    ) -> dict[str, Any]:
        logprobs = None
        if self._body.logprobs is not None:
            # Who scores a text takes every token's number, that of its end included.
            shown = [replace(piece, hidden=False) for piece in pieces] if self.scored else pieces
            logprobs = logprobs_of(self._context.info, shown, start)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def _prompt_pieces(self, index: int) -> list[Piece]:
        """The prompt's tokens with their log-probabilities; none if they are not asked for."""
        if not self.scored:
            return []
        scored = self.scored[index // self._body.num_choices]
        first, *others = self._jobs[index].prompt_ids
        writer = TextWriter(self._context.info.tokenizer, specials=False)
        ids = self._jobs[index].prompt_ids
        update = Update(token_ids=ids, sources=tuple("target" for _ in ids))
        pieces = writer.take(update)
        texts = [piece.text for piece in pieces]
        return [
            Piece(texts[0], first, "target"),
            *(
                Piece(text, token, "target", False, logprob, _with(top, token, logprob))
                for text, token, logprob, top in zip(
                    texts[1:], others, scored.logprobs, scored.top_logprobs, strict=True
                )
            ),
        ]

    def _prompt(self, index: int) -> str:
        """The prompt's text; for token ids, their text up to the last whole character."""
        prompts: Any = self._body.prompt
        own = prompts if isinstance(prompts, str) else prompts[index // self._body.num_choices]
        if isinstance(own, str):
            return own
        prompt_ids = list(self._jobs[index].prompt_ids)
        text = str(self._context.info.tokenizer.decode(prompt_ids, skip_special_tokens=True))
        return text.rstrip(UNKNOWN)


def _with(top: Alternatives, token: int, logprob: float) -> Alternatives:
    """The alternatives with the token itself, as OpenAI's format has it."""
    known = any(one == token for one, _ in top)
    return top if known or not top else (*top, (token, logprob))


def logprobs_of(info: SourceInfo, pieces: Sequence[Piece], start: int) -> dict[str, Any]:
    """Log-probabilities in the format of completions, of tokens whose text begins at `start`."""
    pieces = [piece for piece in pieces if not piece.hidden]
    offsets, tokens = [], info.token_bytes
    for piece in pieces:
        offsets.append(start)
        start += len(piece.text)
    # If several tokens have the same text, the most probable one is kept.
    tops = [
        {
            tokens.name(token): max(value, MIN_LOGPROB)
            for token, value in reversed(piece.top_logprobs)
        }
        for piece in pieces
    ]
    known = [
        None if piece.logprob is None else top for piece, top in zip(pieces, tops, strict=True)
    ]
    return {
        "tokens": [tokens.name(piece.token_id) for piece in pieces],
        "bytes": [list(tokens(piece.token_id)) for piece in pieces],
        "token_logprobs": [
            None if piece.logprob is None else max(piece.logprob, MIN_LOGPROB) for piece in pieces
        ],
        "top_logprobs": known if any(tops) else None,
        "text_offset": offsets,
    }
