"""Conditions on config and class of a model before it becomes a `GenericTarget`.

No condition names a model type. `self_test` then decides.
"""

from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel

from moaspec.target.families import scaled_length
from moaspec.target.generic.pass_masks import NAMES
from moaspec_core.errors import UnsupportedTargetError

_STATE_SIZES = ("state_size", "ssm_state_size", "mamba_d_state", "mamba_d_ssm", "lru_width")
_ATTENTION_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
_STATE_TYPES = {"linear_attention", "conv", "hybrid", "mamba"}
"""Of layers with a recurrent or convolution state; hybrid ones attend as well."""
_STATELESS_TYPES = {"moe", "mlp"}
_REASONS: tuple[tuple[Callable[[Any], Any], str], ...] = (
    (
        lambda c: getattr(c, "is_encoder_decoder", False),
        "its decoder also reads the states of an encoder",
    ),
    (
        lambda c: getattr(c, "use_bidirectional_attention", None) in (True, "all"),
        "its attention is bidirectional, so it does not generate token by token",
    ),
    (
        lambda c: any(getattr(c, name, None) for name in _STATE_SIZES) and not _attends(c),
        "none of its layers keeps keys and values",
    ),
    (
        lambda c: _types(c) - _ATTENTION_TYPES - _STATE_TYPES - _STATELESS_TYPES,
        "it has layers that keep neither keys and values of every token nor a state that can be "
        "saved and restored",
    ),
    (
        lambda c: getattr(c, "keep_window_size", None),
        "its attention chooses keys by their content, so slots that a mask hides change the choice",
    ),
)


def text_config(config: Any) -> Any:
    """The config of a model's text part; its own where it has no other parts."""
    return config.get_text_config(decoder=True)


def text_model(model: Any) -> Any:
    """The model without its head: of a multimodal model, the text part."""
    found = model.get_decoder()
    while hasattr(found, "lm_head"):  # `get_decoder` of some models returns the model itself
        found = found.model
    return found


def require_generic(model: PreTrainedModel, name: str) -> None:
    """Raise UnsupportedTargetError for a model that departs from transformers' interfaces."""
    require_generic_config(model.config, name)
    config = text_config(model.config)
    implementation = config._attn_implementation
    if implementation not in (*NAMES, *NAMES.values()):
        raise UnsupportedTargetError(
            f"{name} was loaded with attn_implementation={implementation!r}; verifying a tree "
            "needs masks that only 'sdpa' and 'eager' take as they are. Load it with "
            "attn_implementation='sdpa', or 'eager' where transformers refuses that."
        )
    if getattr(model.get_output_embeddings(), "weight", None) is None:
        raise refusal(config, name, "it has no LM head that is one linear layer")


def require_generic_config(config: Any, name: str) -> None:
    """Refuse a model by its config alone: UnsupportedTargetError says why."""
    # A multimodal config may have fields about its text part that the part's config lacks.
    parts = {id(part): part for part in (config, text_config(config))}.values()
    for applies, reason in _REASONS:
        if any(applies(part) for part in parts):
            raise refusal(text_config(config), name, reason)


def refusal(config: Any, name: str, reason: str) -> UnsupportedTargetError:
    """The error for a model that is refused for this reason."""
    return UnsupportedTargetError(
        f"{name} is a {config.model_type!r} model and cannot be drafted for: {reason}. A drafter "
        "reads the keys and values of every token, and drafts are verified as a tree in one pass: "
        "docs/models.md says what that asks of a model, and lists models that were tested."
    )


def has_states(config: Any) -> bool:
    """Whether some layers keep a recurrent or convolution state."""
    return bool(_types(text_config(config)) & _STATE_TYPES)


def _types(config: Any) -> set[str]:
    """Kinds of layers; Zamba has them under a name of its own."""
    names = ("layer_types", "layers_block_type")
    return set(next((found for name in names if (found := getattr(config, name, None))), ()))


def _attends(config: Any) -> bool:
    return bool(_types(config) & {*_ATTENTION_TYPES, "hybrid"})


def context_length(config: Any) -> int:
    """Tokens of the longest text whose keys depend on positions alone.

    It ends where LongRoPE takes its long factors, dynamic NTK grows, or queries are scaled by the
    length of the cache: `forward` of a model computes a batch for one length only. Models with
    other scalings have the length of `families.context_length`.
    """
    length = int(config.max_position_embeddings)
    limits = [int(config.floor_scale) - 1] if uses_cache_length(config) else []
    given = getattr(config, "rope_parameters", None) or {}
    by_layer = [one for one in given.values() if isinstance(one, dict)]
    for rope in by_layer or [given]:
        kind = rope.get("rope_type", "default")
        if kind == "longrope":
            limits.append(int(rope["original_max_position_embeddings"]))
        limits.append(length if by_layer or kind == "dynamic" else scaled_length(length, rope))
    return min(limits)


def uses_cache_length(config: Any) -> bool:
    """Whether queries are scaled by the number of cached tokens (Llama 4).

    The scale is 1 below `floor_scale` tokens. Beyond, drafts of one tree would need one each.
    """
    return bool(getattr(config, "attn_temperature_tuning", None))


def head_rule(config: Any) -> tuple[float | None, float]:
    """Soft cap of the logits, or None, and the factor before it.

    The names are those of transformers' configs; the self-test compares the logits.
    """
    scale = getattr(config, "logit_scale", None) or 1.0
    factor = getattr(config, "lm_head_multiplier", None) or 1.0
    divisor = getattr(config, "logits_scaling", None) or 1.0
    cap = getattr(config, "final_logit_softcapping", None)
    return cap, float(scale) * float(factor) / float(divisor)
