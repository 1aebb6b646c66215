"""Format of a chat answer: free text, JSON or tool calls; its grammar and its reader."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import Request

from moaspec.data.messages import Message
from moaspec.data.templates.call_reader import CallReader
from moaspec.serve.http_errors import RequestError
from moaspec.serve.openai.call_grammar import Tool, call_grammar, lists_arguments
from moaspec.serve.openai.redaction import ChatInput, RequestRedactor
from moaspec.serve.openai.schema import GenerationRequest
from moaspec.serve.server_context import ServerContext
from moaspec.serve.sources.source import Job


@dataclass(frozen=True, kw_only=True)
class AnswerFormat:
    """Format of an answer.

    Attributes:
        tools: tools that the prompt describes.
        choice: "none", "auto", "required", or the name of the tool to call.
        parallel: whether several calls are allowed; None: if the chat template supports them.
        schema: JSON schema of the answer; None allows any text.
    """

    tools: Sequence[Tool] = ()
    choice: str | None = None
    parallel: bool | None = None
    schema: dict[str, Any] | None = None

    @property
    def callable_tools(self) -> list[Tool]:
        """Tools that this answer may call."""
        if self.choice == "none":
            return []
        if self.choice in (None, "auto", "required"):
            return list(self.tools)
        found = [tool for tool in self.tools if tool.name == self.choice]
        if not found:
            raise RequestError(f"There is no tool {self.choice!r}.", param="tool_choice")
        return found

    def redacted(self, chat: ChatInput) -> AnswerFormat:
        """The format with the redacted tools and schema of a request."""
        schema = None if chat.schema is None else dict(chat.schema)
        return replace(self, tools=[Tool(tool) for tool in chat.tools], schema=schema)

    def allows_parallel(self, context: ServerContext) -> bool:
        """Whether the answer may have several calls."""
        if self.parallel is None and self.tools and context.template.exists:
            return context.template.traits.takes_parallel_calls
        return self.parallel is not False

    def grammar(self, context: ServerContext) -> str | None:
        """Grammar of the format; None for free text. Compilation may take seconds.

        Raises:
            InputError: an unsupported schema, or a tool choice without tools.
        """
        tools, forced = self.callable_tools, self.choice not in (None, "none", "auto")
        if forced and not tools:
            raise RequestError("tool_choice needs tools.", param="tool_choice")
        grammars = context.facts.grammars
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
            return grammars.lark(text)
        return None if self.schema is None else grammars.json_schema(self.schema)

    def reader(self, context: ServerContext) -> CallReader | None:
        """A reader of the calls in one text; None without callable tools."""
        functions = {tool.name: tool.parameters for tool in self.callable_tools}
        if not functions:
            return None
        return CallReader(context.template.form, functions, parallel=self.allows_parallel(context))


ANY_OBJECT: dict[str, Any] = {"type": "object"}
"""The schema of `json_object`."""


@dataclass(frozen=True, kw_only=True)
class ConversationRequest:
    """A chat or response request in the form that both endpoints share.

    Attributes:
        messages: messages in OpenAI's format.
        answer_format: format of the answer.
        variables: variables of the chat template.
        reasoning_effort: OpenAI's field of this name.
        max_tokens: maximum length of the answer; None takes the server's default.
        n: number of choices.
        logprobs: number of alternatives to report; None reports no log-probabilities.
        template_options: see `ChatTemplate.rendered`.
    """

    messages: Sequence[Message]
    answer_format: AnswerFormat
    variables: Mapping[str, Any] | None = None
    reasoning_effort: str | None = None
    max_tokens: int | None = None
    n: int = 1
    logprobs: int | None = None
    template_options: Mapping[str, bool] = field(default_factory=dict)

    def jobs(
        self,
        context: ServerContext,
        request: Request,
        body: GenerationRequest,
        redactor: RequestRedactor,
    ) -> list[Job]:
        """Redact and tokenise the conversation, and make a job for every choice."""
        answer_format, limit = self.answer_format, self.max_tokens
        chat = redactor.hide(
            ChatInput(
                messages=context.normal(self.messages),
                tools=[tool.given for tool in answer_format.tools],
                schema=answer_format.schema,
                variables=context.variables(self.variables, self.reasoning_effort),
                stop=body.stop_strings,
            )
        )
        redactor.check_answer(logprobs=self.logprobs is not None, stop=chat.stop)
        with_tools = answer_format.choice != "none"
        prompt = context.prompt(chat, with_tools=with_tools, **self.template_options)
        return context.jobs(
            request,
            body,
            [prompt],
            max_tokens=context.settings.default_max_tokens if limit is None else limit,
            n=self.n,
            logprobs=self.logprobs,
            grammar=answer_format.redacted(chat).grammar(context),
            stop=chat.stop,
        )
