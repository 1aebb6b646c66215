"""The chat endpoint, /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request

from moaspec.data.templates.call_reader import Call
from moaspec.serve import http_errors
from moaspec.serve.http_errors import RequestError
from moaspec.serve.openai.answer import Answer
from moaspec.serve.openai.answer_format import ANY_OBJECT, AnswerFormat, ConversationRequest
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
from moaspec.serve.openai.choice import Choice, Delta, token_logprob
from moaspec.serve.openai.redaction import RequestRedactor
from moaspec.serve.openai.request_texts import RequestTexts
from moaspec.serve.openai.schema import FinishReason, JSONSchemaFormat, ObjectFormat
from moaspec.serve.openai.unsupported_fields import refuse_unsupported
from moaspec.serve.server_context import ServerContext
from moaspec.serve.sources.source import SourceFacts
from moaspec.serve.sources.text_writer import Piece


def router(context: ServerContext) -> APIRouter:
    """Create the router of the endpoint."""
    routes = APIRouter(prefix="/v1", responses=http_errors.responses())

    @routes.post(
        "/chat/completions", response_model=ChatCompletion, response_model_exclude_none=True
    )
    async def create_chat_completion(body: ChatRequest, request: Request) -> Any:
        """Answer a conversation as a chat completion."""
        context.check_model(body.model)
        refuse_unsupported(body)
        chat, redactor = _conversation(body), context.redactor()
        jobs = await context.preparation.run(
            request, lambda: chat.jobs(context, request, body, redactor)
        )
        texts = context.decode(jobs, "chat")
        answer = _ChatAnswer(context, body, texts, redactor, chat.answer_format)
        return await answer.respond(request, stream=body.stream)

    return routes


def _conversation(body: ChatRequest) -> ConversationRequest:
    answer_format = _answer_format(body)
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs: true.", param="top_logprobs")
    if body.continue_final_message and body.add_generation_prompt:
        raise RequestError(
            "continue_final_message goes on with the last message, add_generation_prompt begins a "
            "new one. Set one of them.",
            param="continue_final_message",
        )
    limit = body.max_completion_tokens
    return ConversationRequest(
        messages=body.conversation(),
        answer_format=answer_format,
        variables=body.chat_template_kwargs,
        reasoning_effort=body.reasoning_effort,
        max_tokens=body.max_tokens if limit is None else limit,
        n=body.n or 1,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        template_options={
            "add_generation_prompt": body.add_generation_prompt is not False,
            "continue_final_message": bool(body.continue_final_message),
        },
    )


def _answer_format(body: ChatRequest) -> AnswerFormat:
    response_format, schema = body.response_format, None
    if isinstance(response_format, ObjectFormat):
        schema = ANY_OBJECT
    if isinstance(response_format, JSONSchemaFormat):
        schema = response_format.json_schema.schema_
    if body.uses_functions:
        return _functions_format(body, schema)
    choice = body.tool_choice
    return AnswerFormat(
        tools=[tool.tool() for tool in body.tools or ()],
        choice=choice.function.name if isinstance(choice, NamedChoice) else choice,
        parallel=body.parallel_tool_calls,
        schema=schema,
    )


def _functions_format(body: ChatRequest, schema: dict[str, Any] | None) -> AnswerFormat:
    """OpenAI's older `functions` and `function_call`, with one call in an answer."""
    if body.tools is not None or body.tool_choice is not None:
        raise RequestError(
            "functions and function_call are the older names of tools and tool_choice. Set those "
            "of one kind.",
            param="functions" if body.functions is not None else "function_call",
        )
    choice = body.function_call
    return AnswerFormat(
        tools=[function.tool() for function in body.functions or ()],
        choice=choice.name if isinstance(choice, FunctionName) else choice,
        parallel=False,
        schema=schema,
    )


class _ChatAnswer(Answer):
    id_prefix, chunk_object = "chatcmpl", "chat.completion.chunk"

    def __init__(
        self,
        context: ServerContext,
        body: ChatRequest,
        texts: RequestTexts,
        redactor: RequestRedactor,
        answer_format: AnswerFormat,
    ) -> None:
        super().__init__(
            context,
            body,
            texts,
            redactor,
            answer_format,
            begins_turn=body.begins_turn,
            n=body.n or 1,
        )
        self._facts, self._body = context.facts, body

    def _result(self) -> ChatCompletion:
        return ChatCompletion(
            **self._head,
            choices=[self._choice(choice) for choice in self._choices],
            usage=self._usage(),
            moaspec=self._extension_object(),
        )

    async def _events(self) -> AsyncGenerator[dict[str, Any]]:
        for choice in self._choices:
            yield self._chat_chunk(choice.index, {"role": "assistant", "content": ""})
        async for index, update in self._texts.updates():
            delta = self._choices[index].take(update)
            if delta.matters(logprobs=bool(self._body.logprobs)):
                yield self._delta_chunk(index, delta)
            if delta.finish_reason is not None:
                yield self._chat_chunk(index, {}, self._finish(delta.finish_reason))
        for chunk in self._usage_chunks(self._body.stream_options):
            yield chunk

    def _delta_chunk(self, index: int, delta: Delta) -> dict[str, Any]:
        fields: dict[str, Any] = {"content": delta.text} if delta.text else {}
        if delta.calls and self._body.uses_functions:
            fields["function_call"] = _tool_call(delta.calls[0][1]).function.model_dump()
        elif delta.calls:
            fields["tool_calls"] = [
                {"index": i, **_tool_call(call).model_dump()} for i, call in delta.calls
            ]
        chunk = self._chat_chunk(index, fields)
        if self._body.logprobs and delta.pieces:
            chunk["choices"][0]["logprobs"] = logprobs_of(self._facts, delta.pieces)
        if delta.moaspec is not None:
            chunk["moaspec"] = delta.moaspec
        return chunk

    def _chat_chunk(
        self, index: int, delta: dict[str, Any], finish: FinishReason | None = None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
        return self._chunk([choice])

    def _choice(self, choice: Choice) -> ChatChoice:
        calls = [_tool_call(call) for call in choice.calls]
        function_call = calls[0].function if calls and self._body.uses_functions else None
        return ChatChoice(
            index=choice.index,
            message=AnswerMessage(
                content=choice.text if choice.text or not calls else None,
                tool_calls=None if function_call else calls or None,
                function_call=function_call,
            ),
            logprobs=logprobs_of(self._facts, choice.pieces) if self._body.logprobs else None,
            finish_reason=self._finish(choice.finish_reason),
        )

    def _finish(self, reason: FinishReason | None) -> FinishReason | None:
        return "function_call" if reason == "tool_calls" and self._body.uses_functions else reason


def _tool_call(call: Call) -> ToolCall:
    return ToolCall(id=call.id, function=FunctionCall(name=call.name, arguments=call.arguments))


def logprobs_of(facts: SourceFacts, pieces: Sequence[Piece]) -> dict[str, Any]:
    """Log-probabilities in the format of chats."""
    content = []
    for piece in pieces:
        entry = partial(token_logprob, facts, begins_turn=piece.begins_turn)
        top = [entry(*alternative) for alternative in piece.top_logprobs]
        if not piece.hidden:
            content.append({**entry(piece.token_id, piece.logprob or 0.0), "top_logprobs": top})
    return {"content": content, "refusal": None}
