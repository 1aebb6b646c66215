"""The endpoints below /v1/responses."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

from fastapi import APIRouter, Request, Response

from moaspec.data.templates.call_reader import Call
from moaspec.serve import http_errors
from moaspec.serve.openai.answer import Answer
from moaspec.serve.openai.answer_format import ANY_OBJECT, AnswerFormat, ConversationRequest
from moaspec.serve.openai.choice import Delta
from moaspec.serve.openai.redaction import RequestRedactor
from moaspec.serve.openai.request_texts import RequestTexts
from moaspec.serve.openai.response_store import Messages, ResponseStore
from moaspec.serve.openai.responses_schema import (
    Deleted,
    IncompleteDetails,
    InputDetails,
    OutputCall,
    OutputDetails,
    OutputMessage,
    OutputText,
    ResponseObject,
    ResponseRequest,
    ResponseSchemaFormat,
    ResponseToolChoice,
    ResponseUsage,
)
from moaspec.serve.openai.schema import ObjectFormat
from moaspec.serve.openai.unsupported_fields import refuse_unsupported
from moaspec.serve.server_context import ServerContext, fresh_id


def router(context: ServerContext) -> APIRouter:
    """Create the router of the endpoints."""
    routes = APIRouter(prefix="/v1", responses=http_errors.responses())
    store = ResponseStore()

    @routes.post("/responses", response_model=ResponseObject, response_model_exclude_none=True)
    async def create_response(body: ResponseRequest, request: Request) -> Any:
        """Answer a conversation as a response."""
        context.check_model(body.model)
        refuse_unsupported(body)
        answer_format, tenant = _answer_format(body), request.state.tenant
        messages, redactor = _messages(body, store, tenant), context.redactor()
        system = [{"role": "system", "content": body.instructions}] if body.instructions else []
        conversation = ConversationRequest(
            messages=[*system, *messages],
            answer_format=answer_format,
            variables=body.chat_template_kwargs,
            reasoning_effort=body.reasoning.effort if body.reasoning else None,
            max_tokens=body.max_output_tokens,
        )
        jobs = await context.preparation.run(
            request, lambda: conversation.jobs(context, request, body, redactor)
        )

        def save(response: ResponseObject) -> None:
            if body.store is not False:
                store.add(tenant, response, [*messages, answer.message()])

        texts = context.decode(jobs, "responses")
        answer = _ResponseAnswer(context, body, texts, redactor, answer_format, save=save)
        return await answer.respond(request, stream=body.stream)

    @routes.get("/responses/{response_id}", response_model=ResponseObject)
    async def get_response(response_id: str, request: Request) -> Response:
        """Get a stored response."""
        stored = store.find(request.state.tenant, response_id)
        return Response(stored.response, media_type="application/json")

    @routes.delete("/responses/{response_id}")
    async def delete_response(response_id: str, request: Request) -> Deleted:
        """Delete a stored response."""
        store.remove(request.state.tenant, response_id)
        return Deleted(id=response_id)

    return routes


def _messages(body: ResponseRequest, store: ResponseStore, tenant: str) -> Messages:
    """Messages of the previous response and of the request."""
    messages = body.messages()
    if body.previous_response_id is None:
        return messages
    earlier = store.find(tenant, body.previous_response_id, param="previous_response_id")
    return [*earlier.messages, *messages]


def _answer_format(body: ResponseRequest) -> AnswerFormat:
    text_format, schema = body.text and body.text.format, None
    if isinstance(text_format, ObjectFormat):
        schema = ANY_OBJECT
    if isinstance(text_format, ResponseSchemaFormat):
        schema = text_format.schema_
    choice = body.tool_choice
    return AnswerFormat(
        tools=[tool.tool() for tool in body.tools or ()],
        choice=choice.name if isinstance(choice, ResponseToolChoice) else choice,
        parallel=body.parallel_tool_calls,
        schema=schema,
    )


class _ResponseAnswer(Answer):
    """One message, then calls.

    Args:
        save: receives the complete response.
    """

    id_prefix, named_events = "resp", True

    def __init__(
        self,
        context: ServerContext,
        body: ResponseRequest,
        texts: RequestTexts,
        redactor: RequestRedactor,
        answer_format: AnswerFormat,
        *,
        save: Callable[[ResponseObject], None],
    ) -> None:
        super().__init__(context, body, texts, redactor, answer_format, begins_turn=True)
        self._body, self._save, (self._choice,) = body, save, self._choices
        self._parallel = answer_format.allows_parallel(context)
        self._message_id = fresh_id("msg")
        self._calls: list[OutputCall] = []
        self._sequence_number = 0

    def _result(self) -> ResponseObject:
        self._calls = [_output_call(call) for call in self._choice.calls]
        response = self._response()
        self._save(response)
        return response

    async def _events(self) -> AsyncGenerator[dict[str, Any]]:
        for name in ("response.created", "response.in_progress"):
            yield self._event(name, response=_dumped(self._response(done=False)))
        in_message = False
        async for _, update in self._texts.updates():
            delta = self._choice.take(update)
            if not in_message and (delta.text or (delta.moaspec and not delta.calls)):
                in_message = True
                for event in self._message_started():
                    yield event
            if in_message and (delta.text or delta.moaspec):
                yield self._delta(delta)
            if delta.finish_reason is not None and in_message:
                for event in self._message_done():
                    yield event
                in_message = False
            for _, call in delta.calls:
                for event in self._call_events(call):
                    yield event
        response = self._response()
        self._save(response)
        yield self._event(f"response.{response.status}", response=_dumped(response))

    def message(self) -> dict[str, Any]:
        """The answer as a chat message."""
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
        part = OutputText(text="").model_dump()
        yield self._event("response.content_part.added", **self._location(), part=part)

    def _delta(self, delta: Delta) -> dict[str, Any]:
        fields = {} if delta.moaspec is None else {"moaspec": delta.moaspec}
        name = "response.output_text.delta"
        return self._event(name, **self._location(), delta=delta.text, logprobs=[], **fields)

    def _message_done(self) -> Iterator[dict[str, Any]]:
        text = self._choice.text
        yield self._event("response.output_text.done", **self._location(), text=text, logprobs=[])
        part = OutputText(text=text)
        yield self._event("response.content_part.done", **self._location(), part=part.model_dump())
        item = self._item(self._status, [part])
        yield self._event("response.output_item.done", output_index=0, item=item)

    def _call_events(self, call: Call) -> Iterator[dict[str, Any]]:
        """Events of a complete call, with all arguments in one delta."""
        item = _output_call(call)
        place = len(self._calls) + bool(self._choice.text)
        self._calls.append(item)
        added = {**item.model_dump(), "arguments": "", "status": "in_progress"}
        yield self._event("response.output_item.added", output_index=place, item=added)
        where = {"item_id": item.id, "output_index": place}
        name = "response.function_call_arguments"
        yield self._event(f"{name}.delta", **where, delta=call.arguments)
        yield self._event(f"{name}.done", **where, name=call.name, arguments=call.arguments)
        done = item.model_dump()
        yield self._event("response.output_item.done", output_index=place, item=done)

    @property
    def _status(self) -> Any:
        return "incomplete" if self._choice.finish_reason == "length" else "completed"

    def _item(self, status: Any, content: list[OutputText]) -> dict[str, Any]:
        return OutputMessage(id=self._message_id, status=status, content=content).model_dump()

    def _response(self, *, done: bool = True) -> ResponseObject:
        body, sampling = self._body, self._texts.jobs[0].sampling
        message = OutputMessage(
            id=self._message_id, status=self._status, content=[OutputText(text=self._choice.text)]
        )
        has_message = bool(self._choice.text) or not self._calls
        status: Any = self._status if done else "in_progress"
        text = body.text.model_dump(by_alias=True, exclude_none=True) if body.text else {}
        choice = body.tool_choice
        return ResponseObject(
            id=self._head["id"],
            created_at=self._head["created"],
            status=status,
            incomplete_details=(
                IncompleteDetails(reason="max_output_tokens") if status == "incomplete" else None
            ),
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            model=body.model,
            output=([message] if has_message else []) + self._calls if done else [],
            parallel_tool_calls=self._parallel,
            previous_response_id=body.previous_response_id,
            store=body.store is not False,
            temperature=sampling.temperature,
            text={"format": {"type": "text"}, **text},
            tool_choice=choice.model_dump()
            if isinstance(choice, ResponseToolChoice)
            else choice or "auto",
            tools=[tool.model_dump() for tool in body.tools or ()],
            top_p=sampling.top_p,
            usage=self._response_usage() if done else None,
            moaspec=self._extension_object() if done else None,
        )

    def _response_usage(self) -> ResponseUsage:
        usage = self._usage()
        return ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputDetails(
                cached_tokens=usage.prompt_tokens_details.cached_tokens
            ),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputDetails(),
            total_tokens=usage.total_tokens,
            speculation=usage.speculation.model_dump(),
        )


def _output_call(call: Call) -> OutputCall:
    return OutputCall(id=fresh_id("fc"), call_id=call.id, name=call.name, arguments=call.arguments)


def _dumped(response: ResponseObject) -> dict[str, Any]:
    """JSON of a response in events, without an absent extension."""
    dumped = response.model_dump()
    if dumped["moaspec"] is None:
        del dumped["moaspec"]
    return dumped
