"""Access to the fields of a GGUF's architecture, which records what was used."""

import math
from collections.abc import Mapping
from typing import Any, Literal

from moaspec_core.errors import UnknownModelError, UnsupportedTargetError

IRRELEVANT = frozenset(
    {
        "tensor_data_layout",
        "pooling_type",
        "rope.scaling.finetuned",  # says how a model was trained; Granite's reader reads it
        "attention.layer_norm_epsilon",  # a reader has taken the epsilon of its norms
        "attention.layer_norm_rms_epsilon",
        "rope.scaling.original_context_length",  # a scaling that needs it has taken it
        "use_parallel_residual",  # only GPT-NeoX has both forms
    }
)
"""Fields that change nothing where no reader took them."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.scale": (0,),
    "attention.shared_kv_layers": (0,),
    "attention.sliding_window": (0,),
    "attention.temperature_scale": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "expert_feed_forward_length": (0,),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_shared_feed_forward_length": (0,),
    "expert_used_count": (0,),
    "expert_weights_norm": (False,),
    "expert_weights_scale": (0, 1),
    "final_logit_softcapping": (0,),
    "leading_dense_block_count": (0,),
    "logit_scale": (0, 1),
    "nextn_predict_layers": (0,),
    "residual_scale": (0, 1),
    "rope.scaling.yarn_ext_factor": (0, -1),
    "rope.scaling.yarn_log_multiplier": (0,),
    "rope.scaling.attn_factor": (1,),
}
"""Values with which a field that no reader took changes nothing."""


WAY_OUT = "Name the original model's directory or hub id instead of the GGUF file."
"""Where a file is sound, and not supported."""

PER_LAYER = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
"""Fields that may have a list of one value for each layer."""


class Fields:
    """The fields `<architecture>.*`, by their names without the architecture.

    Args:
        fields: all fields of the file.
    """

    def __init__(self, fields: Mapping[str, Any], architecture: str) -> None:
        self._prefix = f"{architecture}."
        start = len(self._prefix)
        self._values = {k[start:]: v for k, v in fields.items() if k.startswith(self._prefix)}
        self._unused = set(self._values)

    def integer(self, key: str, default: int | None = None, *, least: int = 0) -> int:
        """A whole number; of a list with one value for each layer, the value of all.

        Args:
            least: that a file may have; a default may be less.

        Raises:
            UnknownModelError: it is missing without a default, or no such number.
            UnsupportedTargetError: layers differ.
        """
        value = self._taken(key, default)
        if type(value) is not int or (value < least and key in self):
            raise self.damaged(key, f"must be a whole number of at least {least}")
        return value

    def number(
        self,
        key: str,
        default: float | None = None,
        *,
        sign: Literal["any", "positive", "not negative"] = "any",
    ) -> float:
        """A finite number; see `integer`."""
        value = self._taken(key, default)
        fits = type(value) in (int, float) and math.isfinite(value)
        if not fits or (value < 0 and sign != "any") or (value == 0 and sign == "positive"):
            asked = {"any": "", "positive": " above 0", "not negative": " of at least 0"}[sign]
            raise self.damaged(key, f"must be a finite number{asked}")
        return float(value)

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def raw(self, key: str, default: Any = None) -> Any:
        """Any value, as it is."""
        self._unused.discard(key)
        return self._values.get(key, default)

    def _taken(self, key: str, default: Any) -> Any:
        value = self.raw(key, default)
        if value is None:
            raise UnknownModelError(f"it has no field {self._prefix}{key}.")
        if not isinstance(value, list) or key not in PER_LAYER:
            return value
        if len(set(value)) != 1:
            raise UnsupportedTargetError(
                f"its layers differ in {self._prefix}{key} ({str(value)[:60]}). {WAY_OUT}"
            )
        return value[0]

    def require_length(self, layers: int) -> None:
        """Raises UnknownModelError if a list of the layers' values has another length."""
        for key in PER_LAYER:
            value = self._values.get(key)
            if isinstance(value, list) and len(value) != layers:
                raise self.damaged(key, f"must have one value for each of {layers} layers")

    def _is_wide_window(self, key: str) -> bool:
        return key == "attention.sliding_window" and (
            self.integer(key) >= self.integer("context_length")
        )

    def damaged(self, key: str, asked: str) -> UnknownModelError:
        """The refusal of a value that no file may have."""
        shown = repr(self._values.get(key))[:60]
        return UnknownModelError(f"its field {self._prefix}{key} is {shown}, and {asked}.")

    def refuse(self, key: str, why: str) -> UnsupportedTargetError:
        """The refusal of a value that other readers know."""
        shown = str(self._values.get(key))[:60]
        return UnsupportedTargetError(f"its field {self._prefix}{key} is {shown}, {why}. {WAY_OUT}")

    def require_all_used(self) -> None:
        """Refuse fields that no reader took, unless they change nothing.

        Raises:
            UnsupportedTargetError: names the first.
        """
        for key in sorted(self._unused - IRRELEVANT):
            value = self._values[key]
            if not _is_neutral(key, value) and not self._is_wide_window(key):
                raise self.refuse(
                    key,
                    "which moaspec does not know for this architecture and could compute wrongly "
                    "without",
                )


def _is_neutral(key: str, value: Any) -> bool:
    """A number is no truth value: llama.cpp refuses the one for the other."""
    return any(
        value == one and isinstance(value, bool) == isinstance(one, bool)
        for one in NEUTRAL.get(key, ())
    )
