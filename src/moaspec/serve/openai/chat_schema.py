"""Bodies of /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    StringConstraints,
    model_serializer,
)

from moaspec.serve.openai.call_grammar import Tool
from moaspec.serve.openai.schema import (
    FinishReason,
    Given,
    JsonObject,
    ReasoningEffort,
    ResponseFormat,
    Sampling,
    StreamOptions,
    Usage,
    Variables,
)
from moaspec.support import limits

ToolName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class TextPart(Given):
    """A piece of a message's text. Images and sound are not understood."""

    type: Literal["text"]
    text: str


Content = str | Annotated[list[TextPart], Field(max_length=limits.MAX_PARTS)]


class SystemMessage(Given):
    """What the model is told before all else."""

    role: Literal["system", "developer"]
    content: Content
    name: str | None = None


class UserMessage(Given):
    """What the user says."""

    role: Literal["user"]
    content: Content
    name: str | None = None


class FunctionCall(Given):
    """A called function; arguments are JSON text."""

    name: ToolName
    arguments: str


class ToolCall(Given):
    """A call that the model made."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class AssistantMessage(Given):
    """What the model said, or called."""

    role: Literal["assistant"]
    content: Content | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    audio: None = None
    function_call: FunctionCall | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=limits.MAX_CALLS)] | None = None


class ToolMessage(Given):
    """What a function gave."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str


class FunctionMessage(Given):
    """The same in OpenAI's older form."""

    role: Literal["function"]
    content: Content | None = None
    name: ToolName


ChatMessage = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage | FunctionMessage,
    Field(discriminator="role"),
]


class Function(Given):
    """A function that the model may call; templates may read further fields."""

    model_config = ConfigDict(extra="allow")

    name: ToolName
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None

    def tool(self) -> Tool:
        """As the rest of the server knows it."""
        return Tool.of(self.model_dump(exclude_none=True))


class FunctionTool(Given):
    """A tool; only functions are known."""

    type: Literal["function"]
    function: Function

    def tool(self) -> Tool:
        """As the rest of the server knows it."""
        return self.function.tool()


class FunctionName(Given):
    """Which function."""

    name: ToolName


class NamedChoice(Given):
    """This function must be called."""

    type: Literal["function"]
    function: FunctionName


class ChatRequest(Sampling):
    """Body of /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=limits.MAX_MESSAGES)]
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    n: Annotated[int, Field(ge=1, le=limits.MAX_CHOICES)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=limits.MAX_TOP_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=limits.MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[list[Function], Field(max_length=limits.MAX_TOOLS)] | None = None
    function_call: Literal["none", "auto"] | FunctionName | None = None
    reasoning_effort: ReasoningEffort | None = None
    stream_options: StreamOptions | None = None
    chat_template_kwargs: Variables | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @property
    def begins_turn(self) -> bool:
        """Whether the answer is a new turn, not the rest of the prompt's text."""
        return self.add_generation_prompt is not False and not self.continue_final_message

    @property
    def older(self) -> bool:
        """Whether functions are described and called in OpenAI's older form."""
        return self.functions is not None or self.function_call is not None

    def conversation(self) -> list[dict[str, Any]]:
        """Messages in OpenAI's form."""
        return [_message(one) for one in self.messages]


def _message(message: ChatMessage) -> dict[str, Any]:
    """A message, with other servers' names of its fields replaced."""
    said = {"content": "", **message.model_dump(exclude_none=True)}
    refusal, reasoning = said.pop("refusal", None), said.pop("reasoning", None)
    if refusal and not said["content"]:
        said["content"] = refusal
    return said if reasoning is None else {"reasoning_content": reasoning, **said}


class AnswerMessage(BaseModel):
    """What the model answered."""

    role: Literal["assistant"] = "assistant"
    content: str | None = None
    refusal: None = None
    tool_calls: list[ToolCall] | None = None
    function_call: FunctionCall | None = None

    @model_serializer(mode="wrap")
    def _with_content(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Other absent fields are left out; clients read this one without asking."""
        return {"content": None, **serialize(self)}


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: dict[str, Any] | None = None
    finish_reason: FinishReason | None = None


class ChatCompletion(BaseModel):
    """Answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    moaspec: dict[str, Any] | None = None
