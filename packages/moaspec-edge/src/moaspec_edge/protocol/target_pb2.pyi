from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

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
    __slots__ = ("packing",)
    PACKING_FIELD_NUMBER: _ClassVar[int]
    packing: str
    def __init__(self, packing: _Optional[str] = ...) -> None: ...

class Description(_message.Message):
    __slots__ = ("protocol", "target", "drafter", "sampling_version", "num_target_layers", "max_tokens", "max_drafted", "name", "engine", "chains_only", "newest")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_VERSION_FIELD_NUMBER: _ClassVar[int]
    NUM_TARGET_LAYERS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFTED_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    CHAINS_ONLY_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    target: TargetIdentity
    drafter: str
    sampling_version: int
    num_target_layers: _containers.RepeatedScalarFieldContainer[int]
    max_tokens: int
    max_drafted: int
    name: str
    engine: str
    chains_only: bool
    newest: str
    def __init__(self, protocol: _Optional[int] = ..., target: _Optional[_Union[TargetIdentity, _Mapping]] = ..., drafter: _Optional[str] = ..., sampling_version: _Optional[int] = ..., num_target_layers: _Optional[_Iterable[int]] = ..., max_tokens: _Optional[int] = ..., max_drafted: _Optional[int] = ..., name: _Optional[str] = ..., engine: _Optional[str] = ..., chains_only: _Optional[bool] = ..., newest: _Optional[str] = ...) -> None: ...

class TargetIdentity(_message.Message):
    __slots__ = ("model_type", "num_layers", "hidden_size", "num_kv_heads", "head_dim", "vocab_size", "tokenizer_hash", "adapter")
    MODEL_TYPE_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_HASH_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    model_type: str
    num_layers: int
    hidden_size: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tokenizer_hash: str
    adapter: str
    def __init__(self, model_type: _Optional[str] = ..., num_layers: _Optional[int] = ..., hidden_size: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., vocab_size: _Optional[int] = ..., tokenizer_hash: _Optional[str] = ..., adapter: _Optional[str] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "seed", "choice", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "logprobs", "grammar", "rules")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
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
    RULES_FIELD_NUMBER: _ClassVar[int]
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
    rules: TokenRules
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., choice: _Optional[int] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., logprobs: _Optional[bool] = ..., grammar: _Optional[str] = ..., rules: _Optional[_Union[TokenRules, _Mapping]] = ...) -> None: ...

