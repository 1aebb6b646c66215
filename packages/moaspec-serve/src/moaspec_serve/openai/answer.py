"""The answer to a request: its choices, sent whole or as server-sent events.

Answers are plain objects of OpenAI's format. Tests check them against the types of its client.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from moaspec_core.errors import InputError
from moaspec_core.sampling.grammar import Grammar
from moaspec_serve.openai.chat_input import ChatInput
from moaspec_serve.openai.choice import Choice, Delta
from moaspec_serve.openai.event_stream import EventStream, unless_disconnected
from moaspec_serve.openai.redaction import RequestRedactor
from moaspec_serve.openai.schema import ChoicesRequest, GenerationRequest
from moaspec_serve.openai.token_counts import TokenCounts
from moaspec_serve.server_context import ServerContext, fresh_id
from moaspec_serve.sources.source import Job, Update

EVENT = {
    "type": "object",
    "properties": {"data": {"type": "string"}, "event": {"type": "string"}},
    "required": ["data"],
}
STREAMED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "OpenAI's object, see its API reference; with `stream`, its events",
        "content": {
            "application/json": {"schema": {"type": "object"}},
            "text/event-stream": {"schema": EVENT},
        },
    }
}
"""Description of answers in the OpenAPI document."""

Body = TypeVar("Body", bound=GenerationRequest)
ChoicesBody = TypeVar("ChoicesBody", bound=ChoicesRequest)


class Answer(Generic[Body]):
    """Base of the answers of all endpoints. Decodes the jobs of a request, all or none.

    Raises:
        InputError, BusyError: see `TextSource.submit`.
    """

    endpoint: ClassVar[str]  # name in the metrics
    id_prefix: ClassVar[str]
    named_events: ClassVar[bool] = False

    def __init__(
        self,
        context: ServerContext,
        body: Body,
        jobs: Sequence[Job],
        redactor: RequestRedactor,
        chat: ChatInput,
    ) -> None:
        self._context, self._body, self._jobs = context, body, jobs
        self._unfinished, self._outcome = set(range(len(jobs))), "cancelled"
        self._news: asyncio.Queue[tuple[int, Update | Exception]] = asyncio.Queue()
        self._cancel = context.source.submit(jobs, lambda *news: self._news.put_nowait(news))
        self._head: dict[str, Any] = {
            "id": fresh_id(self.id_prefix),
            "created": int(time.time()),
            "model": body.model,
            "system_fingerprint": context.info.fingerprint,
        }
        self._choices = [
            Choice(index, context, body, job=job, redactor=redactor, chat=chat)
            for index, job in enumerate(jobs)
        ]

    async def respond(self, request: Request) -> Response:
        """Send the answer. The texts are cancelled when the client disconnects."""
        if self._body.stream:
            return EventStream(
                self._events(),
                self._close,
                named=self.named_events,
                send_timeout_s=self._context.settings.send_timeout_s,
            )
        try:
            whole = await unless_disconnected(request.receive, self._whole())
            return JSONResponse(whole)
        finally:
            await self._close()

    async def _whole(self) -> dict[str, Any]:
        async for _ in self._deltas():
            pass
        return self._result()

    async def _deltas(self) -> AsyncIterator[Delta]:
        """Yield what each update adds, until all texts have ended."""
        while self._unfinished:
            index, news = await self._news.get()
            await self._context.turns.wait()
            if isinstance(news, Exception):
                self._outcome = "failed"
                raise news
            delta = self._choices[index].take(news)
            grammar = self._jobs[index].grammar
            if news.stop_reason == "stop_token" and grammar is not None:
                await self._check_ended(grammar, self._choices[index].token_ids)
            if delta.finish_reason is not None:
                self._unfinished.discard(index)
                self._count(index, "done")
            yield delta

    async def _check_ended(self, grammar: Grammar, output: Sequence[int]) -> None:
        """Raise InputError for a text that ended before its grammar was complete."""
        try:
            await asyncio.to_thread(grammar.check_ended, output)
        except InputError:
            self._outcome = "failed"
            raise

    async def _close(self) -> None:
        """Cancel unfinished texts. May be called more than once."""
        await self._cancel()
        for index in self._unfinished:
            self._count(index, self._outcome)
        self._unfinished.clear()

    def _count(self, index: int, outcome: str) -> None:
        counts, prompt_tokens = self._choices[index].counts, len(self._jobs[index].prompt_ids)
        self._context.metrics.count(self.endpoint, outcome, prompt_tokens, counts)

    def _result(self) -> dict[str, Any]:
        """The complete answer, after the last update."""
        raise NotImplementedError

    async def _events(self) -> AsyncGenerator[dict[str, Any]]:
        for event in self._first_events():
            yield event
        async for delta in self._deltas():
            for event in self._delta_events(delta):
                yield event
        for event in self._last_events():
            yield event

    def _first_events(self) -> Iterator[dict[str, Any]]:
        raise NotImplementedError

    def _delta_events(self, delta: Delta) -> Iterator[dict[str, Any]]:
        raise NotImplementedError

    def _last_events(self) -> Iterator[dict[str, Any]]:
        raise NotImplementedError

    def _extension_object(self) -> dict[str, Any] | None:
        if self._body.moaspec is None:
            return None
        return {"choices": [choice.extension() for choice in self._choices]}

    def _vllm_metrics(self) -> dict[str, Any]:
        """The field `metrics` under vLLM's names; empty without drafts."""
        found = TokenCounts.total([choice.counts for choice in self._choices]).vllm_metrics()
        return {} if found is None else {"metrics": found}

    def _usage(self) -> dict[str, Any]:
        """Token usage of the request. A prompt with several choices counts one time."""
        counts, n = [choice.counts for choice in self._choices], self._body.num_choices
        prompt = sum(len(job.prompt_ids) for job in self._jobs[::n])
        total = TokenCounts.total(counts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": total.tokens,
            "total_tokens": prompt + total.tokens,
            "prompt_tokens_details": {"cached_tokens": sum(each.reused for each in counts[::n])},
            "completion_tokens_details": {
                "reasoning_tokens": 0,
                "accepted_prediction_tokens": total.accepted,
                "rejected_prediction_tokens": max(total.drafted - total.accepted, 0),
            },
            "speculation": total.speculation(),
        }


