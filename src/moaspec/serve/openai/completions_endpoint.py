"""The completions endpoint, /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import APIRouter, Request

from moaspec.data.templates.chat_template import require_characters
from moaspec.sampling.incremental_text import UNKNOWN
from moaspec.serve import http_errors
from moaspec.serve.http_errors import RequestError
from moaspec.serve.openai.answer import Answer
from moaspec.serve.openai.choice import MIN_LOGPROB, Choice, Delta
from moaspec.serve.openai.redaction import RequestRedactor
from moaspec.serve.openai.request_texts import RequestTexts
from moaspec.serve.openai.schema import Completion, CompletionChoice, CompletionRequest
from moaspec.serve.openai.unsupported_fields import refuse_unsupported
from moaspec.serve.server_context import ServerContext
from moaspec.serve.sources.source import SourceFacts
from moaspec.serve.sources.text_writer import Piece

DEFAULT_TOKENS = 16
"""OpenAI's default of `max_tokens`."""


def router(context: ServerContext) -> APIRouter:
    """Create the router of the endpoint."""
    routes = APIRouter(prefix="/v1", responses=http_errors.responses())

    @routes.post("/completions", response_model=Completion, response_model_exclude_none=True)
    async def create_completion(body: CompletionRequest, request: Request) -> Any:
        """Continue one or several texts."""
        context.check_model(body.model)
        refuse_unsupported(body)
        _check(body)
        redactor = context.redactor()
        prompts, stop = await context.preparation.run(
            request, lambda: _prompts(context, body, redactor)
        )
        jobs = context.jobs(
            request,
            body,
            prompts,
            max_tokens=DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens,
            n=body.n or 1,
            logprobs=body.logprobs,
            stop=stop,
        )
        texts = context.decode(jobs, "completions")
        answer = _CompletionAnswer(context, body, texts, redactor)
        return await answer.respond(request, stream=body.stream)

    return routes


def _check(body: CompletionRequest) -> None:
    if body.suffix:
        raise RequestError("suffix is not supported: the model only continues.", param="suffix")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise RequestError("best_of must equal n: nothing is sorted out.", param="best_of")
    if body.echo and body.logprobs is not None:
        raise RequestError("echo and logprobs do not go together here.", param="echo")


def _prompts(
    context: ServerContext, body: CompletionRequest, redactor: RequestRedactor
) -> tuple[list[list[int]], tuple[str, ...]]:
    """Token ids of all prompts, which are texts or token ids, and the stop strings."""
    prompts: Any = body.prompt
    if isinstance(prompts, str) or isinstance(prompts[0], int):
        prompts = [prompts]
    tokenizer, stop = context.facts.tokenizer, body.stop_strings
    if isinstance(prompts[0], str):
        for text in prompts:
            require_characters(text)
        redacted = redactor.hide_texts([*prompts, *stop])
        prompts, stop = redacted[: len(prompts)], tuple(redacted[len(prompts) :])
    else:
        for skip_special in (False, True) if redactor.active else ():
            texts = [tokenizer.decode(ids, skip_special_tokens=skip_special) for ids in prompts]
            redactor.check_unchanged([*texts, *stop])
    redactor.check_answer(logprobs=body.logprobs is not None, stop=stop)

    def tokenize(text: str) -> list[int]:
        return list(tokenizer(text)["input_ids"])

    ids = [
        context.tokens(prompt, tokenize) if isinstance(prompt, str) else prompt
        for prompt in prompts
    ]
    return ids, stop


class _CompletionAnswer(Answer):
    id_prefix, chunk_object = "cmpl", "text_completion"

    def __init__(
        self,
        context: ServerContext,
        body: CompletionRequest,
        texts: RequestTexts,
        redactor: RequestRedactor,
    ) -> None:
        super().__init__(context, body, texts, redactor, n=body.n or 1)
        self._facts, self._body = context.facts, body

    def _result(self) -> Completion:
        return Completion(
            **self._head,
            choices=[self._choice(choice) for choice in self._choices],
            usage=self._usage(),
            moaspec=self._extension_object(),
        )

    async def _events(self) -> AsyncGenerator[dict[str, Any]]:
        for choice in self._choices if self._body.echo else ():
            yield self._text_chunk(choice.index, self._prompt(choice.index), None)
        async for index, update in self._texts.updates():
            choice = self._choices[index]
            start = len(choice.text)
            delta = choice.take(update)
            matters = delta.matters(logprobs=self._body.logprobs is not None)
            if matters or delta.finish_reason is not None:
                yield self._text_chunk(index, delta.text, delta, start)
        for chunk in self._usage_chunks(self._body.stream_options):
            yield chunk

    def _text_chunk(
        self, index: int, text: str, delta: Delta | None, start: int = 0
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "text": text, "logprobs": None}
        choice["finish_reason"] = None if delta is None else delta.finish_reason
        if delta is not None and self._body.logprobs is not None:
            choice["logprobs"] = logprobs_of(self._facts, delta.pieces, start)
        chunk = self._chunk([choice])
        if delta is not None and delta.moaspec is not None:
            chunk["moaspec"] = delta.moaspec
        return chunk

    def _choice(self, choice: Choice) -> CompletionChoice:
        text = (self._prompt(choice.index) if self._body.echo else "") + choice.text
        logprobs = None
        if self._body.logprobs is not None:
            logprobs = logprobs_of(self._facts, choice.pieces, 0)
        assert choice.finish_reason in (None, "stop", "length"), "completions have no tools"
        return CompletionChoice(
            index=choice.index, text=text, logprobs=logprobs, finish_reason=choice.finish_reason
        )

    def _prompt(self, index: int) -> str:
        """The prompt's text; for token ids, their text up to the last whole character."""
        prompts: Any = self._body.prompt
        own = prompts if isinstance(prompts, str) else prompts[index // self._n]
        if isinstance(own, str):
            return own
        prompt_ids = list(self._texts.jobs[index].prompt_ids)
        text = str(self._facts.tokenizer.decode(prompt_ids, skip_special_tokens=True))
        return text.rstrip(UNKNOWN)


def logprobs_of(facts: SourceFacts, pieces: Sequence[Piece], start: int) -> dict[str, Any]:
    """Log-probabilities in the format of completions.

    Args:
        facts: properties of the model.
        pieces: the tokens.
        start: offset of the first of them in the text.
    """
    pieces = [piece for piece in pieces if not piece.hidden]
    offsets, tokens = [], facts.token_bytes
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
    return {
        "tokens": [tokens.name(piece.token_id) for piece in pieces],
        "bytes": [list(tokens(piece.token_id)) for piece in pieces],
        "token_logprobs": [max(piece.logprob or 0.0, MIN_LOGPROB) for piece in pieces],
        "top_logprobs": tops if any(tops) else None,
        "text_offset": offsets,
    }
