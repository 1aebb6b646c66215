"""Rules of the supported model families, and refusals of other models.

The layers themselves are transformers'. The rules here say which layers have a sliding window, how
positions become rotary embeddings, and how weights are laid out.

Legend: B batch, T tokens.
"""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from moaspec.model.layers import CosSin
from moaspec.model.masks import text_mask, window_mask
from moaspec.target.rope_fields import require_rope
from moaspec_core.errors import UnsupportedTargetError
from moaspec_core.tokens.names import FAMILIES, SUPPORTED_FAMILIES

FULL, SLIDING = "full_attention", "sliding_attention"
_ROTARY_LOCK = Lock()
"""Held while a rotary module runs. LongRoPE's module stores which frequencies the current call
uses, so two threads sharing a target could get each other's."""

BY_POSITION = frozenset({"default", "linear", "llama3", "proportional", "yarn"})
"""Kinds of rotary embeddings that depend on a token's position alone."""

_PLAIN_PARTS = {
    "input_layernorm",
    "post_attention_layernorm",
    *(f"self_attn.{part}_proj" for part in "qkvo"),
    *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
}


def require_supported(config: Any, name: str) -> None:
    """Refuse a model that belongs to no family, or differs from its family.

    Raises:
        UnsupportedTargetError: says why, and what is supported.
        UnknownModelError: wrong rotary embeddings.
    """
    families = ", ".join(SUPPORTED_FAMILIES)
    if not is_family(config):
        raise UnsupportedTargetError(
            f"{name} is a {config.model_type!r} model. In vLLM only models of these families "
            f"can be drafted for: {families}. `moaspec.load_target` may run it otherwise: see "
            "docs/models.md."
        )
    reason = _refusal(config)
    if reason is not None:
        raise UnsupportedTargetError(
            f"{name} is a {config.model_type!r} model and cannot be drafted for: {reason}. A "
            f"drafter reads the keys and values of every token in every layer. Supported families: "
            f"{families}."
        )
    require_rope({**vars(config), "model_type": config.model_type}, name)


def is_family(config: Any) -> bool:
    """Whether a model belongs to a family of `moaspec_core.tokens.names`."""
    return config.model_type in FAMILIES


def _refusal(config: Any) -> str | None:
    if getattr(config, "use_bidirectional_attention", False):
        return "its attention is bidirectional, so it does not generate token by token"
    odd = set(getattr(config, "layer_types", None) or ()) - {FULL, SLIDING}
    return "it has layers that this family usually has not" if odd else None


def layer_types(config: Any) -> tuple[str, ...]:
    """FULL or SLIDING for every layer of a supported model."""
    windows = FAMILIES[config.model_type]
    if windows == "by_type":
        return tuple(config.layer_types)
    sliding = windows == "all" and config.sliding_window is not None
    return (SLIDING if sliding else FULL,) * int(config.num_hidden_layers)


def has_plain_inputs(config: Any) -> bool:
    """Whether all layers have full attention, and rotary embeddings by position alone."""
    return set(layer_types(config)) == {FULL} and keys_rotate_alike(config)


def keys_rotate_alike(config: Any) -> bool:
    """Whether the keys of all layers have the same rotary embeddings, by position alone."""
    if not is_family(config):
        return False
    shared = rope_by_type(config).get(None)
    return shared is not None and shared["rope_type"] in BY_POSITION


def rope_by_type(config: Any) -> dict[str | None, dict[str, Any]]:
    """`rope_parameters` by type of layer, without unused ones; by None if all types share them."""
    parameters = config.rope_parameters
    if FULL not in parameters:
        return {None: parameters}
    return {kind: parameters[kind] for kind in dict.fromkeys(config.layer_types)}


def rope_switches(config: Any) -> tuple[int, ...]:
    """Lengths of text beyond which the rotary embeddings of all its tokens change (LongRoPE)."""
    found = {_switch(parameters) for parameters in rope_by_type(config).values()}
    return tuple(sorted(switch for switch in found if switch is not None))


