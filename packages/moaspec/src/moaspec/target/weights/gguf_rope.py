"""Rotary embeddings of GGUF files as `rope_parameters` of transformers.

Source: `ggml_rope_ext` of llama.cpp. It rotates by position / (factor_i * scale) * base^(-2i/d).
`rope_freqs.weight` holds factor_i, or `rope_factors_short` and `rope_factors_long` do for texts
within and beyond the trained length. YaRN interpolates along a ramp over the dimensions.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moaspec.target.weights.gguf_fields import Fields
from moaspec.target.weights.gguf_file import GGUFFile
from moaspec_core.errors import UnknownModelError

FACTORS = "rope_freqs.weight"
SHORT, LONG = "rope_factors_short.weight", "rope_factors_long.weight"
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_RAMP = {"fast": 32.0, "slow": 1.0}  # YaRN's usual ends, in turns over the trained length
_LLAMA3_LENGTHS = (8192, 4096, 16384, 32768, 131072)
_CLOSE = 2e-6  # float32 rounding of a few operations
_LARGEST_FACTOR = 1e6  # of scaling, or of its inverse
_EPSILON = 1e-6  # factors are stored in float32


@dataclass(frozen=True)
class Rotary:
    """What the scaling depends on beside its own fields."""

    head_dim: int
    context: int  # the model's context length
    factors: Collection[str]  # tensors that the architecture may have
    partial: bool  # whether a share of each head may be rotated
    own_yarn: bool  # whether the ramp and magnitude of YaRN are read


def rope_parameters(fields: Fields, file: GGUFFile, rotary: Rotary) -> dict[str, Any]:
    """Base, rotated share of a head, and scaling.

    Raises:
        UnknownModelError, UnsupportedTargetError: without the file's name.
    """
    base, context = fields.number("rope.freq_base", 10000.0, sign="positive"), rotary.context
    rotated = _rotated(fields, rotary)
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": base}
    if rotated != rotary.head_dim:
        parameters["partial_rotary_factor"] = rotated / rotary.head_dim
    given = {name for name in rotary.factors if name in file.tensors}
    if given & {SHORT, LONG}:
        return parameters | _by_length(fields, file, rotated // 2, context)
    kind = fields.raw("rope.scaling.type", "linear")
    factor = _factor(fields)
    if kind == "yarn" and FACTORS not in given:
        return parameters | _yarn(fields, factor, rotary)
    if kind not in ("none", "linear"):
        raise fields.refuse(
            "rope.scaling.type",
            "and moaspec reads none, linear and yarn"
            + (", without rope_freqs.weight" if kind == "yarn" else "")
            + f", and longrope where there are {SHORT} and {LONG}",
        )
    factor = 1.0 if kind == "none" else factor
    attention = fields.number("rope.scaling.attn_factor", 1.0, sign="positive")
    factors = _values(file, FACTORS, rotated // 2) if FACTORS in given else None
    if factors is not None and factor == attention == 1.0:
        return parameters | _by_factors(factors, base, rotated, context)
    if factors is not None or attention != 1.0:
        factors = torch.ones(rotated // 2) if factors is None else factors
        return parameters | same_factors((factors * factor).tolist(), context, attention)
    return parameters | ({} if factor == 1.0 else {"rope_type": "linear", "factor": factor})


def _rotated(fields: Fields, rotary: Rotary) -> int:
    head_dim = rotary.head_dim
    rotated = fields.integer("rope.dimension_count", head_dim)
    if rotated != head_dim and not rotary.partial:
        raise fields.refuse(
            "rope.dimension_count", f"and this architecture rotates all {head_dim} of a head"
        )
    if not 0 < rotated <= head_dim or rotated % 2:
        raise fields.damaged(
            "rope.dimension_count",
            f"must be an even number from 2 to {head_dim}, the dimensions of a head",
        )
    if int(head_dim * (rotated / head_dim)) != rotated:  # transformers computes it so
        raise fields.refuse("rope.dimension_count", f"which is no share of {head_dim} dimensions")
    return rotated


def _factor(fields: Fields) -> float:
    """Zero stands for no scaling."""
    found = 1.0
    for key in ("rope.scale_linear", "rope.scaling.factor"):
        found = fields.number(key, found, sign="not negative")
        if found and not 1 / _LARGEST_FACTOR <= found <= _LARGEST_FACTOR:
            raise fields.damaged(
                key, f"must be 0 or from {1 / _LARGEST_FACTOR:g} to {_LARGEST_FACTOR:g}"
            )
    return found or 1.0


def _values(file: GGUFFile, name: str, size: int) -> Tensor:
    found = file.tensors.get(name)
    if found is None or found.shape != (size,):
        is_ = "missing" if found is None else f"of shape {found.shape}"
        raise UnknownModelError(f"{name} is {is_}, and must have {size} values.")
    values = found.dequantised()
    wrong = values[~(values.isfinite() & (values > 0))]
    if len(wrong):
        raise UnknownModelError(
            f"its tensor {name} has the value {float(wrong[0]):g}, and all must be finite numbers "
            "above 0."
        )
    return values


def _by_length(fields: Fields, file: GGUFFile, size: int, context: int) -> dict[str, Any]:
    """LongRoPE: one set of factors within the trained length, another beyond it."""
    fields.raw("rope.scaling.type")
    if _factor(fields) != 1.0:
        raise fields.refuse("rope.scaling.factor", f"beside {LONG}")
    short, long = (_values(file, name, size).tolist() for name in (SHORT, LONG))
    trained = fields.integer("rope.scaling.original_context_length", context, least=2)
    parameters = {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": trained,
    }
    attention = fields.number("rope.scaling.attn_factor", 1.0, sign="positive")
    growth = context / trained if trained else 1.0
    usual = math.sqrt(1 + math.log(growth) / math.log(trained)) if growth > 1 else 1.0
    # The usual one is left to transformers, which computes it in double precision.
    if not math.isclose(attention, usual, rel_tol=_EPSILON):
        parameters["attention_factor"] = attention
    return parameters


def _yarn(fields: Fields, factor: float, rotary: Rotary) -> dict[str, Any]:
    trained = fields.integer("rope.scaling.original_context_length", rotary.context, least=1)
    if factor < 1:
        raise fields.damaged("rope.scaling.factor", "must be at least 1 for yarn")
    parameters: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": trained,
    }
    usual = 1.0 + 0.1 * math.log(factor) if factor > 1 else 1.0
    # Converters copy a config's `attention_factor` to it, and llama.cpp does not read it.
    _require_usual(fields, "yarn_attn_factor", (usual,))
    _require_usual(fields, "yarn_ext_factor", (1.0, -1.0))
    whole = 0.0
    if rotary.own_yarn:
        ramp = (key for key in ("beta_fast", "beta_slow") if f"rope.scaling.yarn_{key}" in fields)
        parameters |= {
            key: fields.number(f"rope.scaling.yarn_{key}", sign="positive") for key in ramp
        }
        fast, slow = (parameters.get(f"beta_{key}", usual) for key, usual in _RAMP.items())
        if fast < slow:
            named = "beta_fast" if "beta_fast" in parameters else "beta_slow"
            raise fields.damaged(
                f"rope.scaling.yarn_{named}",
                f"yarn_beta_fast ({fast:g}) must be at least yarn_beta_slow ({slow:g})",
            )
        whole = fields.number("rope.scaling.yarn_log_multiplier", 0.0)
    else:  # llama.cpp does not read them, and the model's own library may
        _require_usual(fields, "yarn_beta_fast", (32.0,))
        _require_usual(fields, "yarn_beta_slow", (1.0,))
    scale = fields.number("rope.scaling.attn_factor", 1.0, sign="positive")
    if scale != 1.0 or whole:
        whole = 1.0 + 0.1 * whole * math.log(factor) if factor > 1 else 1.0
        parameters["attention_factor"] = scale * usual / whole
    return parameters


def _require_usual(fields: Fields, name: str, usual: Sequence[float]) -> None:
    given = fields.number(f"rope.scaling.{name}", usual[0])
    if not any(math.isclose(given, value, rel_tol=1e-4) for value in usual):
        shown = " or ".join(f"{value:g}" for value in usual)
        raise fields.refuse(f"rope.scaling.{name}", f"and moaspec reads {shown}")


def _by_factors(factors: Tensor, base: float, rotated: int, context: int) -> dict[str, Any]:
    """The scaling of Llama 3 where it gives these factors, else the factors themselves."""
    largest = float(factors.max())
    if bool((factors == 1).all()):
        return {}
    for trained in _LLAMA3_LENGTHS:
        if torch.allclose(factors, _llama3(largest, trained, base, rotated), rtol=_CLOSE, atol=0):
            lengths = {"factor": largest, "original_max_position_embeddings": trained}
            return {"rope_type": "llama3", **lengths, **_LLAMA3}
    return same_factors(factors.tolist(), context)


def _llama3(factor: float, trained: int, base: float, rotated: int) -> Tensor:
    """The factors of Llama 3's scaling, (D / 2,)."""
    exponents = torch.arange(0, rotated, 2, dtype=torch.float64) / rotated
    turns = trained * base**-exponents / (2 * math.pi)  # over the trained length
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    share = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 / ((1 - share) / factor + share)).float()


def same_factors(factors: list[float], context: int, attention: float = 1.0) -> dict[str, Any]:
    """These factors at every length of text: LongRoPE with the same factors on both sides."""
    return {
        "rope_type": "longrope",
        "short_factor": factors,
        "long_factor": factors,
        "original_max_position_embeddings": context,
        "attention_factor": attention,
    }
