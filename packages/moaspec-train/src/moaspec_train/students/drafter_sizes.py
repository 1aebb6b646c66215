"""Sizes of a new drafter, and its config from these sizes and the target."""

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator

from moaspec.model.baselines import KINDS, StackConfig
from moaspec.model.moa import MoADrafter
from moaspec.target.target import Target
from moaspec_core.checkpoint.drafter_config import (
    DrafterConfig,
    LayerConfig,
    activation_name,
    inner_size,
    norm_eps,
    text_rope,
)
from moaspec_core.errors import InputError

WIDTH_UNIT = 64  # MLP widths chosen by `sizes.parameters` are multiples of it, for fast products
_UNITS = {"k": 10**3, "M": 10**6, "B": 10**9}


def _parse_count(value: Any) -> Any:
    """250M as 250,000,000; anything else as it is."""
    found = re.fullmatch(r"([0-9.]+)\s*([kMB])", value) if isinstance(value, str) else None
    return value if found is None else int(float(found[1]) * _UNITS[found[2]])


@dataclass(frozen=True, kw_only=True)
class DrafterSizes:
    """Sizes of a new drafter; 0 derives them from the target.

    Attributes:
        parameters: most trainable parameters, as 250000000 or "250M"; all layers of SA and CA then
            get MLPs of the largest width within it, the same for all.
        lsa_heads: query heads of LSA; default: K / target head dim. Must divide K.
        lsa_kv_heads: key and value heads of LSA.
        lsa_intermediate: MLP width of LSA; default K.
        sa_layers: layers of SA; default 1, as in the paper. Those after the first are the identity
            at first.
        sa_intermediate, ca_intermediate: MLP widths; default: the target's.
        sa_kv_heads, ca_kv_heads: default: the target's.
        draft_vocab: size of the trimmed draft vocabulary; 0 keeps the full one.
        publishable: give LSA the target's number of heads, as `moaspec checkpoint convert` needs,
            and refuse settings that cannot be converted.
        layers: layers of an independent drafter.
        without: parts to leave out in an ablation; see `DrafterConfig`.
    """

    parameters: Annotated[int, BeforeValidator(_parse_count)] = 0
    lsa_heads: int = 0
    lsa_kv_heads: int = 0
    lsa_intermediate: int = 0
    sa_layers: int = 0
    sa_intermediate: int = 0
    sa_kv_heads: int = 0
    ca_intermediate: int = 0
    ca_kv_heads: int = 0
    draft_vocab: int = 0
    publishable: bool = False
    layers: int = 2
    without: tuple[Literal["lsa", "sa", "ca"], ...] = ()

    def __post_init__(self) -> None:
        if self.parameters and (self.sa_intermediate or self.ca_intermediate):
            raise InputError(
                "sizes.parameters chooses sa_intermediate and ca_intermediate: leave these out."
            )


def _widest(sizes: DrafterSizes, make: Callable[[DrafterSizes], torch.nn.Module]) -> DrafterSizes:
    """The sizes with the largest MLP widths within `sizes.parameters`; unchanged if that is 0.

    Args:
        make: builds a drafter of these sizes; its parameters are linear in the widths.

    Raises:
        InputError: the drafter is larger than that with the narrowest MLPs.
    """
    if not sizes.parameters:
        return sizes

    def at(width: int) -> DrafterSizes:
        return dataclasses.replace(
            sizes, parameters=0, sa_intermediate=width, ca_intermediate=width
        )

    with torch.device("meta"):
        narrowest, next_one = (sum(p.numel() for p in make(at(w)).parameters()) for w in (1, 2))
    width = 1 + (sizes.parameters - narrowest) // (next_one - narrowest)
    if width < 1:
        raise InputError(
            f"sizes.parameters={sizes.parameters:,}: with this target the attentions alone have "
            f"{narrowest:,}. Give more, or lower sizes.lsa_intermediate."
        )
    return at(width - width % WIDTH_UNIT if width > WIDTH_UNIT else width)


def stack_config(target: Target, sizes: DrafterSizes, kind: str) -> StackConfig:
    """Config of a new baseline drafter: the target's layers with the widths of `sizes.sa_*`."""
    sizes = _widest(sizes, lambda one: KINDS[kind](stack_config(target, one, kind)))
    shape = drafter_config(target, sizes)
    return StackConfig(
        layer=dataclasses.replace(shape.self_attention, qkv_bias=False, o_bias=False),
        num_layers=sizes.layers if kind == "independent" else 1,
        rms_norm_eps=shape.rms_norm_eps,
        hidden_act=shape.hidden_act,
        rope_parameters=shape.rope_parameters,
        max_position_embeddings=shape.max_position_embeddings,
        target=target.identity,
    )


def drafter_config(
    target: Target, sizes: DrafterSizes, num_target_layers: tuple[int, ...] = (0,)
) -> DrafterConfig:
    """Config of a new drafter; InputError for sizes or reused layers that do not fit the target."""
    sizes = _widest(sizes, lambda one: MoADrafter(drafter_config(target, one, num_target_layers)))
    config, identity = target.config, target.identity
    head_dim = target.head_dim
    usual_heads = identity.kv_size // head_dim
    if sizes.publishable:
        usual_heads = int(config.num_attention_heads)
    lsa_heads = sizes.lsa_heads or usual_heads
    if identity.kv_size % lsa_heads:
        raise InputError(
            f"lsa_heads={lsa_heads} does not divide K={identity.kv_size}. Choose a divisor."
        )
    if max(num_target_layers) > target.num_reusable_layers:
        raise InputError(
            f"num_target_layers={num_target_layers}: the target has {target.num_layers} layers, of "
            f"which {target.num_reusable_layers} can be reused. Ask for as many at most."
        )

    first_layer = target.layer_state(0)

    def text_layer(intermediate: int, kv_heads: int, *, biases: bool) -> LayerConfig:
        return LayerConfig(
            hidden_size=identity.hidden_size,
            num_heads=int(config.num_attention_heads),
            num_kv_heads=kv_heads or target.num_kv_heads,
            head_dim=target.draft_head_dim,
            intermediate_size=intermediate or inner_size(config),
            qkv_bias=biases and "self_attn.q_proj.bias" in first_layer,
            o_bias=biases and "self_attn.o_proj.bias" in first_layer,
            mlp_bias=biases and "mlp.gate_proj.bias" in first_layer,
        )

    rope_parameters = text_rope(config)
    return DrafterConfig(
        hidden_size=identity.hidden_size,
        kv_size=identity.kv_size,
        layer_self_attention=LayerConfig(
            hidden_size=identity.kv_size,
            num_heads=lsa_heads,
            num_kv_heads=sizes.lsa_kv_heads or lsa_heads,
            head_dim=identity.kv_size // lsa_heads,
            intermediate_size=sizes.lsa_intermediate or identity.kv_size,
            qkv_bias=True,
        ),
        self_attention=text_layer(sizes.sa_intermediate, sizes.sa_kv_heads, biases=True),
        cross_attention=text_layer(sizes.ca_intermediate, sizes.ca_kv_heads, biases=False),
        self_attention_layers=sizes.sa_layers or 1,
        rms_norm_eps=norm_eps(config),
        hidden_act=activation_name(config),
        rope_theta=float(rope_parameters["rope_theta"]),
        rope_parameters=rope_parameters,
        max_position_embeddings=int(config.max_position_embeddings),
        num_target_layers=num_target_layers,
        target=identity,
        without=sizes.without,
    )
