"""The arithmetic of a decoder layer in few calls.

A pass over a few tokens is short: on a CPU, half of it would go into the many small operations of
transformers' layers. These compute the same numbers from the same modules' weights: projections of
one input at once, rotary embeddings of queries and keys together, masks prepared once per pass, and
no copies of keys and values for the query heads that share them. If `moaspec.backends.cpu` has the
weights, and the layer is built like Llama's, all of it but the attention is two calls.

Legend: B batch, T new tokens, S visible keys, H query heads, J KV heads, G = H / J, D head dim,
R rotated dims, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn

from moaspec.backends.cpu.cpu_attention import MAX_ATTENDED, fast_attention
from moaspec.backends.cpu.fused_layers import FusedLayer, FusedNorm, FusedStack
from moaspec.backends.cpu.matrix import Matrix
from moaspec.backends.pack import is_silu, joint_matrix, joint_product
from moaspec.model.layers import fold_mask, merge_heads
from moaspec.target import families
from moaspec.target.decoder_layers import KVCapture, cache_argument

Norm = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class AttentionInputs:
    """Inputs that all layers of one type share in a pass."""

    cos_BTR: Tensor  # cosines; float32 for kernels
    sin_BTR: Tensor  # sines; float32 for kernels
    # Added to scores, (B, 1, T, S), folded where that can be (see `fold_mask`), or boolean where
    # kernels attend; None is plain causal attention.
    mask: Tensor | None

    @classmethod
    def of(
        cls,
        cos_sin: tuple[Tensor, Tensor],
        mask_B1TS: Tensor | None,
        groups: int,
        dtype: torch.dtype,
        *,
        fused: bool,
    ) -> AttentionInputs:
        """From transformers' cosines and sines, (B, T, R), and a boolean mask.

        Args:
            cos_sin: of the new tokens; float32 where `fused`.
            mask_B1TS: True where a token may attend; None for plain causal attention.
        """
        cos_BTR, sin_BTR = (part.contiguous() for part in cos_sin)
        mask = mask_B1TS
        if mask_B1TS is not None and not (fused and mask_B1TS.shape[2] <= MAX_ATTENDED):
            added = cos_BTR.new_zeros(mask_B1TS.shape, dtype=dtype)
            added.masked_fill_(~mask_B1TS, -torch.inf)
            mask = fold_mask(added, cos_BTR.shape[1], groups)
        return cls(cos_BTR=cos_BTR, sin_BTR=sin_BTR, mask=mask)

    @cached_property
    def _turn(self) -> tuple[Tensor, Tensor]:
        """Cosines, and sines with those of the first half of R negated, (B, T, 1, R) each."""
        first, second = self.sin_BTR.chunk(2, dim=-1)
        return self.cos_BTR[:, :, None], torch.cat((-first, second), dim=-1)[:, :, None]

    def rotate(self, x_BTHD: Tensor) -> Tensor:
        """Rotary embedding of the first R numbers of each head."""
        cos_BT1R, sin_BT1R = self._turn
        rotated = cos_BT1R.shape[-1]
        if rotated < x_BTHD.shape[-1]:
            head, rest = x_BTHD[..., :rotated], x_BTHD[..., rotated:]
            return torch.cat((self.rotate(head), rest), dim=-1)
        halves_swapped = x_BTHD.roll(rotated // 2, -1)
        rotated_BTHD = torch.addcmul(x_BTHD * cos_BT1R, halves_swapped, sin_BT1R)
        return rotated_BTHD.to(x_BTHD.dtype)  # OLMo 2's cosines are float32


class FastLayer:
    """Stands in for the `forward` of one of transformers' decoder layers.

    Called with `AttentionInputs` it computes by itself. Any other call goes to the layer's own
    `forward`, so other users of the model see no change. Forward hooks on the layer still run.

    Args:
        layer: of a supported family, in evaluation mode.

    Attributes:
        fused: the layer as kernels compute it, or None.
    """

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._own_forward, self._cache_argument = layer.forward, cache_argument(layer)
        self._index, self.scale = attention.layer_idx, attention.scaling
        self._head_dim = attention.head_dim
        self._num_kv_heads = attention.config.num_key_value_heads
        self._num_heads = attention.config.num_attention_heads
        self._splits = (self._num_heads, self._num_kv_heads, self._num_kv_heads)
        groups = (
            _found(attention, "qkv_proj", "q_proj", "k_proj", "v_proj"),
            [attention.o_proj],
            _found(mlp, "gate_up_proj", "gate_proj", "up_proj"),
            [mlp.down_proj],
        )
        self._qkv, self._output, self._gate_up, self._down = map(joint_product, groups)
        # Norms of queries and keys: both or neither.
        self._q_norm: Any = getattr(attention, "q_norm", None)
        self._k_norm: Any = getattr(attention, "k_norm", None)
        self._act = getattr(mlp, "act_fn", None) or mlp.activation_fn
        self._norms = _norms_around(layer)
        self.fused = self._as_fused([joint_matrix(parts) for parts in groups])

    def __call__(
        self, states_BTE: Tensor, *args: Any, inputs: AttentionInputs | None = None, **kwargs: Any
    ) -> Any:
        if inputs is None:
            return self._own_forward(states_BTE, *args, **kwargs)
        return self._forward(states_BTE, inputs, kwargs[self._cache_argument])

    def _as_fused(self, matrices: Sequence[Matrix | None]) -> FusedLayer | None:
        before_read, after_read, before_mlp, after_mlp = self._norms
        of_heads = (
            () if self._q_norm is None else (fast_norm(self._q_norm), fast_norm(self._k_norm))
        )
        norms = _plain((before_read, before_mlp, *of_heads))
        if (
            norms is None
            or (after_read, after_mlp) != (_unchanged, _unchanged)
            or any(len(norm.weight) != self._head_dim for norm in norms[2:])
            or not is_silu(self._act)
        ):
            return None
        return FusedLayer.of(
            matrices,
            norms=[norm.weight for norm in norms[:2]],
            head_norms=[norm.weight for norm in norms[2:]] or None,
            eps=norms[0].eps,
            heads=(self._num_heads, self._num_kv_heads),
            head_dim=self._head_dim,
        )

    def _forward(self, x_BTE: Tensor, inputs: AttentionInputs, cache: KVCapture) -> Tensor:
        if self.fused is not None and not x_BTE.requires_grad:
            heads_BTXD = self.fused.project(x_BTE, inputs.cos_BTR, inputs.sin_BTR)
            parts = heads_BTXD.split(self._splits, dim=2)
            return self.fused.finish(x_BTE, self._attend(parts, inputs, cache))
        before_read, after_read, before_mlp, after_mlp = self._norms
        x_BTE = x_BTE + after_read(self._attention(before_read(x_BTE), inputs, cache))
        gate, up = self._gate_up(before_mlp(x_BTE)).chunk(2, dim=-1)
        return x_BTE + after_mlp(self._down(self._act(gate) * up))

    def _attention(self, x_BTE: Tensor, inputs: AttentionInputs, cache: KVCapture) -> Tensor:
        H, J, D = self._num_heads, self._num_kv_heads, self._head_dim
        joined = self._qkv(x_BTE)
        if self._q_norm is not None:
            joined = self._with_norms(joined)
        heads = joined.unflatten(-1, (H + 2 * J, D))
        rotated = inputs.rotate(heads[:, :, : H + J])
        parts = (rotated[:, :, :H], rotated[:, :, H:], heads[:, :, H + J :])
        return self._output(self._attend(parts, inputs, cache))

    def _attend(self, parts: Sequence[Tensor], inputs: AttentionInputs, cache: KVCapture) -> Tensor:
        """The attention's output, (B, T, H * D), from rotated queries and keys, and values."""
        query_BHTD, key_BJTD, value_BJTD = (part.transpose(1, 2) for part in parts)
        key_BJSD, value_BJSD = cache.update(key_BJTD, value_BJTD, self._index)
        read_BHTD = fast_attention(
            query_BHTD,
            key_BJSD,
            value_BJSD,
            inputs.mask,
            scale=self.scale,
            causal=inputs.mask is None,
        )
        return merge_heads(read_BHTD)

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


