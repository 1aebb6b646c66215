"""The chat endpoint, /v1/chat/completions."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from moaspec_serve import http_errors
from moaspec_serve.http_errors import RequestError
from moaspec_serve.openai.answer import STREAMED, ChoicesAnswer
from moaspec_serve.openai.chat_input import ANY_OBJECT, ChatInput, PreparedChat, normal_tools
from moaspec_serve.openai.chat_schema import ChatRequest, FunctionName, NamedChoice
from moaspec_serve.openai.choice import Choice, Delta, token_logprob
from moaspec_serve.openai.schema import JSONSchemaFormat, ObjectFormat
from moaspec_serve.server_context import ServerContext
from moaspec_serve.sources.source import SourceInfo
from moaspec_serve.sources.text_writer import Piece


def router(context: ServerContext) -> APIRouter:
    """Create the router of the endpoint."""
    routes = APIRouter(prefix="/v1", responses=http_errors.responses())

    @routes.post("/chat/completions", responses=STREAMED)
    async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation as a chat completion."""
        context.check(body)
        redactor = context.redactor()

        def prepare() -> PreparedChat:
            return _chat_input(context, body).prepared(context, redactor)

        prepared = await context.preparation.run(request, prepare)
        jobs = await prepared.jobs(context, request, body)
        return await _ChatAnswer(context, body, jobs, redactor, prepared.chat).respond(request)

    return routes


def _chat_input(context: ServerContext, body: ChatRequest) -> ChatInput:
    response_format, schema, older = body.response_format, None, body.uses_functions
    if isinstance(response_format, ObjectFormat):
        schema = ANY_OBJECT
    if isinstance(response_format, JSONSchemaFormat):
        schema = response_format.json_schema.schema_
    if older and (body.tools is not None or body.tool_choice is not None):
        raise RequestError(
            "functions and function_call are the older names of tools and tool_choice. Set those "
            "of one kind.",
            param="functions" if body.functions is not None else "function_call",
        )
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs: true.", param="top_logprobs")
    if body.continue_final_message and body.add_generation_prompt:
        raise RequestError(
            "continue_final_message goes on with the last message, add_generation_prompt begins a "
            "new one. Set one of them.",
            param="continue_final_message",
        )
    choice, limit = body.function_call if older else body.tool_choice, body.max_completion_tokens
    if isinstance(choice, NamedChoice):
        choice = choice.function
    return ChatInput(
        messages=context.normal(body.conversation()),
        tools=normal_tools(body.functions if older else body.tools),
        choice=choice.name if isinstance(choice, FunctionName) else choice,
        parallel=False if older else body.parallel_tool_calls,  # the older form has one call
        schema=schema,
        variables=context.variables(body.chat_template_kwargs, body.reasoning_effort),
        stop=body.stop_strings,
        max_tokens=body.max_tokens if limit is None else limit,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        return_ids=bool(body.return_token_ids),
        template_options={
            "add_generation_prompt": body.add_generation_prompt is not False,
            "continue_final_message": bool(body.continue_final_message),
        },
    )


class _ChatAnswer(ChoicesAnswer[ChatRequest]):
    endpoint, id_prefix, whole_object = "chat", "chatcmpl", "chat.completion"
    chunk_object = "chat.completion.chunk"

    def _first_events(self) -> Iterator[dict[str, Any]]:
        prompt_ids = self._prompt_ids(0)
        for choice in self._choices:
            part = _part(choice.index, {"role": "assistant", "content": ""})
            yield {**self._chunk(part), **prompt_ids}
            prompt_ids = {}

    def _result(self) -> dict[str, Any]:
        return {**super()._result(), **self._prompt_ids(0)}

    def _delta_events(self, delta: Delta) -> Iterator[dict[str, Any]]:
        ids = bool(self._body.return_token_ids)
        if delta.matters(logprobs=bool(self._body.logprobs), ids=ids):
            content = {"content": delta.text} if delta.text else {}
            part = _part(delta.index, {**content, **self._called(delta)})
            part |= self._ids(delta.token_ids)
            part["logprobs"] = self._logprobs(delta.pieces) if delta.pieces else None
            yield self._chunk(part, delta=delta)
        if delta.finish_reason is not None:
            yield self._chunk(_part(delta.index, {}, self._finish(delta.finish_reason)))

    def _called(self, delta: Delta) -> dict[str, Any]:
        if delta.calls and self._body.uses_functions:
            return {"function_call": delta.calls[0][1].as_json()["function"]}
        calls = [{"index": i, **call.as_json()} for i, call in delta.calls]
        return {"tool_calls": calls} if calls else {}

    def _choice(self, choice: Choice) -> dict[str, Any]:
        calls = [call.as_json() for call in choice.calls]
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if calls:
            message["content"] = choice.text or None
            older = self._body.uses_functions
            message |= {"function_call": calls[0]["function"]} if older else {"tool_calls": calls}
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs(choice.pieces),
            "finish_reason": self._finish(choice.finish_reason),
            **self._ids(choice.token_ids),
        }

    def _logprobs(self, pieces: Sequence[Piece]) -> dict[str, Any] | None:
        return logprobs_of(self._context.info, pieces) if self._body.logprobs else None

    def _finish(self, reason: str | None) -> str | None:
        return "function_call" if reason == "tool_calls" and self._body.uses_functions else reason


def _part(index: int, delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}


def logprobs_of(info: SourceInfo, pieces: Sequence[Piece]) -> dict[str, Any]:
    """Log-probabilities in the format of chats."""
    content = []
    for piece in pieces:
        entry = partial(token_logprob, info, begins_turn=piece.begins_turn)
        top = [entry(*alternative) for alternative in piece.top_logprobs]
        if not piece.hidden:
            content.append({**entry(piece.token_id, piece.logprob or 0.0), "top_logprobs": top})
    return {"content": content, "refusal": None}