class TokenRules(_message.Message):
    __slots__ = ("no_repeat_ngram_size", "bad_words_ids", "min_length", "min_new_tokens", "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values", "decay_start", "decay_factor", "suppress_tokens", "begin_suppress_tokens", "stop_token_ids", "max_new_tokens")
    class Word(_message.Message):
        __slots__ = ("token_ids",)
        TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
        token_ids: _containers.RepeatedScalarFieldContainer[int]
        def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...
    NO_REPEAT_NGRAM_SIZE_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_IDS_FIELD_NUMBER: _ClassVar[int]
    MIN_LENGTH_FIELD_NUMBER: _ClassVar[int]
    MIN_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FORCED_BOS_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    FORCED_EOS_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    REMOVE_INVALID_VALUES_FIELD_NUMBER: _ClassVar[int]
    DECAY_START_FIELD_NUMBER: _ClassVar[int]
    DECAY_FACTOR_FIELD_NUMBER: _ClassVar[int]
    SUPPRESS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BEGIN_SUPPRESS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    no_repeat_ngram_size: int
    bad_words_ids: _containers.RepeatedCompositeFieldContainer[TokenRules.Word]
    min_length: int
    min_new_tokens: int
    forced_bos_token_id: int
    forced_eos_token_id: _containers.RepeatedScalarFieldContainer[int]
    remove_invalid_values: bool
    decay_start: int
    decay_factor: float
    suppress_tokens: _containers.RepeatedScalarFieldContainer[int]
    begin_suppress_tokens: _containers.RepeatedScalarFieldContainer[int]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_new_tokens: int
    def __init__(self, no_repeat_ngram_size: _Optional[int] = ..., bad_words_ids: _Optional[_Iterable[_Union[TokenRules.Word, _Mapping]]] = ..., min_length: _Optional[int] = ..., min_new_tokens: _Optional[int] = ..., forced_bos_token_id: _Optional[int] = ..., forced_eos_token_id: _Optional[_Iterable[int]] = ..., remove_invalid_values: _Optional[bool] = ..., decay_start: _Optional[int] = ..., decay_factor: _Optional[float] = ..., suppress_tokens: _Optional[_Iterable[int]] = ..., begin_suppress_tokens: _Optional[_Iterable[int]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., max_new_tokens: _Optional[int] = ...) -> None: ...

class Range(_message.Message):
    __slots__ = ("start", "stop")
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    start: int
    stop: int
    def __init__(self, start: _Optional[int] = ..., stop: _Optional[int] = ...) -> None: ...

class ClientMessage(_message.Message):
    __slots__ = ("session", "turn", "open", "draft", "heartbeat", "resume", "fetch", "close")
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
    def __init__(self, session: _Optional[bytes] = ..., turn: _Optional[int] = ..., open: _Optional[_Union[Open, _Mapping]] = ..., draft: _Optional[_Union[Draft, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., resume: _Optional[_Union[Resume, _Mapping]] = ..., fetch: _Optional[_Union[Fetch, _Mapping]] = ..., close: _Optional[_Union[Close, _Mapping]] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("protocol", "sampling_version", "target", "drafter", "codec", "num_target_layers", "sampling", "token_ids", "prompt_length", "held")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_VERSION_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    NUM_TARGET_LAYERS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    sampling_version: int
    target: TargetIdentity
    drafter: str
    codec: Codec
    num_target_layers: int
    sampling: Sampling
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    prompt_length: int
    held: _containers.RepeatedCompositeFieldContainer[Range]
    def __init__(self, protocol: _Optional[int] = ..., sampling_version: _Optional[int] = ..., target: _Optional[_Union[TargetIdentity, _Mapping]] = ..., drafter: _Optional[str] = ..., codec: _Optional[_Union[Codec, str]] = ..., num_target_layers: _Optional[int] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., token_ids: _Optional[_Iterable[int]] = ..., prompt_length: _Optional[int] = ..., held: _Optional[_Iterable[_Union[Range, _Mapping]]] = ...) -> None: ...

class Draft(_message.Message):
    __slots__ = ("base", "tokens", "parents", "further")
    BASE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    FURTHER_FIELD_NUMBER: _ClassVar[int]
    base: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    parents: _containers.RepeatedScalarFieldContainer[int]
    further: int
    def __init__(self, base: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., parents: _Optional[_Iterable[int]] = ..., further: _Optional[int] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class Resume(_message.Message):
    __slots__ = ("base", "held")
    BASE_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    base: int
    held: _containers.RepeatedCompositeFieldContainer[Range]
    def __init__(self, base: _Optional[int] = ..., held: _Optional[_Iterable[_Union[Range, _Mapping]]] = ...) -> None: ...

class Fetch(_message.Message):
    __slots__ = ("ranges",)
    RANGES_FIELD_NUMBER: _ClassVar[int]
    ranges: _containers.RepeatedCompositeFieldContainer[Range]
    def __init__(self, ranges: _Optional[_Iterable[_Union[Range, _Mapping]]] = ...) -> None: ...

class Close(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ServerMessage(_message.Message):
    __slots__ = ("session", "turn", "verdict", "activations", "heartbeat", "problem")
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
    def __init__(self, session: _Optional[bytes] = ..., turn: _Optional[int] = ..., verdict: _Optional[_Union[Verdict, _Mapping]] = ..., activations: _Optional[_Union[Activations, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., problem: _Optional[_Union[Problem, _Mapping]] = ...) -> None: ...

class Verdict(_message.Message):
    __slots__ = ("base", "tokens", "logprobs", "activations", "pass_s", "dropped", "max_further")
    BASE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ACTIVATIONS_FIELD_NUMBER: _ClassVar[int]
    PASS_S_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    MAX_FURTHER_FIELD_NUMBER: _ClassVar[int]
    base: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    activations: Activations
    pass_s: float
    dropped: _containers.RepeatedScalarFieldContainer[int]
    max_further: int
    def __init__(self, base: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., activations: _Optional[_Union[Activations, _Mapping]] = ..., pass_s: _Optional[float] = ..., dropped: _Optional[_Iterable[int]] = ..., max_further: _Optional[int] = ...) -> None: ...

class Activations(_message.Message):
    __slots__ = ("start", "count", "data")
    START_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    start: int
    count: int
    data: bytes
    def __init__(self, start: _Optional[int] = ..., count: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

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
    def __init__(self, kind: _Optional[_Union[Problem.Kind, str]] = ..., message: _Optional[str] = ..., retry_s: _Optional[float] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("token_ids", "sampling", "max_new_tokens", "stop_token_ids", "speculate", "stop")
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
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., max_new_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., speculate: _Optional[bool] = ..., stop: _Optional[_Iterable[str]] = ...) -> None: ...

class Weights(_message.Message):
    __slots__ = ("data", "version", "packing")
    DATA_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PACKING_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    version: str
    packing: str
    def __init__(self, data: _Optional[bytes] = ..., version: _Optional[str] = ..., packing: _Optional[str] = ...) -> None: ...

class Generated(_message.Message):
    __slots__ = ("token_ids", "sources", "stop_reason")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    STOP_REASON_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    sources: _containers.RepeatedScalarFieldContainer[int]
    stop_reason: str
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., sources: _Optional[_Iterable[int]] = ..., stop_reason: _Optional[str] = ...) -> None: ...
