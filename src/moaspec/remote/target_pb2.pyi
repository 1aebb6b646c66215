from collections.abc import Iterable as _Iterable
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar

from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper

DESCRIPTOR: _descriptor.FileDescriptor

class Codec(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CODEC_UNSPECIFIED: _ClassVar[Codec]
    CODEC_FP16: _ClassVar[Codec]
    CODEC_INT8: _ClassVar[Codec]
    CODEC_INT4: _ClassVar[Codec]

CODEC_UNSPECIFIED: Codec
CODEC_FP16: Codec
CODEC_INT8: Codec
CODEC_INT4: Codec

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Description(_message.Message):
    __slots__ = (
        "drafter",
        "law",
        "max_drafted",
        "max_tokens",
        "name",
        "num_target_layers",
        "protocol",
        "target",
    )
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    LAW_FIELD_NUMBER: _ClassVar[int]
    NUM_TARGET_LAYERS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFTED_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    target: TargetIdentity
    drafter: str
    law: int
    num_target_layers: _containers.RepeatedScalarFieldContainer[int]
    max_tokens: int
    max_drafted: int
    name: str
    def __init__(
        self,
        protocol: int | None = ...,
        target: TargetIdentity | _Mapping | None = ...,
        drafter: str | None = ...,
        law: int | None = ...,
        num_target_layers: _Iterable[int] | None = ...,
        max_tokens: int | None = ...,
        max_drafted: int | None = ...,
        name: str | None = ...,
    ) -> None: ...

class TargetIdentity(_message.Message):
    __slots__ = (
        "head_dim",
        "hidden_size",
        "model_type",
        "num_kv_heads",
        "num_layers",
        "tokenizer_hash",
        "vocab_size",
    )
    MODEL_TYPE_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_HASH_FIELD_NUMBER: _ClassVar[int]
    model_type: str
    num_layers: int
    hidden_size: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tokenizer_hash: str
    def __init__(
        self,
        model_type: str | None = ...,
        num_layers: int | None = ...,
        hidden_size: int | None = ...,
        num_kv_heads: int | None = ...,
        head_dim: int | None = ...,
        vocab_size: int | None = ...,
        tokenizer_hash: str | None = ...,
    ) -> None: ...

class Sampling(_message.Message):
    __slots__ = (
        "choice",
        "frequency_penalty",
        "grammar",
        "logit_bias",
        "logprobs",
        "min_p",
        "presence_penalty",
        "repetition_penalty",
        "seed",
        "temperature",
        "top_k",
        "top_p",
    )
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: int | None = ..., value: float | None = ...) -> None: ...

    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    choice: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    logprobs: bool
    grammar: str
    def __init__(
        self,
        temperature: float | None = ...,
        top_k: int | None = ...,
        top_p: float | None = ...,
        min_p: float | None = ...,
        seed: int | None = ...,
        choice: int | None = ...,
        repetition_penalty: float | None = ...,
        presence_penalty: float | None = ...,
        frequency_penalty: float | None = ...,
        logit_bias: _Mapping[int, float] | None = ...,
        logprobs: bool | None = ...,
        grammar: str | None = ...,
    ) -> None: ...

class Range(_message.Message):
    __slots__ = ("start", "stop")
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    start: int
    stop: int
    def __init__(self, start: int | None = ..., stop: int | None = ...) -> None: ...

class ClientMessage(_message.Message):
    __slots__ = ("close", "draft", "fetch", "heartbeat", "open", "resume", "session", "turn")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    FETCH_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    turn: int
    open: Open
    draft: Draft
    heartbeat: Heartbeat
    resume: Resume
    fetch: Fetch
    close: Close
    def __init__(
        self,
        session: bytes | None = ...,
        turn: int | None = ...,
        open: Open | _Mapping | None = ...,
        draft: Draft | _Mapping | None = ...,
        heartbeat: Heartbeat | _Mapping | None = ...,
        resume: Resume | _Mapping | None = ...,
        fetch: Fetch | _Mapping | None = ...,
        close: Close | _Mapping | None = ...,
    ) -> None: ...

class Open(_message.Message):
    __slots__ = (
        "codec",
        "drafter",
        "held",
        "law",
        "num_target_layers",
        "prompt_length",
        "protocol",
        "sampling",
        "target",
        "token_ids",
    )
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    LAW_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    NUM_TARGET_LAYERS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    law: int
    target: TargetIdentity
    drafter: str
    codec: Codec
    num_target_layers: int
    sampling: Sampling
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    prompt_length: int
    held: _containers.RepeatedCompositeFieldContainer[Range]
    def __init__(
        self,
        protocol: int | None = ...,
        law: int | None = ...,
        target: TargetIdentity | _Mapping | None = ...,
        drafter: str | None = ...,
        codec: Codec | str | None = ...,
        num_target_layers: int | None = ...,
        sampling: Sampling | _Mapping | None = ...,
        token_ids: _Iterable[int] | None = ...,
        prompt_length: int | None = ...,
        held: _Iterable[Range | _Mapping] | None = ...,
    ) -> None: ...

