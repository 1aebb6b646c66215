"""/v1/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import APIRouter, Request

from moaspec.data.templates.chat_template import require_characters
from moaspec.sampling.incremental_text import UNKNOWN
from moaspec.serve import http_errors
from moaspec.serve.http_errors import RequestError
from moaspec.serve.openai.choice import LEAST_LOGPROB, Choice, Delta, extension_of, usage
from moaspec.serve.openai.hiding import Hiding
from moaspec.serve.openai.request_texts import EventStream, RequestTexts, unless_left
from moaspec.serve.openai.schema import Completion, CompletionChoice, CompletionRequest
from moaspec.serve.openai.unsupported_fields import refuse_unsupported
from moaspec.serve.server_context import GenerationSpec, ServerContext, created_now, fresh_id
from moaspec.serve.sources.source import SourceFacts
from moaspec.serve.sources.text_writer import Piece

DEFAULT_TOKENS = 16
"""As OpenAI's."""


def router(desk: ServerContext) -> APIRouter:
    """The endpoint."""
    made = APIRouter(prefix="/v1", responses=http_errors.responses())

    @made.post("/completions", response_model=Completion, response_model_exclude_none=True)
    async def create_completion(asked: CompletionRequest, request: Request) -> Any:
        """Continue texts."""
        desk.check_model(asked.model)
        refuse_unsupported(asked)
        _check(asked)
        hiding = desk.hiding()
        prompts, stop = await desk.preparation.run(request, lambda: _prompts(desk, asked, hiding))
        order = GenerationSpec(
            max_tokens=DEFAULT_TOKENS if asked.max_tokens is None else asked.max_tokens,
            n=asked.n or 1,
            logprobs=asked.logprobs,
            stop=stop,
        )
        run = desk.run(desk.jobs(request, asked, prompts, order), "completions")
        answer = _CompletionAnswer(desk, asked, run, hiding)
        if asked.stream:
            timeout_s = desk.settings.send_timeout_s
            return EventStream(run, answer.events(), send_timeout_s=timeout_s)
        return await unless_left(request, run, answer.whole())

    return made


def _check(asked: CompletionRequest) -> None:
    if asked.suffix:
        raise RequestError("suffix is not supported: the model only continues.", param="suffix")
    if asked.best_of is not None and asked.best_of != (asked.n or 1):
        raise RequestError("best_of must equal n: nothing is sorted out.", param="best_of")
    if asked.echo and asked.logprobs is not None:
        raise RequestError("echo and logprobs do not go together here.", param="echo")


def _prompts(
    desk: ServerContext, asked: CompletionRequest, hiding: Hiding
) -> tuple[list[list[int]], tuple[str, ...]]:
    """One prompt, or several, of text or token ids; and strings that end the texts."""
    prompt: Any = asked.prompt
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        prompt = [prompt]
    for text in (one for one in prompt if isinstance(one, str)):
        require_characters(text)
    tokenizer = desk.facts.tokenizer

    def tokenize(text: str) -> list[int]:
        return list(tokenizer(text)["input_ids"])

    stop = asked.stop_strings
    if isinstance(prompt[0], str):
        hidden = hiding.hide_texts([*prompt, *stop])
        prompt, stop = hidden[: len(prompt)], tuple(hidden[len(prompt) :])
    else:
        for specials in (False, True) if hiding.active else ():
            texts = [tokenizer.decode(one, skip_special_tokens=specials) for one in prompt]
            hiding.check_unchanged([*texts, *stop])
    hiding.check_answer(logprobs=asked.logprobs is not None, stop=stop)
    found = [desk.tokens(one, tokenize) if isinstance(one, str) else one for one in prompt]
    return found, stop


