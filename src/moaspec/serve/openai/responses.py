"""/v1/responses."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response

from moaspec.data.templates.call_reader import Call
from moaspec.serve import http_errors
from moaspec.serve.http_errors import RequestError
from moaspec.serve.openai.answer_format import ANY_OBJECT, AnswerFormat
from moaspec.serve.openai.choice import Choice, Delta, extension_of, usage
from moaspec.serve.openai.hiding import Asked, Hiding
from moaspec.serve.openai.request_texts import EventStream, RequestTexts, unless_left
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
from moaspec.serve.server_context import GenerationSpec, ServerContext, created_now, fresh_id
from moaspec.serve.sources.source import Job, first_to_go
from moaspec.support import limits

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class _Kept:
    """A response, and the conversation up to its end, as JSON: objects take many times as much."""

    tenant: str
    id: str
    response: bytes
    conversation: bytes

    @property
    def size(self) -> int:
        """Bytes of both texts."""
        return len(self.response) + len(self.conversation)

    @property
    def messages(self) -> Messages:
        """The conversation as chat messages."""
        messages: Messages = json.loads(self.conversation)
        return messages


class Archive:
    """The latest responses, so that later ones can go on from them. Tenants see their own only.

    Args:
        number: how many are kept.
        num_bytes: of all of them.
    """

    def __init__(
        self,
        number: int = limits.MAX_STORED_RESPONSES,
        num_bytes: int = limits.MAX_STORED_BYTES,
    ) -> None:
        self._number, self._num_bytes = number, num_bytes
        self._kept: dict[tuple[str, str], _Kept] = {}

    def keep(self, tenant: str, response: ResponseObject, messages: Messages) -> None:
        """Keep one; where that is too much, the oldest of the tenant who has most goes."""
        made = response.model_dump_json(exclude_none=True).encode()
        kept = _Kept(tenant, response.id, made, json.dumps(messages).encode())
        self._kept[tenant, response.id] = kept
        if len(self._kept) > self._number:
            self._let_go(lambda _: 1)
        while sum(one.size for one in self._kept.values()) > self._num_bytes:
            self._let_go(lambda one: one.size)

    def _let_go(self, size: Callable[[_Kept], int]) -> None:
        gone = first_to_go(list(self._kept.values()), lambda one: one.tenant, size)
        del self._kept[gone.tenant, gone.id]

    def find(self, tenant: str, name: str, *, param: str | None = None) -> _Kept:
        """A response that is still kept."""
        if (tenant, name) not in self._kept:
            raise RequestError(
                "There is no response of this id; the latest few are kept.",
                param=param,
                code="not_found",
                status=404,
            )
        return self._kept[tenant, name]

    def forget(self, tenant: str, name: str) -> None:
        """Let go of one."""
        self.find(tenant, name)
        del self._kept[tenant, name]


def router(desk: ServerContext) -> APIRouter:
    """The endpoints."""
    made = APIRouter(prefix="/v1", responses=http_errors.responses())
    archive = Archive()

    @made.post("/responses", response_model=ResponseObject, response_model_exclude_none=True)
    async def create_response(asked: ResponseRequest, request: Request) -> Any:
        """Answer a conversation."""
        desk.check_model(asked.model)
        refuse_unsupported(asked)
        form, tenant = _form(asked), request.state.tenant
        messages, hiding = _conversation(asked, archive, tenant), desk.hiding()
        jobs = await desk.preparation.run(
            request, lambda: _jobs(desk, asked, request, messages, form=form, hiding=hiding)
        )
        run = desk.run(jobs, "responses")
        answer = _ResponseAnswer(desk, asked, run, form, hiding)

        def keep(response: ResponseObject) -> None:
            if asked.store is not False:
                archive.keep(tenant, response, [*messages, answer.message()])

        if asked.stream:
            timeout_s = desk.settings.send_timeout_s
            return EventStream(run, answer.events(keep), named=True, send_timeout_s=timeout_s)
        return await unless_left(request, run, answer.whole(keep))

    @made.get("/responses/{response_id}", response_model=ResponseObject)
    async def get_response(response_id: str, request: Request) -> Response:
        """A response that was kept."""
        kept = archive.find(request.state.tenant, response_id)
        return Response(kept.response, media_type="application/json")

    @made.delete("/responses/{response_id}")
    async def delete_response(response_id: str, request: Request) -> Deleted:
        """Forget a response."""
        archive.forget(request.state.tenant, response_id)
        return Deleted(id=response_id)

    return made


def _conversation(asked: ResponseRequest, archive: Archive, tenant: str) -> Messages:
    """What came before, and what is new."""
    messages = asked.messages()
    if asked.previous_response_id is None:
        return messages
    earlier = archive.find(tenant, asked.previous_response_id, param="previous_response_id")
    return [*earlier.messages, *messages]


def _form(asked: ResponseRequest) -> AnswerFormat:
    wanted, schema = asked.text and asked.text.format, None
    if isinstance(wanted, ObjectFormat):
        schema = ANY_OBJECT
    if isinstance(wanted, ResponseSchemaFormat):
        schema = wanted.schema_
    choice = asked.tool_choice
    return AnswerFormat(
        tools=[one.tool() for one in asked.tools or ()],
        choice=choice.name if isinstance(choice, ResponseToolChoice) else choice,
        parallel=asked.parallel_tool_calls,
        schema=schema,
    )


def _jobs(
    desk: ServerContext,
    asked: ResponseRequest,
    request: Request,
    messages: Messages,
    *,
    form: AnswerFormat,
    hiding: Hiding,
) -> list[Job]:
    if asked.instructions:
        messages = [{"role": "system", "content": asked.instructions}, *messages]
    effort = asked.reasoning.effort if asked.reasoning else None
    hidden = hiding.hide(
        Asked(
            messages=desk.normal(messages),
            tools=[tool.given for tool in form.tools],
            schema=form.schema,
            variables=desk.variables(asked.chat_template_kwargs, effort),
            stop=asked.stop_strings,
        )
    )
    hiding.check_answer(logprobs=False, stop=hidden.stop)
    limit = asked.max_output_tokens
    prompt = desk.prompt(hidden, with_tools=form.choice != "none")
    order = GenerationSpec(
        max_tokens=desk.settings.default_max_tokens if limit is None else limit,
        grammar=form.hidden(hidden).grammar(desk),
        stop=hidden.stop,
    )
    return desk.jobs(request, asked, [prompt], order)


class _ResponseAnswer:
    """What is said of a run: one message, then calls."""

    def __init__(
        self,
        desk: ServerContext,
        asked: ResponseRequest,
        run: RequestTexts,
        form: AnswerFormat,
        hiding: Hiding,
    ) -> None:
        self._asked, self._run = asked, run
        self._parallel = form.allows_parallel(desk)
        self._choice = Choice(
            0,
            desk,
            run.jobs[0],
            run.tallies[0],
            asked=asked.extension,
            reader=form.reader(desk),
            begins_turn=True,
            hiding=hiding,
            as_json=form.schema is not None,
        )
        self._id, self._created = fresh_id("resp"), created_now()
        self._message_id = fresh_id("msg")
        self._calls: list[OutputCall] = []
        self._number = 0

    async def whole(self, keep: Any) -> ResponseObject:
        """All at once."""
        async for _, update in self._run.updates():
            self._calls += map(_output_call, (call for _, call in self._choice.take(update).calls))
        response = self._response()
        keep(response)
        return response

    async def events(self, keep: Any) -> AsyncGenerator[dict[str, Any]]:
        """Bodies of events, named by their type."""
        for name in ("response.created", "response.in_progress"):
            yield self._event(name, response=_dumped(self._response(done=False)))
        talking = False
        async for _, update in self._run.updates():
            delta = self._choice.take(update)
            if not talking and (delta.text or (delta.moaspec and not delta.calls)):
                talking = True
                for event in self._begin():
                    yield event
            if talking and (delta.text or delta.moaspec):
                yield self._delta(delta)
            if delta.finish_reason is not None and talking:
                for event in self._finish():
                    yield event
                talking = False
            for _, call in delta.calls:
                for event in self._called(call):
                    yield event
        response = self._response()
        keep(response)
        yield self._event(f"response.{response.status}", response=_dumped(response))

    def message(self) -> dict[str, Any]:
        """The answer as chat templates read it."""
        said: dict[str, Any] = {"role": "assistant", "content": self._choice.text}
        calls = [call.as_json() for call in self._choice.calls]
        return {**said, "tool_calls": calls} if calls else said

    def _event(self, name: str, /, **fields: Any) -> dict[str, Any]:
        event = {"type": name, "sequence_number": self._number, **fields}
        self._number += 1
        return event

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._message_id, "output_index": 0, "content_index": 0}

    def _begin(self) -> Iterator[dict[str, Any]]:
        item = self._item("in_progress", [])
        yield self._event("response.output_item.added", output_index=0, item=item)
        part = OutputText(text="").model_dump()
        yield self._event("response.content_part.added", **self._place(), part=part)

    def _delta(self, delta: Delta) -> dict[str, Any]:
        fields = {} if delta.moaspec is None else {"moaspec": delta.moaspec}
        name = "response.output_text.delta"
        return self._event(name, **self._place(), delta=delta.text, logprobs=[], **fields)

    def _finish(self) -> Iterator[dict[str, Any]]:
        text = self._choice.text
        yield self._event("response.output_text.done", **self._place(), text=text, logprobs=[])
        part = OutputText(text=text)
        yield self._event("response.content_part.done", **self._place(), part=part.model_dump())
        item = self._item(self._status, [part])
        yield self._event("response.output_item.done", output_index=0, item=item)

    def _called(self, call: Call) -> Iterator[dict[str, Any]]:
        """A call is announced when it is complete; its arguments come in one piece."""
        item = _output_call(call)
        place = len(self._calls) + bool(self._choice.text)
        self._calls.append(item)
        begun = {**item.model_dump(), "arguments": "", "status": "in_progress"}
        yield self._event("response.output_item.added", output_index=place, item=begun)
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
        asked, sampling = self._asked, self._run.jobs[0].sampling
        said = OutputMessage(
            id=self._message_id, status=self._status, content=[OutputText(text=self._choice.text)]
        )
        spoke = bool(self._choice.text) or not self._calls
        status: Any = self._status if done else "in_progress"
        text = asked.text.model_dump(by_alias=True, exclude_none=True) if asked.text else {}
        choice = asked.tool_choice
        return ResponseObject(
            id=self._id,
            created_at=self._created,
            status=status,
            incomplete_details=(
                IncompleteDetails(reason="max_output_tokens") if status == "incomplete" else None
            ),
            instructions=asked.instructions,
            max_output_tokens=asked.max_output_tokens,
            model=asked.model,
            output=([said] if spoke else []) + self._calls if done else [],
            parallel_tool_calls=self._parallel,
            previous_response_id=asked.previous_response_id,
            store=asked.store is not False,
            temperature=sampling.temperature,
            text={"format": {"type": "text"}, **text},
            tool_choice=choice.model_dump()
            if isinstance(choice, ResponseToolChoice)
            else choice or "auto",
            tools=[tool.model_dump() for tool in asked.tools or ()],
            top_p=sampling.top_p,
            usage=self._usage() if done else None,
            moaspec=extension_of(asked.moaspec, [self._choice]) if done else None,
        )

    def _usage(self) -> ResponseUsage:
        counted = usage(self._run.jobs, self._run.tallies, 1)
        return ResponseUsage(
            input_tokens=counted.prompt_tokens,
            input_tokens_details=InputDetails(
                cached_tokens=counted.prompt_tokens_details.cached_tokens
            ),
            output_tokens=counted.completion_tokens,
            output_tokens_details=OutputDetails(),
            total_tokens=counted.total_tokens,
            speculation=counted.speculation.model_dump(),
        )


def _output_call(call: Call) -> OutputCall:
    return OutputCall(id=fresh_id("fc"), call_id=call.id, name=call.name, arguments=call.arguments)


def _dumped(response: ResponseObject) -> dict[str, Any]:
    """As events carry it: without the extension where nobody asked for it."""
    dumped = response.model_dump()
    if dumped["moaspec"] is None:
        del dumped["moaspec"]
    return dumped