class Draft(_message.Message):
    __slots__ = ("base", "parents", "tokens")
    BASE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    base: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    parents: _containers.RepeatedScalarFieldContainer[int]
    def __init__(
        self,
        base: int | None = ...,
        tokens: _Iterable[int] | None = ...,
        parents: _Iterable[int] | None = ...,
    ) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: int | None = ...) -> None: ...

class Resume(_message.Message):
    __slots__ = ("base", "held")
    BASE_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    base: int
    held: _containers.RepeatedCompositeFieldContainer[Range]
    def __init__(
        self, base: int | None = ..., held: _Iterable[Range | _Mapping] | None = ...
    ) -> None: ...

class Fetch(_message.Message):
    __slots__ = ("ranges",)
    RANGES_FIELD_NUMBER: _ClassVar[int]
    ranges: _containers.RepeatedCompositeFieldContainer[Range]
    def __init__(self, ranges: _Iterable[Range | _Mapping] | None = ...) -> None: ...

class Close(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ServerMessage(_message.Message):
    __slots__ = ("activations", "heartbeat", "problem", "session", "turn", "verdict")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    ACTIVATIONS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    turn: int
    verdict: Verdict
    activations: Activations
    heartbeat: Heartbeat
    problem: Problem
    def __init__(
        self,
        session: bytes | None = ...,
        turn: int | None = ...,
        verdict: Verdict | _Mapping | None = ...,
        activations: Activations | _Mapping | None = ...,
        heartbeat: Heartbeat | _Mapping | None = ...,
        problem: Problem | _Mapping | None = ...,
    ) -> None: ...

class Verdict(_message.Message):
    __slots__ = ("activations", "base", "logprobs", "pass_s", "tokens")
    BASE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ACTIVATIONS_FIELD_NUMBER: _ClassVar[int]
    PASS_S_FIELD_NUMBER: _ClassVar[int]
    base: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    activations: Activations
    pass_s: float
    def __init__(
        self,
        base: int | None = ...,
        tokens: _Iterable[int] | None = ...,
        logprobs: _Iterable[float] | None = ...,
        activations: Activations | _Mapping | None = ...,
        pass_s: float | None = ...,
    ) -> None: ...

class Activations(_message.Message):
    __slots__ = ("count", "data", "start")
    START_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    start: int
    count: int
    data: bytes
    def __init__(
        self, start: int | None = ..., count: int | None = ..., data: bytes | None = ...
    ) -> None: ...

class Problem(_message.Message):
    __slots__ = ("kind", "message", "retry_s")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[Problem.Kind]
        LOST: _ClassVar[Problem.Kind]
        BUSY: _ClassVar[Problem.Kind]
        DRAINING: _ClassVar[Problem.Kind]
        REFUSED: _ClassVar[Problem.Kind]

    KIND_UNSPECIFIED: Problem.Kind
    LOST: Problem.Kind
    BUSY: Problem.Kind
    DRAINING: Problem.Kind
    REFUSED: Problem.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_S_FIELD_NUMBER: _ClassVar[int]
    kind: Problem.Kind
    message: str
    retry_s: float
    def __init__(
        self,
        kind: Problem.Kind | str | None = ...,
        message: str | None = ...,
        retry_s: float | None = ...,
    ) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("max_new_tokens", "sampling", "speculate", "stop", "stop_token_ids", "token_ids")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SPECULATE_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: Sampling
    max_new_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    speculate: bool
    stop: _containers.RepeatedScalarFieldContainer[str]
    def __init__(
        self,
        token_ids: _Iterable[int] | None = ...,
        sampling: Sampling | _Mapping | None = ...,
        max_new_tokens: int | None = ...,
        stop_token_ids: _Iterable[int] | None = ...,
        speculate: bool | None = ...,
        stop: _Iterable[str] | None = ...,
    ) -> None: ...

class Generated(_message.Message):
    __slots__ = ("sources", "stop_reason", "token_ids")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    STOP_REASON_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    sources: _containers.RepeatedScalarFieldContainer[int]
    stop_reason: str
    def __init__(
        self,
        token_ids: _Iterable[int] | None = ...,
        sources: _Iterable[int] | None = ...,
        stop_reason: str | None = ...,
    ) -> None: ...
