"""The arithmetic of a decoder layer in few calls.

A pass over a few tokens is short: on a CPU, half of it would go into the many small operations of
transformers' layers. These compute the same numbers from the same modules' weights: projections of
one input at once, rotary embeddings of queries and keys together, masks prepared once per pass, and
no copies of keys and values for the query heads that share them.

Legend: B batch, T new tokens, S visible keys, H query heads, J KV heads, G = H / J, D head dim,
R rotated dims, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from moaspec.model.layers import fold_mask, masked_attention, merge_heads
from moaspec.target.packing import joint_product

Norm = Callable[[Tensor], Tensor]


class Tap(Protocol):
    """Transformers' cache interface, as far as a layer uses it."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int
    ) -> tuple[Tensor, Tensor]:
        """Store new keys and values, each (B, J, T, D); give back those to read, (B, J, S, D)."""
        ...


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What layers of one type share in a pass.

    Attributes:
        cos_BT1R: cosines.
        sin_BT1R: sines, those of the first half of R negated.
        mask: added to scores, (B, 1, T, S), folded where that can be (see `fold_mask`); None is
            plain causal attention.
    """

    cos_BT1R: Tensor
    sin_BT1R: Tensor
    mask: Tensor | None

    @classmethod
    def of(
        cls,
        cos_sin: tuple[Tensor, Tensor],
        mask_B1TS: Tensor | None,
        groups: int,
        dtype: torch.dtype,
    ) -> Reading:
        """From transformers' cosines and sines, (B, T, R), and a boolean mask.

        Args:
            cos_sin: of the new tokens.
            mask_B1TS: True where a token may attend; None for plain causal attention.
            groups: G.
            dtype: of queries.
        """
        cos_BTR, sin_BTR = cos_sin
        first, second = sin_BTR.chunk(2, dim=-1)
        mask = None
        if mask_B1TS is not None:
            added = cos_BTR.new_zeros(mask_B1TS.shape, dtype=dtype)
            added.masked_fill_(~mask_B1TS, -torch.inf)
            mask = fold_mask(added, cos_BTR.shape[1], groups)
        return cls(
            cos_BT1R=cos_BTR[:, :, None],
            sin_BT1R=torch.cat((-first, second), dim=-1)[:, :, None],
            mask=mask,
        )

    def rotate(self, x_BTHD: Tensor) -> Tensor:
        """Rotary embedding of the first R numbers of each head."""
        rotated = self.cos_BT1R.shape[-1]
        if rotated < x_BTHD.shape[-1]:
            head, rest = x_BTHD[..., :rotated], x_BTHD[..., rotated:]
            return torch.cat((self.rotate(head), rest), dim=-1)
        halves_swapped = x_BTHD.roll(rotated // 2, -1)
        rotated_BTHD = torch.addcmul(x_BTHD * self.cos_BT1R, halves_swapped, self.sin_BT1R)
        return rotated_BTHD.to(x_BTHD.dtype)  # OLMo 2's cosines are float32


class LeanLayer:
    """Stands in for the `forward` of one of transformers' decoder layers.

    Called with a `Reading` it computes by itself; called in any other way, it passes the call to
    the layer's own `forward`, so that the model keeps working as its users know it. As the
    layer itself is still what is called, forward hooks on it see every pass.

    Args:
        layer: of a supported family, in evaluation mode.
    """

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._own_forward = layer.forward
        self._index, self._scale = attention.layer_idx, attention.scaling
        self._head_dim = attention.head_dim
        self._num_kv_heads = attention.config.num_key_value_heads
        self._num_heads = attention.config.num_attention_heads
        self._qkv = joint_product(_found(attention, ("qkv_proj",), ("q_proj", "k_proj", "v_proj")))
        self._output = joint_product([attention.o_proj])
        # Norms of queries and keys: both or neither.
        self._q_norm: Any = getattr(attention, "q_norm", None)
        self._k_norm: Any = getattr(attention, "k_norm", None)
        self._gate_up = joint_product(_found(mlp, ("gate_up_proj",), ("gate_proj", "up_proj")))
        self._down = joint_product([mlp.down_proj])
        self._act = getattr(mlp, "act_fn", None) or mlp.activation_fn
        self._norms = _norms_around(layer)

    def __call__(
        self, states_BTE: Tensor, *args: Any, reading: Reading | None = None, **kwargs: Any
    ) -> Any:
        if reading is None:
            return self._own_forward(states_BTE, *args, **kwargs)
        return self._forward(states_BTE, reading, kwargs["past_key_values"])

    def _forward(self, x_BTE: Tensor, reading: Reading, tap: Tap) -> Tensor:
        before_read, after_read, before_mlp, after_mlp = self._norms
        x_BTE = x_BTE + after_read(self._attend(before_read(x_BTE), reading, tap))
        return x_BTE + after_mlp(self._mlp(before_mlp(x_BTE)))

    def _attend(self, x_BTE: Tensor, reading: Reading, tap: Tap) -> Tensor:
        query_BTHD, key_BTJD, value_BTJD = self._projected(x_BTE, reading)
        key_BJSD, value_BJSD = tap.update(
            key_BTJD.transpose(1, 2), value_BTJD.transpose(1, 2), self._index
        )
        read_BHTD = masked_attention(
            query_BTHD.transpose(1, 2),
            key_BJSD,
            value_BJSD,
            reading.mask,
            scale=self._scale,
            causal=reading.mask is None,
        )
        return self._output(merge_heads(read_BHTD))

    def _projected(self, x_BTE: Tensor, reading: Reading) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values; by token, then head."""
        H, J, D = self._num_heads, self._num_kv_heads, self._head_dim
        joined = self._qkv(x_BTE)
        if self._q_norm is not None:
            joined = self._with_norms(joined)
        heads = joined.unflatten(-1, (H + 2 * J, D))
        rotated = reading.rotate(heads[:, :, : H + J])
        return rotated[:, :, :H], rotated[:, :, H:], heads[:, :, H + J :]

    def _with_norms(self, joined: Tensor) -> Tensor:
        """Normalise queries and keys: each head (Qwen3, Gemma 3), or all heads at once (OLMo 2)."""
        H, J, D = self._num_heads, self._num_kv_heads, self._head_dim
        query, key, value = joined.split((H * D, J * D, J * D), dim=-1)
        if self._q_norm.weight.shape[0] == D:
            query = self._q_norm(query.unflatten(-1, (H, D))).flatten(-2)
            key = self._k_norm(key.unflatten(-1, (J, D))).flatten(-2)
        else:
            query, key = self._q_norm(query), self._k_norm(key)
        return torch.cat((query, key, value), dim=-1)

    def _mlp(self, x_BTE: Tensor) -> Tensor:
        gate, up = self._gate_up(x_BTE).chunk(2, dim=-1)
        return self._down(self._act(gate) * up)


