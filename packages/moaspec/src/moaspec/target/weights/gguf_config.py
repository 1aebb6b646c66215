"""Configs of transformers from the metadata of GGUF files.

Each architecture has the fields of its config, and the names of its tensors. The source of what a
field means is llama.cpp: which fields a model's graph reads, and what stands for a missing one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from moaspec.target.weights.gguf_fields import WAY_OUT, Fields
from moaspec.target.weights.gguf_file import GGUFFile
from moaspec.target.weights.gguf_rope import (
    FACTORS,
    LONG,
    SHORT,
    Rotary,
    rope_parameters,
    same_factors,
)
from moaspec_core.errors import UnknownModelError, UnsupportedTargetError
from moaspec_core.support.causes import first_line

EMBEDDING, HEAD = "token_embd.weight", "output.weight"
Values = dict[str, Any]

_FULL, _SLIDING = "full_attention", "sliding_attention"
_ATTENTION = {f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"}
_MLP = {f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")}
_OUTPUT = {"self_attn.o_proj": "attn_output"}
_NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
_HEAD_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
_LLAMA = {**_NORMS, **_ATTENTION, **_OUTPUT, **_MLP}
_POST_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_GEMMA2 = {**_LLAMA, **_POST_NORMS, "pre_feedforward_layernorm": "ffn_norm"}
_EXPERTS = {"gate": "ffn_gate_inp", "experts.down_proj": "ffn_down_exps"}


@dataclass(frozen=True)
class Architecture:
    """How the models of one `general.architecture` are stored.

    Args:
        model_type: of transformers.
        parts: parts of a layer, by transformers' name, and their names in the file.
        values: the config's values that are not common to all architectures; they may also change
            the common ones, which they receive.
        pairs: rotary embeddings rotate neighbouring dimensions, so rows of queries and keys are in
            another order than in transformers.
        norm_offset: what transformers adds to the weights of norms, and the file contains.
        head: whether the file has a head of its own.
        factors: tensors of the rotary embeddings that a file may have.
        partial_rotary: whether only a share of each head may be rotated.
        own_yarn: whether llama.cpp reads YaRN's ramp and magnitude for this architecture.
        epsilon: the field with the epsilon of norms.
    """

    model_type: str
    parts: Mapping[str, str]
    values: Callable[[Fields, GGUFFile, Values], Values] = field(default=lambda *_: {})
    pairs: bool = False
    norm_offset: float = 0.0
    head: Literal["own", "tied", "either"] = "either"
    factors: tuple[str, ...] = ()
    partial_rotary: bool = False
    own_yarn: bool = False
    epsilon: str = "attention.layer_norm_rms_epsilon"


def read_config(file: GGUFFile) -> Any:
    """The config of transformers for a file.

    Raises:
        UnknownModelError, UnsupportedTargetError: without the file's name.
    """
    architecture = architecture_of(file)
    fields = Fields(file.fields, file.architecture)
    values = _common(fields, file, architecture)
    values |= architecture.values(fields, file, values)
    fields.require_all_used()
    model_type = values.pop("model_type", architecture.model_type)
    try:
        config = AutoConfig.for_model(model_type, **values)
    except Exception as error:  # it raises almost anything where values do not fit each other
        raise UnknownModelError(
            f"its fields do not fit each other in a {model_type} model: {first_line(error)}"
        ) from error
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]]
    config.dtype = "float32"
    return config


def architecture_of(file: GGUFFile) -> Architecture:
    """The architecture of a file that holds a whole language model.

    Raises:
        UnknownModelError, UnsupportedTargetError: without the file's name.
    """
    kind = file.fields.get("general.type", "model")
    if kind != "model":
        raise UnsupportedTargetError(
            f"it holds no model but a part of the kind {kind!r}. {WAY_OUT}"
        )
    found = ARCHITECTURES.get(file.architecture)
    if found is None:
        raise UnsupportedTargetError(
            f"moaspec reads no GGUF files of the architecture {file.architecture!r}, but "
            f"{', '.join(sorted(ARCHITECTURES))}. {WAY_OUT}"
        )
    return found


def _common(fields: Fields, file: GGUFFile, architecture: Architecture) -> Values:
    """The values that all architectures have."""
    hidden = fields.integer("embedding_length", least=1)
    fields.require_length(fields.integer("block_count", least=1))
    heads = fields.integer("attention.head_count", least=1)
    keys = fields.integer("attention.head_count_kv", heads, least=1)
    if heads % keys:
        raise fields.damaged(
            "attention.head_count_kv", f"must divide attention.head_count, {heads}"
        )
    if hidden % heads and "attention.key_length" not in fields:
        raise fields.damaged(
            "embedding_length", f"must be a multiple of attention.head_count, {heads}"
        )
    layers = fields.integer("block_count", least=1)
    if layers > len(file.tensors):  # before transformers builds such a model
        raise fields.damaged("block_count", f"must be less than its {len(file.tensors)} tensors")
    context = fields.integer("context_length", least=1)
    head_dim = fields.integer("attention.key_length", hidden // heads, least=2)
    if fields.integer("attention.value_length", head_dim) != head_dim:
        raise fields.refuse("attention.value_length", f"and attention.key_length {head_dim}")
    return {
        "vocab_size": _vocabulary(fields, file),
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "head_dim": head_dim,
        "intermediate_size": fields.integer("feed_forward_length", least=1),
        "max_position_embeddings": context,
        "rms_norm_eps": fields.number(architecture.epsilon, sign="not negative"),
        "rope_parameters": rope_parameters(
            fields,
            file,
            Rotary(
                head_dim,
                context,
                factors=architecture.factors,
                partial=architecture.partial_rotary,
                own_yarn=architecture.own_yarn,
            ),
        ),
        "tie_word_embeddings": architecture.head == "tied"
        or (architecture.head == "either" and HEAD not in file.tensors),
        **_special_ids(file),
    }


def _vocabulary(fields: Fields, file: GGUFFile) -> int:
    """Rows of the embedding, which may be padded."""
    embedding, tokens = file.tensors.get(EMBEDDING), file.fields.get("tokenizer.ggml.tokens", ())
    if embedding is None:
        raise UnknownModelError(f"it lacks the tensor {EMBEDDING}.")
    rows = embedding.shape[0]
    if rows < len(tokens):
        raise UnknownModelError(
            f"its vocabulary has {len(tokens)} tokens, and {EMBEDDING} {rows} rows."
        )
    if not len(tokens) <= fields.integer("vocab_size", rows) <= rows:
        raise fields.damaged(
            "vocab_size",
            f"must be from {len(tokens)}, the number of tokens, to {rows}, the rows of {EMBEDDING}",
        )
    return rows


def _special_ids(file: GGUFFile) -> Values:
    keys = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    ids = {ours: file.fields.get(f"tokenizer.ggml.{key}_token_id") for ours, key in keys.items()}
    rows = range(file.tensors[EMBEDDING].shape[0])
    return {key: value if value in rows else None for key, value in ids.items()}


def _biases(_fields: Fields, file: GGUFFile, _values: Values) -> Values:
    """Biases of llama-like models, by the tensors that the file has."""
    inputs = _has_biases(file, "attn_q", "attn_k", "attn_v") or _has_biases(file, "attn_qkv")
    return {
        "attention_bias": inputs and _has_biases(file, "attn_output"),
        "mlp_bias": _has_biases(file, "ffn_up", "ffn_down"),
    }


def _has_biases(file: GGUFFile, *parts: str) -> bool:
    return all(f"blk.0.{part}.bias" in file.tensors for part in parts)


def _llama(fields: Fields, file: GGUFFile, values: Values) -> Values:
    if fields.integer("expert_count", 0) == 0:
        if fields.integer("expert_used_count", 0):
            raise fields.damaged("expert_used_count", "must be 0 where there is no expert_count")
        return _biases(fields, file, values)
    experts, used = _experts(fields)
    return {"model_type": "mixtral", "num_local_experts": experts, "num_experts_per_tok": used}


def _experts(fields: Fields) -> tuple[int, int]:
    """How many experts a layer has, and how many of them a token uses."""
    experts = fields.integer("expert_count", least=1)
    used = fields.integer("expert_used_count", least=1)
    if used > experts:
        raise fields.damaged("expert_used_count", f"must be at most expert_count, {experts}")
    return experts, used


def _qwen3_moe(fields: Fields, file: GGUFFile, values: Values) -> Values:
    experts, used = _experts(fields)
    return {
        "attention_bias": _biases(fields, file, values)["attention_bias"],
        "num_experts": experts,
        "num_experts_per_tok": used,
        "moe_intermediate_size": fields.integer("expert_feed_forward_length", least=1),
        "norm_topk_prob": True,
    }


def _mistral3(fields: Fields, _file: GGUFFile, values: Values) -> Values:
    """Ministral 3 also scales queries by their position."""
    scale = fields.number("attention.temperature_scale", 0.0)
    if not scale:
        return {}
    rope, context = values["rope_parameters"], values["max_position_embeddings"]
    trained = fields.integer("rope.scaling.original_context_length", context, least=1)
    if fields.integer("attention.temperature_length", trained) != trained:
        raise fields.refuse(
            "attention.temperature_length", f"and moaspec reads the trained length, {trained}"
        )
    rope = {**rope, "llama_4_scaling_beta": scale, "original_max_position_embeddings": trained}
    return {"model_type": "ministral3", "rope_parameters": rope}


def _gemma(_fields: Fields, _file: GGUFFile, _values: Values) -> Values:
    return {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False}


def _gemma2(fields: Fields, _file: GGUFFile, values: Values) -> Values:
    return {
        "attn_logit_softcapping": fields.number("attn_logit_softcapping", 50.0, sign="positive"),
        "final_logit_softcapping": fields.number("final_logit_softcapping", 30.0, sign="positive"),
        "query_pre_attn_scalar": _scaled_by(values, layers_of_27b=46),
        "sliding_window": fields.integer("attention.sliding_window", 4096, least=1),
        "layer_types": _layer_types(fields, values, period=2),
    }


def _gemma3(fields: Fields, _file: GGUFFile, values: Values) -> Values:
    rope, layers = values["rope_parameters"], values["num_hidden_layers"]
    if rope["rope_type"] not in ("default", "linear"):
        raise fields.refuse("rope.scaling.type", "and moaspec reads linear for Gemma 3")
    window = fields.integer("attention.sliding_window", 0)
    kinds = _layer_types(fields, values, period=6) if window else [_FULL] * layers
    local = fields.number("rope.freq_base_swa", 10000.0, sign="positive")
    return {
        "final_logit_softcapping": fields.number(
            "final_logit_softcapping", 0.0, sign="not negative"
        )
        or None,
        "query_pre_attn_scalar": _scaled_by(values, layers_of_27b=62),
        "sliding_window": window or 4096,
        "layer_types": kinds,
        "rope_parameters": {
            _FULL: rope,
            _SLIDING: {"rope_type": "default", "rope_theta": local},
        },
    }


def _scaled_by(values: Values, *, layers_of_27b: int) -> int:
    """What attention divides by the root of; files have no field for it."""
    head_dim, hidden = values["head_dim"], values["hidden_size"]
    is_27b = values["num_hidden_layers"] == layers_of_27b
    return int(hidden // values["num_attention_heads"]) if is_27b else int(head_dim)


def _layer_types(fields: Fields, values: Values, *, period: int) -> list[str]:
    """The type of each layer: a list says which slide, else all do but the last of each period."""
    given, layers = (
        fields.raw("attention.sliding_window_pattern", period),
        range(values["num_hidden_layers"]),
    )
    if isinstance(given, list):
        if len(given) != len(layers):
            raise fields.refuse("attention.sliding_window_pattern", f"for {len(layers)} layers")
        return [_SLIDING if slides else _FULL for slides in given]
    period = fields.integer("attention.sliding_window_pattern", period, least=1)
    return [_FULL if (layer + 1) % period == 0 else _SLIDING for layer in layers]


def _phi3(fields: Fields, _file: GGUFFile, values: Values) -> Values:
    rope = values["rope_parameters"]
    if rope["rope_type"] == "yarn":
        raise fields.refuse("rope.scaling.type", "and moaspec reads none and linear for Phi-3")
    if rope["rope_type"] == "linear":  # transformers' Phi-3 knows LongRoPE only
        rotated = fields.integer("rope.dimension_count", values["head_dim"])
        same = [rope.pop("factor")] * (rotated // 2)
        rope |= same_factors(same, values["max_position_embeddings"])
    trained = rope.get("original_max_position_embeddings")
    return {
        "rope_parameters": rope,
        "sliding_window": fields.integer("attention.sliding_window", 0) or None,
        "original_max_position_embeddings": trained or values["max_position_embeddings"],
    }


def _olmo2(fields: Fields, _file: GGUFFile, values: Values) -> Values:
    """OLMo 3, which has sliding windows, is stored as OLMo 2."""
    window = fields.integer("attention.sliding_window", 0)
    if not window:
        return {"attention_bias": False}
    rope = values["rope_parameters"]
    base = rope["rope_theta"]
    # llama.cpp takes no notice of it, and transformers has one base for all layers.
    if fields.number("rope.freq_base_swa", base, sign="positive") != base:
        raise fields.refuse("rope.freq_base_swa", f"and rope.freq_base {base:g}")
    local = {"rope_type": "default", "rope_theta": base}
    return {
        "model_type": "olmo3",
        "sliding_window": window,
        "layer_types": _layer_types(fields, values, period=4),
        "rope_parameters": {_FULL: rope, _SLIDING: local},
    }


def _starcoder2(_fields: Fields, _file: GGUFFile, values: Values) -> Values:
    return {
        "norm_epsilon": values["rms_norm_eps"],
        "hidden_act": "gelu_pytorch_tanh",
        "use_bias": True,
    }


def _granite(fields: Fields, file: GGUFFile, values: Values) -> Values:
    if not fields.raw("rope.scaling.finetuned", True):
        raise fields.refuse("rope.scaling.finetuned", "a Granite without rotary embeddings")
    return {
        **_biases(fields, file, values),
        "embedding_multiplier": fields.number("embedding_scale", 1.0, sign="not negative") or 1.0,
        "residual_multiplier": fields.number("residual_scale", 1.0, sign="not negative") or 1.0,
        "attention_multiplier": fields.number("attention.scale", 0.0, sign="not negative")
        or values["head_dim"] ** -0.5,
        "logits_scaling": fields.number("logit_scale", sign="positive"),
    }


def _smollm3(fields: Fields, file: GGUFFile, values: Values) -> Values:
    """Each fourth layer has no rotary embeddings."""
    layers = range(values["num_hidden_layers"])
    return {
        **_biases(fields, file, values),
        "no_rope_layers": [int((layer + 1) % 4 != 0) for layer in layers],
        "use_sliding_window": False,
    }


def _seed_oss(fields: Fields, file: GGUFFile, values: Values) -> Values:
    return {
        **_biases(fields, file, values),
        "attention_bias": _has_biases(file, "attn_q", "attn_k", "attn_v"),
        "attention_out_bias": _has_biases(file, "attn_output"),
    }


def _qwen3(fields: Fields, file: GGUFFile, values: Values) -> Values:
    return {"attention_bias": _biases(fields, file, values)["attention_bias"]}


_MIXTRAL = {f"mlp.{ours}": theirs for ours, theirs in _EXPERTS.items()}

_ALL_FACTORS = (FACTORS, SHORT, LONG)

ARCHITECTURES: Mapping[str, Architecture] = {
    "arcee": Architecture("arcee", _LLAMA, _biases, pairs=True, factors=_ALL_FACTORS),
    "gemma": Architecture("gemma", _LLAMA, _gemma, norm_offset=1.0, head="tied"),
    "gemma2": Architecture("gemma2", _GEMMA2, _gemma2, norm_offset=1.0, head="tied"),
    "gemma3": Architecture("gemma3_text", {**_GEMMA2, **_HEAD_NORMS}, _gemma3, norm_offset=1.0),
    "granite": Architecture("granite", _LLAMA, _granite, pairs=True, factors=_ALL_FACTORS),
    "llama": Architecture(
        "llama", {**_LLAMA, **_MIXTRAL}, _llama, pairs=True, factors=_ALL_FACTORS
    ),
    "mistral3": Architecture(
        "mistral", _LLAMA, _mistral3, pairs=True, factors=_ALL_FACTORS, own_yarn=True
    ),
    "olmo2": Architecture("olmo2", {**_LLAMA, **_POST_NORMS, **_HEAD_NORMS}, _olmo2, head="own"),
    "phi3": Architecture("phi3", _LLAMA, _phi3, factors=(SHORT, LONG), partial_rotary=True),
    "qwen2": Architecture("qwen2", _LLAMA),
    "qwen3": Architecture("qwen3", {**_LLAMA, **_HEAD_NORMS}, _qwen3),
    "qwen3moe": Architecture("qwen3_moe", {**_LLAMA, **_HEAD_NORMS, **_MIXTRAL}, _qwen3_moe),
    "seed_oss": Architecture(
        "seed_oss",
        {**_LLAMA, "post_attention_layernorm": "post_attention_norm"},
        _seed_oss,
    ),
    "smollm3": Architecture("smollm3", _LLAMA, _smollm3, pairs=True),
    "starcoder2": Architecture(
        "starcoder2",
        {**_LLAMA, "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"},
        _starcoder2,
        epsilon="attention.layer_norm_epsilon",
    ),
}
"""By `general.architecture`. Mistral and SmolLM 2, too, are stored as llama."""
