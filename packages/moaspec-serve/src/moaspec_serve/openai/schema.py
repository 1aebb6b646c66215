"""Request bodies of all endpoints, and bodies that only this server has.

Unknown fields, and fields of OpenAI's API without effect here (`user`, `metadata`, `service_tier`,
...), are ignored, but not in `moaspec`. `unsupported_fields.yaml` lists the refused ones; names
that misspell a field are refused too.
"""

import json
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    create_model,
)

from moaspec_core.sampling.params import SETTINGS
from moaspec_core.support import limits
from moaspec_serve.sources.source import LinkState

Name = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Id = Annotated[int, Field(ge=0)]
TokenId = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
StopString = Annotated[str, StringConstraints(min_length=1, max_length=limits.MAX_STOP_CHARACTERS)]
Stop = (
    StopString
    | Annotated[list[StopString], Field(max_length=limits.MAX_STOP_STRINGS, fail_fast=True)]
)
Ids = Annotated[list[Id], Field(min_length=1, fail_fast=True)]


def _encodable(value: dict[str, Any]) -> dict[str, Any]:
    """Refuse values that cannot be encoded: lone surrogates, and deep nesting."""
    if limits.too_deep(value):
        raise ValueError(f"it nests over {limits.MAX_JSON_DEPTH} levels deep")
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError("it holds half of a surrogate pair, which is no character") from error
    return value


Variables = Annotated[dict[Name, Any], AfterValidator(_encodable)]
"""Variables of a chat template: any JSON."""

JsonObject = Annotated[dict[str, Any], AfterValidator(_encodable)]


def _few_biases(value: Any) -> Any:
    """Refuse too many before each of them becomes an error of its own."""
    if isinstance(value, dict) and len(value) > limits.MAX_LOGIT_BIAS:
        raise ValueError(f"it names over {limits.MAX_LOGIT_BIAS} tokens")
    return value


class RequestModel(BaseModel):
    """Base of request bodies: types must match exactly, numbers must be finite."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class Extension(RequestModel):
    """The request field `moaspec`, see docs/serve.md."""

    model_config = ConfigDict(extra="forbid")

    sources: bool = False
    tree: bool = False
    stats: bool = False
    link: bool = False
    provisional: bool = False
    speculation: bool = True


ReasoningEffort = Annotated[str, StringConstraints(min_length=1, max_length=32)]


class StreamOptions(RequestModel):
    include_usage: bool = False
    continuous_usage_stats: bool = False  # vLLM's: usage so far, in every chunk


if TYPE_CHECKING:
    SamplingFields = RequestModel
else:
    SamplingFields = create_model(
        "SamplingFields",
        __base__=RequestModel,
        **{
            name: (
                Annotated[setting.kind, Field(ge=setting.http[0], le=setting.http[1])] | None,
                None,
            )
            for name, setting in SETTINGS.items()
            if setting.http is not None
        },
    )


class GenerationRequest(SamplingFields):
    """Request fields that all endpoints share."""

    model_config = ConfigDict(extra="allow")  # for `ServerContext.check`

    model: Name
    logit_bias: (
        Annotated[
            dict[TokenId, Bias],
            Field(max_length=limits.MAX_LOGIT_BIAS),
            BeforeValidator(_few_biases),
        ]
        | None
    ) = None
    stop: Stop | None = None
    min_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    stream: bool | None = None
    moaspec: Extension | None = None

    @property
    def extension(self) -> Extension:
        return self.moaspec or Extension()

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def num_choices(self) -> int:
        return 1

    @property
    def begins_turn(self) -> bool:
        """Whether the answer starts a turn and does not continue the prompt's text."""
        return True


class ChoicesRequest(GenerationRequest):
    """Request fields of endpoints that answer with `choices`."""

    max_tokens: Annotated[int, Field(ge=0)] | None = None
    n: Annotated[int, Field(ge=1, le=limits.MAX_CHOICES)] | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None  # vLLM's: ids of the prompt and of each choice

    @property
    def num_choices(self) -> int:
        return self.n or 1


def _few_prompts(value: Any) -> Any:
    """Refuse too many before they are taken for token ids."""
    is_many = isinstance(value, list) and len(value) > limits.MAX_PROMPTS
    if is_many and isinstance(value[0], str | list):
        raise ValueError(f"it holds {len(value)} prompts; at most {limits.MAX_PROMPTS} are taken")
    return value


class CompletionRequest(ChoicesRequest):
    """Request body of /v1/completions."""

    prompt: Annotated[
        str
        | Annotated[list[str], Field(min_length=1, max_length=limits.MAX_PROMPTS, fail_fast=True)]
        | Ids
        | Annotated[list[Ids], Field(min_length=1, max_length=limits.MAX_PROMPTS, fail_fast=True)],
        BeforeValidator(_few_prompts),
    ]
    best_of: Annotated[int, Field(ge=1, le=limits.MAX_CHOICES)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=limits.MAX_TOP_LOGPROBS)] | None = None
    echo: bool | None = None
    suffix: str | None = None

    @property
    def begins_turn(self) -> bool:
        return False


class SchemaFormat(RequestModel):
    name: Name = "schema"
    description: str | None = None
    schema_: Annotated[JsonObject, Field(alias="schema")]
    strict: bool | None = None


class TextFormat(RequestModel):
    type: Literal["text"]


class ObjectFormat(RequestModel):
    type: Literal["json_object"]


class JSONSchemaFormat(RequestModel):
    type: Literal["json_schema"]
    json_schema: SchemaFormat


ResponseFormat = Annotated[
    TextFormat | ObjectFormat | JSONSchemaFormat, Field(discriminator="type")
]


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(BaseModel):
    """OpenAI's format of errors."""

    error: ErrorBody


class About(BaseModel):
    """Response body of /v1/moaspec."""

    version: str
    model: str
    mode: Literal["local", "edge"]
    speculation: bool
    context: int
    active: int
    waiting: int
    link: LinkState | None = None


class CutRequest(RequestModel):
    """Request body of /v1/moaspec/link."""

    cut: bool