def make_lean(layers: Iterable[Any]) -> None:
    """Let decoder layers compute as `LeanLayer` does, where they are asked to."""
    for layer in layers:
        layer.forward = LeanLayer(layer)


def _found(module: nn.Module, joined: tuple[str, ...], apart: tuple[str, ...]) -> list[nn.Module]:
    names = joined if hasattr(module, joined[0]) else apart
    return [getattr(module, name) for name in names]


def _norms_around(layer: Any) -> tuple[Norm, Norm, Norm, Norm]:
    """Norms before and after attention, before and after the MLP."""
    inner = hasattr(layer, "post_feedforward_layernorm")
    before_mlp = "pre_feedforward_layernorm" if inner else "post_attention_layernorm"
    names = (
        "input_layernorm",
        "post_attention_layernorm" if inner else "",
        before_mlp,
        "post_feedforward_layernorm",
    )
    before, after, middle, end = (_norm(getattr(layer, name, None)) for name in names)
    return before, after, middle, end


def _norm(module: Any) -> Norm:
    """RMSNorm in one call where the module is the usual one, rounded exactly where it rounds."""
    if module is None:
        return _unchanged
    eps = getattr(module, "variance_epsilon", None)
    if eps is None:  # Gemma 3: the weight is an offset from one, in float32
        return cast(Norm, module)
    return _RMSNorm(module.weight, eps, rounds_late=type(module).__name__ == "Olmo2RMSNorm")


class _RMSNorm:
    """RMSNorm in few calls, rounded exactly where transformers' module rounds.

    Args:
        weight: (E,).
        eps: added to the mean square.
        rounds_late: whether the product with the weight is rounded, instead of its factor.
    """

    def __init__(self, weight: Tensor, eps: float, *, rounds_late: bool) -> None:
        self._weight, self._rounds_late = weight, rounds_late
        self._share = 1.0 / weight.shape[0]
        self._eps = torch.tensor(eps, dtype=torch.float32, device=weight.device)

    def __call__(self, x_BTE: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x_BTE, dim=-1, keepdim=True, dtype=torch.float32)
        scale = torch.addcmul(self._eps, length, length, value=self._share).rsqrt_()
        normed = x_BTE * scale
        if self._rounds_late:
            return (normed * self._weight).to(x_BTE.dtype)
        return normed.to(x_BTE.dtype) * self._weight


def _unchanged(x_BTE: Tensor) -> Tensor:
    return x_BTE