def _switch(parameters: Mapping[str, Any]) -> int | None:
    if parameters["rope_type"] != "longrope":
        return None
    return int(parameters["original_max_position_embeddings"])


def rope_growth(config: Any) -> int | None:
    """The trained length of a model with dynamic NTK; None for other models.

    Beyond it the frequencies of a token depend on the length of the text. In transformers all
    prompt tokens use the prompt's length, each later token uses the length of the text up to and
    including it, and cached keys stay unchanged.
    """
    grows = any(one["rope_type"] == "dynamic" for one in rope_by_type(config).values())
    return int(config.max_position_embeddings) if grows else None


def forget_growth(model: Any) -> None:
    """Reset the sequence length that transformers' dynamic NTK module remembers.

    Otherwise it rotates a prompt beyond the trained length with the frequencies of an earlier,
    longer text.
    """
    if not is_family(model.config) or rope_growth(model.config) is None:
        return  # texts of other models end where the frequencies would grow
    start = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    for kind in rope_by_type(model.config):
        options = {} if kind is None else {"layer_type": kind}
        model.base_model.rotary_emb(start.float(), start, **options)


def context_length(config: Any) -> int:
    """Tokens of the longest text.

    Model cards add a scaling of the rotary embeddings to a config and leave
    `max_position_embeddings` at the trained length. The context is then the scaled length.
    """
    length = int(config.max_position_embeddings)
    parameters = rope_by_type(config)
    # A config with a scaling for each layer type (Gemma 3) was released with the scaled length.
    return length if None not in parameters else scaled_length(length, parameters[None])


def scaled_length(length: int, parameters: Mapping[str, Any]) -> int:
    """The context length of a config with this length and these `rope_parameters`."""
    kind, factor = parameters.get("rope_type", "default"), parameters.get("factor") or 1.0
    trained = int(parameters.get("original_max_position_embeddings") or length)
    if kind in ("linear", "dynamic", "proportional"):
        return int(factor * length)
    # Configs of Llama 3 and Phi-3 have the scaled length, which may be less than factor x trained.
    # Those of Qwen 3, whose cards add YaRN, have a length between the two.
    if kind == "yarn" or (kind in ("llama3", "longrope") and length <= trained):
        return max(length, int(factor * trained))
    return length


def layer_masks(
    kinds: Collection[str], window: int | None, mask_B1TS: Tensor | None, position_ids_BT: Tensor
) -> dict[str, Tensor | None]:
    """The mask of each layer type, from that of FULL layers; None is plain causal attention."""
    masks = {FULL: mask_B1TS}
    if SLIDING in kinds:
        assert window is not None
        if mask_B1TS is None and position_ids_BT.shape[1] > window:
            mask_B1TS = text_mask(torch.ones_like(position_ids_BT))
        masks[SLIDING] = None if mask_B1TS is None else window_mask(mask_B1TS, window)
    return masks


