"""SA's initial weights if the target's first layer has norms that SA lacks (Qwen3, Gemma, OLMo 2).

SA has a norm before its attention and one before its MLP. Each other norm is replaced by a factor
for each channel, its mean effect on sampled tokens, which is multiplied into the weights around it:

    norm of queries or keys               rows of the projection before it
    norm after attention, or after MLP    rows of `o_proj`, or `down_proj`
    no norm before attention, or MLP      SA's norm multiplies by the usual size of the states

Legend: C channels.
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from moaspec.target.target import Target
from moaspec.train.dataset.examples import Batch

_PROJECTIONS = {
    *(f"self_attn.{part}_proj" for part in "qkvo"),
    *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
}
_AFTER_ATTENTION, _AFTER_MLP = "post_attention_layernorm", "post_feedforward_layernorm"
_BEFORE_ATTENTION, _BEFORE_MLP = "input_layernorm", "pre_feedforward_layernorm"
_NORMS = {_AFTER_ATTENTION, _AFTER_MLP, _BEFORE_ATTENTION, _BEFORE_MLP}
_HEAD_NORMS = {"self_attn.q_norm": "self_attn.q_proj", "self_attn.k_norm": "self_attn.k_proj"}


@torch.no_grad()
def folded_layer_state(target: Target, batches: Iterable[Batch]) -> dict[str, Tensor] | None:
    """The target's first layer under Llama's names, further norms folded into its weights.

    Args:
        batches: examples for measuring the effects of norms.

    Returns:
        None if the layer has parts other than projections and these norms.
    """
    state = target.layer_state(0)
    parts = {name.rpartition(".")[0] for name in state}
    others = parts - _PROJECTIONS - _NORMS - set(_HEAD_NORMS)
    layers: Any = getattr(target.model.base_model, "layers", None)
    # Without a norm after attention, attention and MLP read the same states.
    if not parts >= _PROJECTIONS | {_AFTER_ATTENTION} or others or layers is None:
        return None
    layer = layers[0]
    factors = _measure(target, layer, parts, batches)
    rows = {  # the factor of each head's channels, for all rows of the projection
        proj: factors[norm].repeat(len(state[f"{proj}.weight"]) // len(factors[norm]))
        for norm, proj in _HEAD_NORMS.items()
        if norm in factors
    }
    attention = layer.self_attn
    size = target.head_dim
    score = getattr(attention, "scaling", size**-0.5) * size**0.5
    rows["self_attn.q_proj"] = score * rows.get("self_attn.q_proj", torch.ones(1).to(target.device))
    if _AFTER_MLP in factors:
        rows |= {
            "self_attn.o_proj": factors[_AFTER_ATTENTION],
            "mlp.down_proj": factors[_AFTER_MLP],
        }
    folded = {
        name: _scaled(tensor.float(), rows.get(name.rpartition(".")[0]))
        for name, tensor in state.items()
        if name.rpartition(".")[0] in _PROJECTIONS
    }
    folded[f"{_BEFORE_ATTENTION}.weight"] = factors["attention"].float()
    folded["post_attention_layernorm.weight"] = factors["mlp"].float()
    return folded


def _scaled(tensor: Tensor, rows: Tensor | None) -> Tensor:
    """A weight, or a bias, with its rows multiplied."""
    if rows is None:
        return tensor
    return tensor * rows.float().reshape(-1, *[1] * (tensor.ndim - 1))


def _measure(
    target: Target, layer: Any, parts: set[str], batches: Iterable[Batch]
) -> dict[str, Tensor]:
    """Factors of each norm by its name, and the inputs of "attention" and "mlp" for unit states.

    They are least-squares factors of each channel between two activations.
    """
    sums: dict[str, tuple[Tensor, Tensor]] = {}

    def add(name: str, given: Tensor, got: Tensor) -> None:
        given, got = (x.detach().flatten(0, -2).double() for x in (given, got))
        product, square = sums.get(name, (0.0, 0.0))
        sums[name] = product + (given * got).sum(0), square + given.square().sum(0)

    before_mlp = _BEFORE_MLP if _BEFORE_MLP in parts else _AFTER_ATTENTION
    if _AFTER_MLP in parts and before_mlp == _AFTER_ATTENTION:
        before_mlp = ""
    entered: dict[str, Tensor] = {}

    def norm(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            entered[name] = inputs[0]
            add(name, inputs[0], output)

        return hook

    def projection(name: str, before: str) -> Callable[..., None]:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...], __: Tensor) -> None:
            states = entered.get(before, inputs[0]).float()
            unit = states / states.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-6)
            add(name, unit, inputs[0])

        return hook

    hooks = {name: norm(name) for name in parts if name in _NORMS or name in _HEAD_NORMS}
    hooks["self_attn.q_proj"] = projection("attention", _BEFORE_ATTENTION)
    hooks["mlp.gate_proj"] = projection("mlp", before_mlp)
    with ExitStack() as stack:
        # Accelerated layers run module by module if they have hooks of their own.
        stack.callback(layer.register_forward_hook(lambda *_: None).remove)
        for name, hook in hooks.items():
            stack.callback(layer.get_submodule(name).register_forward_hook(hook).remove)
        for batch in batches:
            target.capture(batch.input_ids_BT, batch.attention_mask_BT)
    return {name: product / square.clamp(min=1e-12) for name, (product, square) in sums.items()}
