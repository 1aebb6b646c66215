"""The endpoints below /v1/responses."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from moaspec_core.chat.call_reader import Call
from moaspec_serve import http_errors
from moaspec_serve.openai.answer import STREAMED, Answer
from moaspec_serve.openai.chat_input import ANY_OBJECT, ChatInput, PreparedChat, normal_tools
from moaspec_serve.openai.choice import Delta
from moaspec_serve.openai.redaction import RequestRedactor
from moaspec_serve.openai.responses.response_store import Messages, ResponseStore
from moaspec_serve.openai.responses.responses_schema import (
    ResponseRequest,
    ResponseSchemaFormat,
    ResponseToolChoice,
)
from moaspec_serve.openai.schema import ObjectFormat
from moaspec_serve.server_context import ServerContext, fresh_id
from moaspec_serve.sources.source import Job


def router(context: ServerContext) -> APIRouter:
    """Create the router of the endpoints."""
    routes = APIRouter(prefix="/v1", responses=http_errors.responses())
    store = ResponseStore()

    @routes.post("/responses", responses=STREAMED)
    async def create_response(body: ResponseRequest, request: Request) -> Response:
        """Answer a conversation as a response."""
        context.check(body)
        tenant, redactor = request.state.tenant, context.redactor()
        messages = _messages(body, store, tenant)

        def prepare() -> PreparedChat:
            return _chat_input(context, body, messages).prepared(context, redactor)

        prepared = await context.preparation.run(request, prepare)
        jobs = await prepared.jobs(context, request, body)

        def save(response: dict[str, Any]) -> None:
            if body.store is not False:
                store.add(tenant, response, [*messages, answer.message()])

        answer = _ResponseAnswer(context, body, jobs, redactor, prepared.chat, save=save)
        return await answer.respond(request)

    @routes.get("/responses/{response_id}")
    async def get_response(response_id: str, request: Request) -> Response:
        """Get a stored response."""
        stored = store.find(request.state.tenant, response_id)
        return Response(stored.response, media_type="application/json")

    @routes.delete("/responses/{response_id}")
    async def delete_response(response_id: str, request: Request) -> dict[str, Any]:
        """Delete a stored response."""
        store.remove(request.state.tenant, response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    return routes


def _messages(body: ResponseRequest, store: ResponseStore, tenant: str) -> Messages:
    """Messages of the previous response and of the request."""
    messages = body.messages()
    if body.previous_response_id is None:
        return messages
    earlier = store.find(tenant, body.previous_response_id, param="previous_response_id")
    return [*earlier.messages, *messages]


def _chat_input(context: ServerContext, body: ResponseRequest, messages: Messages) -> ChatInput:
    text_format, schema = body.text and body.text.format, None
    if isinstance(text_format, ObjectFormat):
        schema = ANY_OBJECT
    if isinstance(text_format, ResponseSchemaFormat):
        schema = text_format.schema_
    system = [{"role": "system", "content": body.instructions}] if body.instructions else []
    choice, effort = body.tool_choice, body.reasoning.effort if body.reasoning else None
    return ChatInput(
        messages=context.normal([*system, *messages]),
        tools=normal_tools(body.tools),
        choice=choice.name if isinstance(choice, ResponseToolChoice) else choice,
        parallel=body.parallel_tool_calls,
        schema=schema,
        variables=context.variables(body.chat_template_kwargs, effort),
        stop=body.stop_strings,
        max_tokens=body.max_output_tokens,
    )


class _ResponseAnswer(Answer[ResponseRequest]):
    """One message, then calls. `save` receives the complete response."""

    endpoint, id_prefix, named_events = "responses", "resp", True

    def __init__(
        self,
        context: ServerContext,
        body: ResponseRequest,
        jobs: Sequence[Job],
        redactor: RequestRedactor,
        chat: ChatInput,
        *,
        save: Callable[[dict[str, Any]], None],
    ) -> None:
        super().__init__(context, body, jobs, redactor, chat)
        self._save, (self._choice,) = save, self._choices
        self._parallel = chat.allows_parallel(context)
        self._message_id = fresh_id("msg")
        self._calls: list[dict[str, Any]] = []
        self._sequence_number, self._in_message = 0, False

    def _result(self) -> dict[str, Any]:
        self._calls = [_output_call(call) for call in self._choice.calls]
        return self._saved()

    def _saved(self) -> dict[str, Any]:
        response = self._response()
        self._save(response)
        return response

    def _first_events(self) -> Iterator[dict[str, Any]]:
        for name in ("response.created", "response.in_progress"):
            yield self._event(name, response=self._response(done=False))

    def _delta_events(self, delta: Delta) -> Iterator[dict[str, Any]]:
        if not self._in_message and (delta.text or (delta.moaspec and not delta.calls)):
            self._in_message = True
            yield from self._message_started()
        if self._in_message and (delta.text or delta.moaspec):
            yield self._delta(delta)
        if self._in_message and delta.finish_reason is not None:
            yield from self._message_done()
        for _, call in delta.calls:
            yield from self._call_events(call)

    def _last_events(self) -> Iterator[dict[str, Any]]:
        response = self._saved()
        yield self._event(f"response.{response['status']}", response=response)

    def message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self._choice.text}
        calls = [call.as_json() for call in self._choice.calls]
        return {**message, "tool_calls": calls} if calls else message

    def _event(self, name: str, /, **fields: Any) -> dict[str, Any]:
        event = {"type": name, "sequence_number": self._sequence_number, **fields}
        self._sequence_number += 1
        return event

    def _location(self) -> dict[str, Any]:
        return {"item_id": self._message_id, "output_index": 0, "content_index": 0}

    def _message_started(self) -> Iterator[dict[str, Any]]:
        item = self._item("in_progress", [])
        yield self._event("response.output_item.added", output_index=0, item=item)
        part = _output_text("")
        yield self._event("response.content_part.added", **self._location(), part=part)

    def _delta(self, delta: Delta) -> dict[str, Any]:
        fields = {} if delta.moaspec is None else {"moaspec": delta.moaspec}
        name = "response.output_text.delta"
        return self._event(name, **self._location(), delta=delta.text, logprobs=[], **fields)

    def _message_done(self) -> Iterator[dict[str, Any]]:
        text = self._choice.text
        yield self._event("response.output_text.done", **self._location(), text=text, logprobs=[])
        part = _output_text(text)
        yield self._event("response.content_part.done", **self._location(), part=part)
        item = self._item(self._status, [part])
        yield self._event("response.output_item.done", output_index=0, item=item)

    def _call_events(self, call: Call) -> Iterator[dict[str, Any]]:
        """Events of a complete call, with all arguments in one delta."""
        item = _output_call(call)
        place = len(self._calls) + bool(self._choice.text)
        self._calls.append(item)
        added = {**item, "arguments": "", "status": "in_progress"}
        yield self._event("response.output_item.added", output_index=place, item=added)
        where = {"item_id": item["id"], "output_index": place}
        name = "response.function_call_arguments"
        yield self._event(f"{name}.delta", **where, delta=call.arguments)
        yield self._event(f"{name}.done", **where, name=call.name, arguments=call.arguments)
        yield self._event("response.output_item.done", output_index=place, item=item)

    @property
    def _status(self) -> str:
        return "incomplete" if self._choice.finish_reason == "length" else "completed"

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        item = {"id": self._message_id, "type": "message", "status": status}
        return {**item, "role": "assistant", "content": content}

    def _response(self, *, done: bool = True) -> dict[str, Any]:
        body, sampling = self._body, self._jobs[0].sampling
        message = self._item(self._status, [_output_text(self._choice.text)])
        has_message = bool(self._choice.text) or not self._calls
        status = self._status if done else "in_progress"
        text = body.text.model_dump(by_alias=True, exclude_none=True) if body.text else {}
        choice = body.tool_choice
        extension = self._extension_object() if done else None
        return {
            "id": self._head["id"],
            "object": "response",
            "created_at": self._head["created"],
            "status": status,
            "error": None,
            "incomplete_details": (
                {"reason": "max_output_tokens"} if status == "incomplete" else None
            ),
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": {},
            "model": body.model,
            "output": ([message] if has_message else []) + self._calls if done else [],
            "parallel_tool_calls": self._parallel,
            "previous_response_id": body.previous_response_id,
            "store": body.store is not False,
            "temperature": sampling.temperature,
            "text": {"format": {"type": "text"}, **text},
            "tool_choice": (
                choice.model_dump() if isinstance(choice, ResponseToolChoice) else choice or "auto"
            ),
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": self._response_usage() if done else None,
            **({} if extension is None else {"moaspec": extension}),
        }

    def _response_usage(self) -> dict[str, Any]:
        usage = self._usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
            "speculation": usage["speculation"],
        }


def _output_text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _output_call(call: Call) -> dict[str, Any]:
    item = {"id": fresh_id("fc"), "type": "function_call", "status": "completed"}
    return {**item, "call_id": call.id, "name": call.name, "arguments": call.arguments}
