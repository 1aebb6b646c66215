"""Request body of /v1/chat/completions."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, StringConstraints

from moaspec_core.support import limits
from moaspec_serve.openai.schema import (
    ChoicesRequest,
    JsonObject,
    ReasoningEffort,
    RequestModel,
    ResponseFormat,
    Variables,
)

ToolName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class TextPart(RequestModel):
    """A text part of a message. Images and audio are not supported."""

    type: Literal["text"]
    text: str


Content = str | Annotated[list[TextPart], Field(max_length=limits.MAX_PARTS, fail_fast=True)]


def _unset(value: Any) -> None:
    """Refuse a field that would change the answer; false, null and empty values would not."""
    if value:
        raise ValueError(
            "the field is not supported, and it would change the answer. Leave it out; to go on "
            "with the last message, set continue_final_message"
        )


Unset = Annotated[Any, AfterValidator(_unset), Field(exclude=True)]


class _Message(RequestModel):
    """Fields of messages of Ollama, Mistral, DeepSeek and Qwen that are not supported."""

    images: Unset = None
    prefix: Unset = None
    partial: Unset = None


class GivenMessage(_Message):
    role: Literal["system", "developer", "user"]
    content: Content
    name: str | None = None


class FunctionCall(RequestModel):
    name: ToolName
    arguments: str


class ToolCall(RequestModel):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class AssistantMessage(_Message):
    role: Literal["assistant"]
    content: Content | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    audio: None = None
    function_call: FunctionCall | None = None
    tool_calls: (
        Annotated[list[ToolCall], Field(max_length=limits.MAX_CALLS, fail_fast=True)] | None
    ) = None


class ToolMessage(_Message):
    role: Literal["tool"]
    content: Content
    tool_call_id: str


class FunctionMessage(_Message):
    """The result of a call in OpenAI's older format."""

    role: Literal["function"]
    content: Content | None = None
    name: ToolName


ChatMessage = Annotated[
    GivenMessage | AssistantMessage | ToolMessage | FunctionMessage, Field(discriminator="role")
]


class Function(RequestModel):
    """A function that the model may call. Chat templates may read extra fields."""

    model_config = ConfigDict(extra="allow")

    name: ToolName
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class FunctionTool(RequestModel):
    """A tool. Only functions are supported."""

    type: Literal["function"]
    function: Function


class FunctionName(RequestModel):
    name: ToolName


class NamedChoice(RequestModel):
    """A tool choice that requires one function."""

    type: Literal["function"]
    function: FunctionName


class ChatRequest(ChoicesRequest):
    """Request body of /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=limits.MAX_MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=limits.MAX_TOP_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    tools: (
        Annotated[list[FunctionTool], Field(max_length=limits.MAX_TOOLS, fail_fast=True)] | None
    ) = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: (
        Annotated[list[Function], Field(max_length=limits.MAX_TOOLS, fail_fast=True)] | None
    ) = None
    function_call: Literal["none", "auto"] | FunctionName | None = None
    reasoning_effort: ReasoningEffort | None = None
    chat_template_kwargs: Variables | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @property
    def begins_turn(self) -> bool:
        return self.add_generation_prompt is not False and not self.continue_final_message

    @property
    def uses_functions(self) -> bool:
        """Whether the request uses OpenAI's older format of tools and calls."""
        return self.functions is not None or self.function_call is not None

    def conversation(self) -> list[dict[str, Any]]:
        return [_message(message) for message in self.messages]


def _message(message: ChatMessage) -> dict[str, Any]:
    """A message without other servers' names of fields."""
    fields = {"content": "", **message.model_dump(exclude_none=True)}
    refusal, reasoning = fields.pop("refusal", None), fields.pop("reasoning", None)
    if refusal and not fields["content"]:
        fields["content"] = refusal
    return fields if reasoning is None else {"reasoning_content": reasoning, **fields}
