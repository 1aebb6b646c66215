"""Request body of /v1/responses."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field

from moaspec_core.chat.call_reader import Call
from moaspec_core.support import limits
from moaspec_serve.openai.chat_schema import ToolName
from moaspec_serve.openai.schema import (
    GenerationRequest,
    JsonObject,
    Name,
    ObjectFormat,
    ReasoningEffort,
    RequestModel,
    SchemaFormat,
    TextFormat,
    Variables,
)


class InputText(RequestModel):
    type: Literal["input_text", "output_text"]
    text: str


class InputMessage(RequestModel):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Annotated[list[InputText], Field(max_length=limits.MAX_PARTS, fail_fast=True)]


class InputCall(RequestModel):
    type: Literal["function_call"]
    call_id: str
    name: ToolName
    arguments: str


class InputCallOutput(RequestModel):
    type: Literal["function_call_output"]
    call_id: str
    output: str | Annotated[list[InputText], Field(max_length=limits.MAX_PARTS, fail_fast=True)]


InputItem = InputMessage | InputCall | InputCallOutput


class ResponseTool(RequestModel):
    """A function that the model may call. Chat templates may read extra fields."""

    model_config = ConfigDict(extra="allow")

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class ResponseToolChoice(RequestModel):
    """A tool choice that requires one function."""

    type: Literal["function"]
    name: ToolName


class ResponseSchemaFormat(SchemaFormat):
    type: Literal["json_schema"]
    name: Name


class Reasoning(RequestModel):
    """The reasoning effort, for chat templates that read it."""

    effort: ReasoningEffort | None = None


class ResponseText(RequestModel):
    verbosity: Literal["medium"] | None = None

    format: (
        Annotated[TextFormat | ObjectFormat | ResponseSchemaFormat, Field(discriminator="type")]
        | None
    ) = None


INCLUDABLE = frozenset(
    (
        *("file_search_call.results", "web_search_call.results", "web_search_call.action.sources"),
        *("computer_call_output.output.image_url", "code_interpreter_call.outputs"),
        *("message.input_image.image_url", "reasoning.encrypted_content"),
    )
)
"""Values of `include` that concern OpenAI's own tools and models, which do not exist here."""


def _can_be_included(name: str) -> str:
    if name == "message.output_text.logprobs":
        raise ValueError("responses have no logprobs here")
    if name not in INCLUDABLE:
        raise ValueError(f"{name!r:.50} is none of {', '.join(sorted(INCLUDABLE))}")
    return name


Included = Annotated[str, AfterValidator(_can_be_included)]


class ResponseRequest(GenerationRequest):
    """Request body of /v1/responses."""

    input: str | Annotated[list[InputItem], Field(min_length=1, max_length=limits.MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=0)] | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    text: ResponseText | None = None
    include: list[Included] | None = None
    truncation: Literal["auto", "disabled"] | None = None  # nothing is cut here
    reasoning: Reasoning | None = None
    tools: (
        Annotated[list[ResponseTool], Field(max_length=limits.MAX_TOOLS, fail_fast=True)] | None
    ) = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Variables | None = None

    def messages(self) -> list[dict[str, Any]]:
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        messages: list[dict[str, Any]] = []
        for item in self.input:
            _append(messages, item)
        return messages


def _append(messages: list[dict[str, Any]], item: InputItem) -> None:
    """Append an item. Consecutive calls share one message."""
    if isinstance(item, InputMessage):
        messages.append({"role": item.role, "content": _content(item.content)})
    elif isinstance(item, InputCallOutput):
        output = _content(item.output)
        messages.append({"role": "tool", "content": output, "tool_call_id": item.call_id})
    else:
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        messages[-1].setdefault("tool_calls", []).append(
            Call(item.name, item.arguments, item.call_id).as_json()
        )


def _content(content: str | list[InputText]) -> str | list[dict[str, Any]]:
    return content if isinstance(content, str) else [part.model_dump() for part in content]