class RotaryEmbeddings:
    """Cosines and sines of each layer type, as the model's own module computes them."""

    def __init__(self, module: Any, config: Any) -> None:
        self._module, self.parameters = module, rope_by_type(config)
        self._config = config

    def __call__(
        self, states_BTE: Tensor, position_ids_BT: Tensor, lengths_B: Tensor
    ) -> dict[str, CosSin]:
        """(B, T, D) each, by layer type.

        Args:
            states_BTE: gives dtype and device of the result.
            position_ids_BT: (B, T) int64.
            lengths_B: (B,) tokens of each row's whole text. LongRoPE chooses frequencies by them,
                so other rows and the chunks of a long prompt change nothing. For dynamic NTK,
                tokens of the prompt; see `rope_growth`.
        """
        result: dict[str, CosSin] = {}
        for kind in self.parameters:
            pair = self.angles(kind, states_BTE, position_ids_BT, lengths_B)
            result |= dict.fromkeys((FULL, SLIDING) if kind is None else (kind,), pair)
        return result

    def angles(
        self, kind: str | None, like: Tensor, position_ids_BT: Tensor, lengths_B: Tensor
    ) -> CosSin:
        """Cosines and sines of one layer type, or of all types if `kind` is None."""
        parameters = self.parameters[kind]
        if parameters["rope_type"] == "dynamic":
            cos, sin = self._by_growth(kind, position_ids_BT, lengths_B)
            return cos.to(like.dtype), sin.to(like.dtype)
        embed = partial(self.embed, kind, like)
        return _by_length(embed, position_ids_BT, lengths_B, _switch(parameters))

    def _by_growth(self, kind: str | None, position_ids_BT: Tensor, lengths_B: Tensor) -> CosSin:
        """Dynamic NTK: each token's length is that of the prompt, or of the text if longer.

        Transformers' module would also use lengths of earlier texts.
        """
        trained = int(self._config.max_position_embeddings)
        lengths_BT = torch.maximum(position_ids_BT + 1, lengths_B[:, None]).clamp(min=trained)
        lengths_N, index_BT = lengths_BT.unique(return_inverse=True)
        compute, device = ROPE_INIT_FUNCTIONS["dynamic"], position_ids_BT.device
        frequencies, scales = zip(
            *(
                compute(self._config, device, length if length > trained else None, kind)
                for length in lengths_N
            ),
            strict=True,
        )
        angles_BTD = position_ids_BT[..., None].float() * torch.stack(frequencies)[index_BT]
        angles_BTD = torch.cat((angles_BTD, angles_BTD), dim=-1)
        return angles_BTD.cos() * scales[0], angles_BTD.sin() * scales[0]

    def embed(self, kind: str | None, like: Tensor, position_ids_BT: Tensor) -> CosSin:
        """The output of the model's module."""
        options = {} if kind is None else {"layer_type": kind}
        with _ROTARY_LOCK:
            cos, sin = self._module(like, position_ids_BT, **options)
        return cos, sin


def _by_length(
    embed: Callable[[Tensor], CosSin],
    position_ids_BT: Tensor,
    lengths_B: Tensor,
    switch: int | None,
) -> CosSin:
    """Transformers picks LongRoPE's factors by the largest position of a call; pick by row."""
    if switch is None:
        return embed(position_ids_BT)
    beyond_B1 = torch.full_like(position_ids_BT[:, :1], switch)
    short = embed(position_ids_BT.clamp(max=switch - 1))
    long = embed(torch.cat((position_ids_BT, beyond_B1), dim=1))
    is_long = (lengths_B > switch)[:, None, None]
    cos, sin = (torch.where(is_long, b[:, :-1], a) for a, b in zip(short, long, strict=True))
    return cos, sin


def is_usual_norm(module: Any) -> bool:
    """Whether a norm is weight * x / rms(x); Gemma 3's weight is an offset from one, in float32."""
    return hasattr(module, "variance_epsilon")


def norm_rounds_late(module: Any) -> bool:
    """Whether the norm multiplies by its weight in float32 and rounds the product (OLMo 2).

    Others (Llama) round x / rms(x) before they multiply.
    """
    return type(module).__name__ == "Olmo2RMSNorm"


def plain_layer_state(config: Any, state: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """A decoder layer's weights under Llama's names, or None if it is built otherwise.

    Phi-3's fused projections are split. Layers with norms of queries and keys or with norms after
    attention and MLP (Qwen3, Gemma 3, OLMo 2) have no such form.
    """
    state = dict(state)
    if "self_attn.qkv_proj.weight" in state:
        state |= _split_fused(config, state)
    parts = {name.rpartition(".")[0] for name in state}
    return state if parts == _PLAIN_PARTS else None


def _split_fused(config: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Replace the two fused projections by query, key, value, gate and up projections."""
    qkv, gate_up = state.pop("self_attn.qkv_proj.weight"), state.pop("mlp.gate_up_proj.weight")
    groups = int(config.num_attention_heads) // int(config.num_key_value_heads)
    kv_rows = qkv.shape[0] // (groups + 2)
    query, key, value = qkv.split([groups * kv_rows, kv_rows, kv_rows])
    gate, up = gate_up.chunk(2)
    names = (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
    )
    parts = (query, key, value, gate, up)
    return {f"{name}.weight": part for name, part in zip(names, parts, strict=True)}