class _CompletionAnswer:
    """What is said of a run."""

    def __init__(
        self, desk: ServerContext, asked: CompletionRequest, run: RequestTexts, hiding: Hiding
    ) -> None:
        self._facts, self._asked, self._run = desk.facts, asked, run
        self._choices = [
            Choice(i, desk, job, tally, asked=asked.extension, hiding=hiding)
            for i, (job, tally) in enumerate(zip(run.jobs, run.tallies, strict=True))
        ]
        self._head: dict[str, Any] = {
            "id": fresh_id("cmpl"),
            "created": created_now(),
            "model": asked.model,
            "system_fingerprint": desk.facts.fingerprint,
        }

    async def whole(self) -> Completion:
        """All at once."""
        async for index, update in self._run.updates():
            self._choices[index].take(update)
        return Completion(
            **self._head,
            choices=[self._choice(choice) for choice in self._choices],
            usage=self._usage(),
            moaspec=extension_of(self._asked.moaspec, self._choices),
        )

    async def events(self) -> AsyncGenerator[dict[str, Any]]:
        """Bodies of chunks."""
        for choice in self._choices if self._asked.echo else ():
            yield self._chunk(choice.index, self._prompt(choice.index), None)
        async for index, update in self._run.updates():
            choice = self._choices[index]
            start = len(choice.text)
            delta = choice.take(update)
            wanted = delta.matters(logprobs=self._asked.logprobs is not None)
            if wanted or delta.finish_reason is not None:
                yield self._chunk(index, delta.text, delta, start)
        if self._asked.stream_options and self._asked.stream_options.include_usage:
            yield {**self._base(), "choices": [], "usage": self._usage().model_dump()}

    def _chunk(self, index: int, text: str, delta: Delta | None, start: int = 0) -> dict[str, Any]:
        said: dict[str, Any] = {"index": index, "text": text, "logprobs": None}
        said["finish_reason"] = None if delta is None else delta.finish_reason
        if delta is not None and self._asked.logprobs is not None:
            said["logprobs"] = logprobs_of(self._facts, delta.pieces, start)
        chunk = {**self._base(), "choices": [said]}
        if delta is not None and delta.moaspec is not None:
            chunk["moaspec"] = delta.moaspec
        return chunk

    def _choice(self, choice: Choice) -> CompletionChoice:
        text = (self._prompt(choice.index) if self._asked.echo else "") + choice.text
        logprobs = None
        if self._asked.logprobs is not None:
            logprobs = logprobs_of(self._facts, choice.pieces, 0)
        assert choice.finish_reason in (None, "stop", "length"), "there are no tools here"
        return CompletionChoice(
            index=choice.index, text=text, logprobs=logprobs, finish_reason=choice.finish_reason
        )

    def _prompt(self, index: int) -> str:
        """The prompt as the client wrote it; of token ids, their text up to its last character."""
        given: Any = self._asked.prompt
        own = given if isinstance(given, str) else given[index // (self._asked.n or 1)]
        if isinstance(own, str):
            return own
        prompt_ids = list(self._run.jobs[index].prompt_ids)
        text = str(self._facts.tokenizer.decode(prompt_ids, skip_special_tokens=True))
        return text.rstrip(UNKNOWN)

    def _base(self) -> dict[str, Any]:
        return {**self._head, "object": "text_completion"}

    def _usage(self) -> Any:
        return usage(self._run.jobs, self._run.tallies, self._asked.n or 1)


def logprobs_of(facts: SourceFacts, pieces: Sequence[Piece], start: int) -> dict[str, Any]:
    """Log-probabilities as completions report them.

    Args:
        facts: of the target.
        pieces: the tokens.
        start: where the first of them begins in the text.
    """
    pieces = [piece for piece in pieces if not piece.hidden]
    offsets, tokens = [], facts.token_bytes
    for piece in pieces:
        offsets.append(start)
        start += len(piece.text)
    # Of tokens with the same text the most probable one is kept.
    tops = [
        {
            tokens.name(token): max(value, LEAST_LOGPROB)
            for token, value in reversed(one.top_logprobs)
        }
        for one in pieces
    ]
    return {
        "tokens": [tokens.name(piece.token_id) for piece in pieces],
        "bytes": [list(tokens(piece.token_id)) for piece in pieces],
        "token_logprobs": [max(piece.logprob or 0.0, LEAST_LOGPROB) for piece in pieces],
        "top_logprobs": tops if any(tops) else None,
        "text_offset": offsets,
    }