class ChoicesAnswer(Answer[ChoicesBody]):
    """Base of the answers with `choices`: chats and completions."""

    whole_object: ClassVar[str]  # field `object` of complete answers
    chunk_object: ClassVar[str]  # field `object` of chunks

    def _choice(self, choice: Choice) -> dict[str, Any]:
        raise NotImplementedError

    def _result(self) -> dict[str, Any]:
        extension = self._extension_object()
        return {
            **self._head,
            "object": self.whole_object,
            "choices": [self._choice(choice) for choice in self._choices],
            "usage": self._usage(),
            **self._vllm_metrics(),
            **({} if extension is None else {"moaspec": extension}),
        }

    def _ids(self, token_ids: Sequence[int]) -> dict[str, Any]:
        """The field of a choice's token ids, if they are asked for."""
        return {"token_ids": list(token_ids)} if self._body.return_token_ids else {}

    def _prompt_ids(self, index: int) -> dict[str, Any]:
        """The field of the token ids of a choice's prompt, if they are asked for."""
        ids = self._jobs[index].prompt_ids
        return {"prompt_token_ids": list(ids)} if self._body.return_token_ids else {}

    def _chunk(self, *choices: dict[str, Any], delta: Delta | None = None) -> dict[str, Any]:
        chunk = {**self._head, "object": self.chunk_object, "choices": choices}
        if self._tells_usage:  # the last chunk has it, or all
            options = self._body.stream_options
            continuous = options is not None and options.continuous_usage_stats
            chunk["usage"] = self._usage() if continuous else None
        if delta is not None and delta.moaspec is not None:
            chunk["moaspec"] = delta.moaspec
        return chunk

    def _last_events(self) -> Iterator[dict[str, Any]]:
        if self._tells_usage:
            yield {**self._chunk(), "usage": self._usage(), **self._vllm_metrics()}

    @property
    def _tells_usage(self) -> bool:
        options = self._body.stream_options
        return options is not None and options.include_usage
