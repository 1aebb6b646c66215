"""A chat or response request in the form that both endpoints share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fastapi import Request
from pydantic import BaseModel

from moaspec_core.chat.call_reader import CallReader
from moaspec_core.chat.messages import Message, normal_tool
from moaspec_core.errors import InputError
from moaspec_core.sampling.endless_schemas import check_ends
from moaspec_core.sampling.grammar import json_grammar, lark_grammar
from moaspec_core.sampling.schema_values import readable
from moaspec_serve.http_errors import RequestError
from moaspec_serve.openai.call_grammar import Function, call_grammar, lists_arguments
from moaspec_serve.openai.schema import GenerationRequest
from moaspec_serve.sources.source import Job

if TYPE_CHECKING:
    from moaspec_serve.openai.redaction import RequestRedactor
    from moaspec_serve.server_context import ServerContext

ANY_OBJECT: dict[str, Any] = {"type": "object"}  # the schema of `json_object`


@dataclass(frozen=True, kw_only=True)
class ChatInput:
    """A conversation and the format of its answer: free text, JSON or tool calls."""

    messages: Sequence[Message]  # normalised messages
    tools: Sequence[Mapping[str, Any]] = ()  # tools that the prompt describes, in the normal form
    choice: str | None = None  # "none", "auto", "required", or the name of the tool to call
    # Whether several calls are allowed; None: if the chat template supports them.
    parallel: bool | None = None
    schema: dict[str, Any] | None = None  # JSON schema of the answer; None allows any text
    variables: Mapping[str, Any] | None = None
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None  # maximum length of the answer; None takes the server's default
    # Number of alternatives to report; None reports no log-probabilities.
    logprobs: int | None = None
    return_ids: bool = False  # whether to report token ids
    # See `ChatTemplate.rendered`.
    template_options: Mapping[str, bool] = field(default_factory=dict)

    @property
    def callable_functions(self) -> list[Function]:
        functions = [tool["function"] for tool in self.tools if self.choice != "none"]
        if self.choice in (None, "none", "auto", "required"):
            return functions
        found = [function for function in functions if function["name"] == self.choice]
        if not found:
            raise RequestError(f"There is no tool {self.choice!r}.", param="tool_choice")
        return found

    @property
    def forced(self) -> bool:
        """Whether the answer consists of calls only."""
        return self.choice not in (None, "none", "auto")

    def allows_parallel(self, context: ServerContext) -> bool:
        if self.forced and self.choice != "required":
            return False  # the one call that the request names
        if self.parallel is None and self.tools and context.template.exists:
            return context.template.traits.takes_parallel_calls
        return self.parallel is not False

    def grammar(self, context: ServerContext) -> str | None:
        """Text of the answer's grammar, which is not compiled here; None for free text.

        Raises:
            InputError: an unsupported schema, or a tool choice without tools.
        """
        tools, forced = list(map(_readable, self.callable_functions)), self.forced
        if forced and not tools:
            raise RequestError("tool_choice needs tools.", param="tool_choice")
        form = context.template.form
        guided = form.trigger and self.schema is None
        if form.tags:
            guided = guided and all(map(lists_arguments, tools))
        if tools and (forced or guided):
            text = call_grammar(
                form,
                tools,
                forced=forced,
                parallel=self.allows_parallel(context),
                special=context.template.special_marks,
            )
            return lark_grammar(text)
        return None if self.schema is None else json_grammar(self.schema)

    def reader(self, context: ServerContext) -> CallReader | None:
        """A reader of the calls in one text; None without callable tools."""
        functions = {tool["name"]: tool["parameters"] for tool in self.callable_functions}
        if not functions:
            return None
        return CallReader(
            context.template.form,
            functions,
            parallel=self.allows_parallel(context),
            forced=self.forced,
        )

    def prepared(self, context: ServerContext, redactor: RequestRedactor) -> PreparedChat:
        """Redact and tokenise the conversation."""
        hidden = redactor.hide(self)
        redactor.check_answer(
            logprobs=self.logprobs is not None, ids=self.return_ids, stop=hidden.stop
        )
        prompt_ids = context.prompt(hidden)
        return PreparedChat(self, prompt_ids, hidden.stop, hidden.grammar(context))


@dataclass(frozen=True)
class PreparedChat:
    """A conversation without private text, in tokens."""

    chat: ChatInput  # as the client sent it
    prompt_ids: list[int]
    stop: tuple[str, ...]
    grammar: str | None  # see `ChatInput.grammar`

    async def jobs(
        self, context: ServerContext, request: Request, body: GenerationRequest
    ) -> list[Job]:
        """Compile the grammar, and make a job for every choice."""
        return context.jobs(
            request,
            body,
            [self.prompt_ids],
            max_tokens=context.max_tokens(body, self.chat.max_tokens),
            logprobs=self.chat.logprobs,
            grammar=await context.compiled(request, self.grammar),
            stop=self.stop,
        )


def _readable(tool: Function) -> Function:
    """A tool whose schema a grammar can follow; RequestError names the tool."""
    try:
        check_ends(tool["parameters"])
        return {**tool, "parameters": readable(tool["parameters"])}
    except InputError as error:
        raise RequestError(f"Tool {tool['name']!r}: {error}", param="tools") from error


def normal_tools(tools: Iterable[BaseModel] | None) -> list[dict[str, Any]]:
    """Tools of a request in the normal form.

    Raises:
        RequestError: two have one name, so that a call would not say which it means, or one takes
            no object.
    """
    normal = [normal_tool(tool.model_dump(exclude_none=True)) for tool in tools or ()]
    names: set[str] = set()
    for tool in normal:
        name = tool["function"]["name"]
        if name in names:
            raise RequestError(f"Two tools have the name {name!r}.", param="tools")
        names.add(name)
        kind = tool["function"]["parameters"].get("type", "object")
        if "object" not in (kind if isinstance(kind, list) else [kind]):
            raise RequestError(
                f"Tool {name!r}: its parameters have the type {kind!r:.50}, but the arguments of a "
                'call are an object. Describe them as properties of {"type": "object"}.',
                param="tools",
            )
    return normal
