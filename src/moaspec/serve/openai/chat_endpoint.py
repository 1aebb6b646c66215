"""/v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request

from moaspec.data.templates.call_reader import Call
from moaspec.serve import http_errors
from moaspec.serve.http_errors import RequestError
from moaspec.serve.openai.answer_format import ANY_OBJECT, AnswerFormat
from moaspec.serve.openai.chat_schema import (
    AnswerMessage,
    ChatChoice,
    ChatCompletion,
    ChatRequest,
    FunctionCall,
    FunctionName,
    NamedChoice,
    ToolCall,
)
from moaspec.serve.openai.choice import Choice, Delta, extension_of, token_logprob, usage
from moaspec.serve.openai.hiding import Asked, Hiding
from moaspec.serve.openai.request_texts import EventStream, RequestTexts, unless_left
from moaspec.serve.openai.schema import FinishReason, JSONSchemaFormat, ObjectFormat
from moaspec.serve.openai.unsupported_fields import refuse_unsupported
from moaspec.serve.server_context import GenerationSpec, ServerContext, created_now, fresh_id
from moaspec.serve.sources.source import Job, SourceFacts
from moaspec.serve.sources.text_writer import Piece


def router(desk: ServerContext) -> APIRouter:
    """The endpoint."""
    made = APIRouter(prefix="/v1", responses=http_errors.responses())

    @made.post("/chat/completions", response_model=ChatCompletion, response_model_exclude_none=True)
    async def create_chat_completion(asked: ChatRequest, request: Request) -> Any:
        """Answer a conversation."""
        desk.check_model(asked.model)
        refuse_unsupported(asked)
        form, hiding = _form(asked), desk.hiding()
        jobs = await desk.preparation.run(
            request, lambda: _jobs(desk, asked, request, form, hiding)
        )
        run = desk.run(jobs, "chat")
        answer = _ChatAnswer(desk, asked, run, form, hiding)
        if asked.stream:
            timeout_s = desk.settings.send_timeout_s
            return EventStream(run, answer.events(), send_timeout_s=timeout_s)
        return await unless_left(request, run, answer.whole())

    return made


def _form(asked: ChatRequest) -> AnswerFormat:
    wanted, schema = asked.response_format, None
    if isinstance(wanted, ObjectFormat):
        schema = ANY_OBJECT
    if isinstance(wanted, JSONSchemaFormat):
        schema = wanted.json_schema.schema_
    if asked.older:
        return _older_form(asked, schema)
    choice = asked.tool_choice
    return AnswerFormat(
        tools=[one.tool() for one in asked.tools or ()],
        choice=choice.function.name if isinstance(choice, NamedChoice) else choice,
        parallel=asked.parallel_tool_calls,
        schema=schema,
    )


def _older_form(asked: ChatRequest, schema: dict[str, Any] | None) -> AnswerFormat:
    """`functions` and `function_call`: one call an answer."""
    if asked.tools is not None or asked.tool_choice is not None:
        raise RequestError(
            "functions and function_call are the older names of tools and tool_choice. Set those "
            "of one kind.",
            param="functions" if asked.functions is not None else "function_call",
        )
    choice = asked.function_call
    return AnswerFormat(
        tools=[one.tool() for one in asked.functions or ()],
        choice=choice.name if isinstance(choice, FunctionName) else choice,
        parallel=False,
        schema=schema,
    )


def _jobs(
    desk: ServerContext, asked: ChatRequest, request: Request, form: AnswerFormat, hiding: Hiding
) -> list[Job]:
    if asked.top_logprobs and not asked.logprobs:
        raise RequestError("top_logprobs needs logprobs: true.", param="top_logprobs")
    if asked.continue_final_message and asked.add_generation_prompt:
        raise RequestError(
            "continue_final_message goes on with the last message, add_generation_prompt begins a "
            "new one. Set one of them.",
            param="continue_final_message",
        )
    hidden = hiding.hide(
        Asked(
            messages=desk.normal(asked.conversation()),
            tools=[tool.given for tool in form.tools],
            schema=form.schema,
            variables=desk.variables(asked.chat_template_kwargs, asked.reasoning_effort),
            stop=asked.stop_strings,
        )
    )
    hiding.check_answer(logprobs=bool(asked.logprobs), stop=hidden.stop)
    prompt = desk.prompt(
        hidden,
        with_tools=form.choice != "none",
        add_generation_prompt=asked.add_generation_prompt is not False,
        continue_final_message=bool(asked.continue_final_message),
    )
    limits = (asked.max_completion_tokens, asked.max_tokens, desk.settings.default_max_tokens)
    order = GenerationSpec(
        max_tokens=next(limit for limit in limits if limit is not None),
        n=asked.n or 1,
        logprobs=(asked.top_logprobs or 0) if asked.logprobs else None,
        grammar=form.hidden(hidden).grammar(desk),
        stop=hidden.stop,
    )
    return desk.jobs(request, asked, [prompt], order)


class _ChatAnswer:
    """What is said of a run."""

    def __init__(
        self,
        desk: ServerContext,
        asked: ChatRequest,
        run: RequestTexts,
        form: AnswerFormat,
        hiding: Hiding,
    ) -> None:
        self._facts, self._asked, self._run = desk.facts, asked, run
        self._choices = [
            Choice(
                i,
                desk,
                job,
                tally,
                asked=asked.extension,
                reader=form.reader(desk),
                begins_turn=asked.begins_turn,
                hiding=hiding,
                as_json=form.schema is not None,
            )
            for i, (job, tally) in enumerate(zip(run.jobs, run.tallies, strict=True))
        ]
        self._head: dict[str, Any] = {
            "id": fresh_id("chatcmpl"),
            "created": created_now(),
            "model": asked.model,
            "system_fingerprint": desk.facts.fingerprint,
        }

    async def whole(self) -> ChatCompletion:
        """All at once."""
        async for index, update in self._run.updates():
            self._choices[index].take(update)
        return ChatCompletion(
            **self._head,
            choices=[self._choice(choice) for choice in self._choices],
            usage=self._usage(),
            moaspec=extension_of(self._asked.moaspec, self._choices),
        )

    async def events(self) -> AsyncGenerator[dict[str, Any]]:
        """Bodies of chunks."""
        for choice in self._choices:
            yield self._chunk(choice.index, {"role": "assistant", "content": ""})
        async for index, update in self._run.updates():
            delta = self._choices[index].take(update)
            if delta.matters(logprobs=bool(self._asked.logprobs)):
                yield self._delta_chunk(index, delta)
            if delta.finish_reason is not None:
                yield self._chunk(index, {}, self._finish(delta.finish_reason))
        if self._asked.stream_options and self._asked.stream_options.include_usage:
            yield {**self._base(), "choices": [], "usage": self._usage().model_dump()}

    def _delta_chunk(self, index: int, delta: Delta) -> dict[str, Any]:
        said: dict[str, Any] = {"content": delta.text} if delta.text else {}
        if delta.calls and self._asked.older:
            said["function_call"] = _tool_call(delta.calls[0][1]).function.model_dump()
        elif delta.calls:
            said["tool_calls"] = [
                {"index": i, **_tool_call(call).model_dump()} for i, call in delta.calls
            ]
        chunk = self._chunk(index, said)
        if self._asked.logprobs and delta.pieces:
            chunk["choices"][0]["logprobs"] = logprobs_of(self._facts, delta.pieces)
        if delta.moaspec is not None:
            chunk["moaspec"] = delta.moaspec
        return chunk

    def _chunk(
        self, index: int, said: dict[str, Any], finish: FinishReason | None = None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": said, "logprobs": None, "finish_reason": finish}
        return {**self._base(), "choices": [choice]}

    def _choice(self, choice: Choice) -> ChatChoice:
        calls = [_tool_call(call) for call in choice.calls]
        older = calls[0].function if calls and self._asked.older else None
        return ChatChoice(
            index=choice.index,
            message=AnswerMessage(
                content=choice.text if choice.text or not calls else None,
                tool_calls=None if older else calls or None,
                function_call=older,
            ),
            logprobs=logprobs_of(self._facts, choice.pieces) if self._asked.logprobs else None,
            finish_reason=self._finish(choice.finish_reason),
        )

    def _finish(self, reason: FinishReason | None) -> FinishReason | None:
        return "function_call" if reason == "tool_calls" and self._asked.older else reason

    def _base(self) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk"}

    def _usage(self) -> Any:
        return usage(self._run.jobs, self._run.tallies, self._asked.n or 1)


def _tool_call(call: Call) -> ToolCall:
    return ToolCall(id=call.id, function=FunctionCall(name=call.name, arguments=call.arguments))


def logprobs_of(facts: SourceFacts, pieces: Sequence[Piece]) -> dict[str, Any]:
    """Log-probabilities as chats report them."""
    content = []
    for piece in pieces:
        told = partial(token_logprob, facts, begins_turn=piece.begins_turn)
        top = [told(*one) for one in piece.top_logprobs]
        if not piece.hidden:
            content.append({**told(piece.token_id, piece.logprob or 0.0), "top_logprobs": top})
    return {"content": content, "refusal": None}
