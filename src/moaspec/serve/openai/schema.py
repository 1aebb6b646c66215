"""What all endpoints take and give, as pydantic models.

Fields of OpenAI's API that change nothing here (`user`, `metadata`, `service_tier`, ...) are
accepted and ignored, as unknown ones are. See `unsupported` for those that are refused.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

from moaspec.support import limits

Name = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Id = Annotated[int, Field(ge=0)]
TokenId = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
StopString = Annotated[str, StringConstraints(min_length=1, max_length=limits.MAX_STOP_CHARACTERS)]
Stop = StopString | Annotated[list[StopString], Field(max_length=limits.MAX_STOP_STRINGS)]


def _encodable(value: dict[str, Any]) -> dict[str, Any]:
    """Refuse what no answer could repeat: lone surrogates, and nesting without end."""
    if limits.too_deep(value):
        raise ValueError(f"it nests over {limits.MAX_JSON_DEPTH} levels deep")
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError("it holds half of a surrogate pair, which is no character") from error
    return value


Variables = Annotated[dict[Name, Any], AfterValidator(_encodable)]
"""Of a chat template: any JSON."""

JsonObject = Annotated[dict[str, Any], AfterValidator(_encodable)]


class Given(BaseModel):
    """Base of what clients send: types must be right, numbers finite."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class Extension(Given):
    """The field `moaspec`; see docs/serve.md."""

    sources: bool = False
    tree: bool = False
    stats: bool = False
    link: bool = False
    provisional: bool = False
    speculation: bool = True


FinishReason = Literal["stop", "length", "tool_calls", "function_call"]
ReasoningEffort = Annotated[str, StringConstraints(min_length=1, max_length=32)]


class StreamOptions(Given):
    """OpenAI's `stream_options`."""

    include_usage: bool = False


class Sampling(Given):
    """Settings that all endpoints share."""

    model_config = ConfigDict(extra="allow")  # for `refuse_unsupported`

    model: Name
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[TokenId, Bias], Field(max_length=limits.MAX_LOGIT_BIAS)] | None = (
        None
    )
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Stop | None = None
    stream: bool | None = None
    moaspec: Extension | None = None

    @property
    def extension(self) -> Extension:
        """What of the extension was asked for."""
        return self.moaspec or Extension()

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """One or several as a tuple."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class CompletionRequest(Sampling):
    """Body of /v1/completions."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=limits.MAX_PROMPTS)]
        | Annotated[list[Id], Field(min_length=1)]
        | Annotated[
            list[Annotated[list[Id], Field(min_length=1)]],
            Field(min_length=1, max_length=limits.MAX_PROMPTS),
        ]
    )
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    n: Annotated[int, Field(ge=1, le=limits.MAX_CHOICES)] | None = None
    best_of: Annotated[int, Field(ge=1, le=limits.MAX_CHOICES)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=limits.MAX_TOP_LOGPROBS)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    stream_options: StreamOptions | None = None


class SchemaFormat(Given):
    """A JSON schema and its name."""

    name: Name = "schema"
    description: str | None = None
    schema_: Annotated[JsonObject, Field(alias="schema")]
    strict: bool | None = None


class TextFormat(Given):
    """Free text."""

    type: Literal["text"]


class ObjectFormat(Given):
    """Any JSON object."""

    type: Literal["json_object"]


class JSONSchemaFormat(Given):
    """JSON after a schema."""

    type: Literal["json_schema"]
    json_schema: SchemaFormat


ResponseFormat = Annotated[
    TextFormat | ObjectFormat | JSONSchemaFormat, Field(discriminator="type")
]


class Speculation(BaseModel):
    """What drafting did."""

    rounds: int
    tau: float | None = None
    drafted: int
    accepted: int
    copied: int


class PromptDetails(BaseModel):
    """Of the prompt's tokens."""

    cached_tokens: int


class CompletionDetails(BaseModel):
    """Of the written tokens."""

    reasoning_tokens: int = 0
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(BaseModel):
    """Tokens of one request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails
    speculation: Speculation


class CompletionChoice(BaseModel):
    """One text."""

    index: int
    text: str
    logprobs: dict[str, Any] | None = None
    finish_reason: Literal["stop", "length"] | None = None


class Completion(BaseModel):
    """Answer of /v1/completions."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage
    moaspec: dict[str, Any] | None = None


class ErrorBody(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(BaseModel):
    """OpenAI's form of errors."""

    error: ErrorBody


class Model(BaseModel):
    """A model that can be asked."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str


class ModelList(BaseModel):
    """Answer of /v1/models."""

    object: Literal["list"] = "list"
    data: list[Model]


class Health(BaseModel):
    """Answer of /health."""

    status: Literal["ok"] = "ok"


class LinkReport(BaseModel):
    """See docs/serve.md."""

    state: Literal["up", "down", "syncing"]
    round_trip_s: float | None = None
    bytes_sent: int
    bytes_received: int
    can_cut: bool
    cut: bool


class About(BaseModel):
    """Answer of /v1/moaspec."""

    version: str
    model: str
    mode: Literal["local", "edge"]
    speculation: bool
    context: int
    active: int
    waiting: int
    link: LinkReport | None = None


class CutRequest(Given):
    """Body of /v1/moaspec/link."""

    cut: bool
