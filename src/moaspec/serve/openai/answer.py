"""The answer to a request: its choices, sent whole or as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, ClassVar

from fastapi import Request

from moaspec.serve.openai.answer_format import AnswerFormat
from moaspec.serve.openai.choice import Choice
from moaspec.serve.openai.redaction import RequestRedactor
from moaspec.serve.openai.request_texts import EventStream, RequestTexts, unless_disconnected
from moaspec.serve.openai.schema import (
    CompletionDetails,
    GenerationRequest,
    PromptDetails,
    Speculation,
    StreamOptions,
    Usage,
)
from moaspec.serve.server_context import ServerContext, created_now, fresh_id


class Answer:
    """Base of the answers of all endpoints.

    Args:
        context: state of the server.
        body: the request.
        texts: its texts, in decoding.
        redactor: redactor of the request.
        answer_format: format of the texts.
        begins_turn: see `Choice`.
        n: choices per prompt.
    """

    id_prefix: ClassVar[str]
    chunk_object: ClassVar[str]
    """Field `object` of chunks."""
    named_events: ClassVar[bool] = False

    def __init__(
        self,
        context: ServerContext,
        body: GenerationRequest,
        texts: RequestTexts,
        redactor: RequestRedactor,
        answer_format: AnswerFormat | None = None,
        *,
        begins_turn: bool = False,
        n: int = 1,
    ) -> None:
        self._context, self._texts, self._n = context, texts, n
        self._extension = body.moaspec
        self._head: dict[str, Any] = {
            "id": fresh_id(self.id_prefix),
            "created": created_now(),
            "model": body.model,
            "system_fingerprint": context.facts.fingerprint,
        }
        self._choices = [
            Choice(
                index,
                context,
                job,
                counts,
                extension=body.extension,
                redactor=redactor,
                answer_format=answer_format or AnswerFormat(),
                begins_turn=begins_turn,
            )
            for index, (job, counts) in enumerate(zip(texts.jobs, texts.counts, strict=True))
        ]

    async def respond(self, request: Request, *, stream: bool | None) -> Any:
        """Send the answer. The texts are cancelled when the client disconnects."""
        if stream:
            return EventStream(
                self._texts,
                self._events(),
                named=self.named_events,
                send_timeout_s=self._context.settings.send_timeout_s,
            )
        try:
            return await unless_disconnected(request.receive, self._whole())
        finally:
            await self._texts.close()

    async def _whole(self) -> Any:
        async for index, update in self._texts.updates():
            self._choices[index].take(update)
        return self._result()

    def _result(self) -> Any:
        """The complete answer, after the last update."""
        raise NotImplementedError

    def _events(self) -> AsyncGenerator[dict[str, Any]]:
        """Bodies of the server-sent events."""
        raise NotImplementedError

    def _chunk(self, choices: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        return {**self._head, "object": self.chunk_object, "choices": choices, **fields}

    def _usage_chunks(self, options: StreamOptions | None) -> list[dict[str, Any]]:
        """The last chunk of a stream, if the request asks for its usage."""
        if options is None or not options.include_usage:
            return []
        return [self._chunk([], usage=self._usage().model_dump())]

    def _extension_object(self) -> dict[str, Any] | None:
        """The field `moaspec` of a complete answer."""
        if self._extension is None:
            return None
        return {"choices": [choice.extension() for choice in self._choices]}

    def _usage(self) -> Usage:
        """Token usage of the request. A prompt with several choices counts one time."""
        counts, n = self._texts.counts, self._n
        prompt = sum(len(job.prompt_ids) for job in self._texts.jobs[::n])
        tokens, rounds = sum(each.tokens for each in counts), sum(each.rounds for each in counts)
        accepted = sum(each.accepted for each in counts)
        drafted = sum(each.drafted for each in counts)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=tokens,
            total_tokens=prompt + tokens,
            prompt_tokens_details=PromptDetails(
                cached_tokens=sum(each.reused for each in counts[::n])
            ),
            completion_tokens_details=CompletionDetails(
                accepted_prediction_tokens=accepted,
                rejected_prediction_tokens=max(drafted - accepted, 0),
            ),
            speculation=Speculation(
                rounds=rounds,
                tau=sum(each.emitted for each in counts) / rounds if rounds else None,
                drafted=drafted,
                accepted=accepted,
                copied=sum(each.copied for each in counts),
            ),
        )
