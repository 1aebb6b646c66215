"""What a chat's answer must look like: free, JSON, calls; as a grammar, and as a reader of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from moaspec.data.templates.call_reader import CallReader
from moaspec.serve.http_errors import RequestError
from moaspec.serve.openai.call_grammar import Tool, call_grammar, lists_arguments
from moaspec.serve.openai.hiding import Asked
from moaspec.serve.server_context import ServerContext


@dataclass(frozen=True, kw_only=True)
class AnswerFormat:
    """The form of an answer.

    Attributes:
        tools: that the model knows of.
        choice: "none", "auto", "required", or the name of the tool to be called.
        parallel: whether there may be several calls; None: if the chat template takes them.
        schema: JSON schema of the answer; None: any text.
    """

    tools: Sequence[Tool] = ()
    choice: str | None = None
    parallel: bool | None = None
    schema: dict[str, Any] | None = None

    @property
    def callable_tools(self) -> list[Tool]:
        """Those that may be called in this answer."""
        if self.choice == "none":
            return []
        if self.choice in (None, "auto", "required"):
            return list(self.tools)
        found = [tool for tool in self.tools if tool.name == self.choice]
        if not found:
            raise RequestError(f"There is no tool {self.choice!r}.", param="tool_choice")
        return found

    def hidden(self, asked: Asked) -> AnswerFormat:
        """A form with the tools and the schema that the server may see."""
        schema = None if asked.schema is None else dict(asked.schema)
        return replace(self, tools=[Tool(tool) for tool in asked.tools], schema=schema)

    def allows_parallel(self, desk: ServerContext) -> bool:
        """Whether there may be several calls."""
        if self.parallel is None and self.tools and desk.template.exists:
            return desk.template.traits.takes_parallel_calls
        return self.parallel is not False

    def grammar(self, desk: ServerContext) -> str | None:
        """The grammar of all that; None for free text. May take seconds.

        Raises:
            InputError: a schema that cannot be used, or a choice without tools.
        """
        tools, forced = self.callable_tools, self.choice not in (None, "none", "auto")
        if forced and not tools:
            raise RequestError("tool_choice needs tools.", param="tool_choice")
        grammars = desk.facts.grammars
        form = desk.template.form
        guided = form.trigger and self.schema is None
        if form.tags:
            guided = guided and all(map(lists_arguments, tools))
        if tools and (forced or guided):
            text = call_grammar(
                form,
                tools,
                forced=forced,
                parallel=self.allows_parallel(desk),
                special=desk.template.special_marks,
            )
            return grammars.lark(text)
        return None if self.schema is None else grammars.json_schema(self.schema)

    def reader(self, desk: ServerContext) -> CallReader | None:
        """Reads calls out of one text."""
        functions = {tool.name: tool.parameters for tool in self.callable_tools}
        if not functions:
            return None
        return CallReader(desk.template.form, functions, parallel=self.allows_parallel(desk))


ANY_OBJECT: dict[str, Any] = {"type": "object"}
"""The schema of `json_object`."""