def make_fast(layers: Sequence[Any]) -> FusedStack | None:
    """Let decoder layers compute as `FastLayer` does; all in one call, if kernels can."""
    fast = [FastLayer(layer) for layer in layers]
    fused = [one.fused for one in fast if one.fused is not None]
    for layer, one in zip(layers, fast, strict=True):
        if len(fused) < len(fast):
            one.fused = None  # all or none, because they share a `AttentionInputs`
        layer.forward = one
    return FusedStack(fused, fast[0].scale) if fast and len(fused) == len(fast) else None


def _found(module: nn.Module, joined: str, *apart: str) -> list[nn.Module]:
    names = (joined,) if hasattr(module, joined) else apart
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
    before, after, middle, end = (fast_norm(getattr(layer, name, None)) for name in names)
    return before, after, middle, end


def fast_norm(module: Any) -> Norm:
    """RMSNorm in one call where the module is the usual one, rounded exactly where it rounds."""
    if module is None:
        return _unchanged
    if not families.is_usual_norm(module):
        return cast(Norm, module)
    rounds_late = families.norm_rounds_late(module)
    return _RMSNorm(module.weight, module.variance_epsilon, rounds_late=rounds_late)


def kernel_norm(module: Any) -> FusedNorm | None:
    """A norm behind layers that kernels compute, by a kernel as well; None where it cannot be."""
    plain = _plain([fast_norm(module)])
    if plain is None:
        return None
    return FusedNorm(plain[0].weight.detach(), plain[0].eps)


def _plain(norms: Sequence[Norm]) -> list[_RMSNorm] | None:
    """These norms, if all are of the kind that kernels compute, with one epsilon."""
    found = [one for one in norms if isinstance(one, _RMSNorm) and not one.rounds_late]
    alike = len(found) == len(norms) and len({one.eps for one in found}) == 1
    return found if alike else None


class _RMSNorm:
    """RMSNorm in few calls. `rounds_late`: the product with the weight is rounded."""

    def __init__(self, weight: Tensor, eps: float, *, rounds_late: bool) -> None:
        self.weight, self.eps, self.rounds_late = weight, eps, rounds_late
        self._share = 1.0 / weight.shape[0]
        self._eps = torch.tensor(eps, dtype=torch.float32, device=weight.device)

    def __call__(self, x_BTE: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x_BTE, dim=-1, keepdim=True, dtype=torch.float32)
        scale = torch.addcmul(self._eps, length, length, value=self._share).rsqrt_()
        normed = x_BTE * scale
        if self.rounds_late:
            return (normed * self.weight).to(x_BTE.dtype)
        return normed.to(x_BTE.dtype) * self.weight


def _unchanged(x_BTE: Tensor) -> Tensor:
    return x_BTE
