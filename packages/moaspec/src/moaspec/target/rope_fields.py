"""Fields of `rope_parameters` (`rope_scaling` in older configs), and why some are refused.

transformers warns of most faults and then fails somewhere else, or computes with them.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from moaspec_core.errors import UnknownModelError
from moaspec_core.tokens.names import FAMILIES

TYPES = ("default", *ROPE_INIT_FUNCTIONS)
OLDER_TYPES = {"phi3": ("su", "yarn")}  # names of LongRoPE in the first configs of a family

REQUIRED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}
LISTS = ("short_factor", "long_factor")
POSITIVE = (
    *("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    *("beta_fast", "beta_slow", "attention_factor", "rope_theta", "partial_rotary_factor"),
)
LAYER_TYPES = ("full_attention", "sliding_attention")


def require_rope(config: Mapping[str, Any], name: str) -> None:
    """Refuse wrong rotary embeddings of a supported family.

    Args:
        config: what `config.json` holds.

    Raises:
        UnknownModelError: names the field, what it is and what it must be.
    """
    family = config.get("model_type")
    if family not in FAMILIES:
        return
    for fault in _faults(config, str(family)):
        raise UnknownModelError(
            f"Cannot load the target {name!r}: in its config.json {fault}. Correct it as the "
            "model's card says."
        )


def _faults(config: Mapping[str, Any], family: str) -> Iterator[str]:
    """Yield each fault; only the first reaches the user."""
    length = config.get("max_position_embeddings", 1)
    if type(length) is not int or length <= 0:
        yield f"'max_position_embeddings' must be a positive integer, and it is {length!r}"
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    given = config.get(key) or {}
    if not isinstance(given, Mapping):
        yield f"{key!r} must be an object, and it is {given!r}"
    found = {f"{key}.{layer}": given[layer] for layer in LAYER_TYPES if layer in given}
    for path, parameters in (found or {key: given}).items():
        if not isinstance(parameters, Mapping | None):
            yield f"{path!r} must be an object, and it is {parameters!r}"
        theta = {key: config[key] for key in ("rope_theta",) if key in config}
        fields = {**theta, **(parameters or {})}
        for fault in _field_faults(fields, family, _rotary_size(config, fields)):
            yield f"{path}.{fault}"


def _field_faults(parameters: Mapping[str, Any], family: str, size: int | None) -> Iterator[str]:
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    older = OLDER_TYPES.get(family, ())
    if kind not in (*TYPES, *older):
        yield f"rope_type must be one of {', '.join(TYPES)}, and it is {kind!r}"
    kind = "longrope" if kind in older else kind
    for field in REQUIRED.get(kind, ()):
        if parameters.get(field) is None:
            yield f"{field} is missing, which the rope_type {kind!r} needs"
    for field in POSITIVE:
        value = parameters.get(field)
        absent = value is None and (field != "rope_theta" or field not in parameters)
        if not absent and not _is_positive(value):
            yield f"{field} must be a positive number, and it is {value!r}"
    if kind == "llama3" and parameters["low_freq_factor"] >= parameters["high_freq_factor"]:
        yield "high_freq_factor must be greater than low_freq_factor"
    for field in LISTS if kind == "longrope" else ():
        value = parameters[field]
        if not isinstance(value, list | tuple) or not all(map(_is_positive, value)):
            yield f"{field} must be a list of positive numbers, and it is {str(value)[:80]}"
        if size is not None and len(value) != size:
            given = len(value)
            yield f"{field} must have {size} numbers, half of a head's size, and it has {given}"


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value > 0


def _rotary_size(config: Mapping[str, Any], parameters: Mapping[str, Any]) -> int | None:
    """Number of frequencies of a head; None if the config does not say."""
    head_dim, heads = config.get("head_dim"), config.get("num_attention_heads")
    if not head_dim and heads and config.get("hidden_size"):
        head_dim = config["hidden_size"] // heads
    share = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    share = 1.0 if share is None else share
    if not isinstance(head_dim, int) or not _is_positive(share):
        return None
    return int(head_dim * share) // 2
