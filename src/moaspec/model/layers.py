"""The decoder layers that the drafter is made of.

A layer computes projections, norms and MLP; *how* attention reads and stores keys and values is
handed to it as an operation. So training (whole sequences under a mask), the engine (preallocated
caches) and other servers (their own paged attention) share these layers.

Legend: B batch, H heads, J KV heads, T tokens, S keys, D head dim, E width of the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from moaspec.backends.cpu.cpu_attention import MOST_QUERIES, attend, can_attend
from moaspec.backends.cpu.fused_layers import FusedLayer, FusedStack, Slots
from moaspec.model.drafter_config import LayerConfig
from moaspec.model.rope import CosSin, rotate

SelfAttend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(query_BHTD, key_BHTD, value_BHTD) of new tokens -> what they read, (B, H, T, D).

One with attributes `slots` and `mask`, which say the same of a cache, lets kernels do it all. One
with a method `joined` takes what kernels give as it lies there, (B, T, H + 2 J, D), and gives heads
side by side, (B, T, H * D)."""
CrossAttend = Callable[[Tensor], Tensor]
"""query_BHTD -> what it reads from keys and values stored elsewhere, (B, H, T, D). See
`SelfAttend`."""


MOST_FOLDED = 4
"""Up to so many tokens, the query heads that share a KV head are read as so many more queries of
one head: no key or value is copied. More queries are split over cores by heads, and folding leaves
fewer of those."""


def masked_attention(
    query_BHTD: Tensor,
    key_BJSD: Tensor,
    value_BJSD: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """Grouped-query attention, J KV heads.

    Args:
        query_BHTD: queries.
        key_BJSD: keys.
        value_BJSD: values.
        mask: over (B, H, T, S); boolean (True: may attend) or added to the scores. One from
            `fold_mask` spares folding it here.
        scale: of the scores; 1 / sqrt(D) by default.
        causal: instead of a mask, where queries and keys are the same tokens.
    """
    B, H, T, D = query_BHTD.shape
    groups = H // key_BJSD.shape[1]
    causal = causal and T > 1
    if not causal and can_attend(query_BHTD, key_BJSD, value_BJSD, mask):
        return attend(query_BHTD, key_BJSD, value_BJSD, mask, D**-0.5 if scale is None else scale)
    folds = groups > 1 and T <= MOST_FOLDED and not causal
    if folds:
        query_BHTD = query_BHTD.reshape(B, -1, groups * T, D)
        mask = None if mask is None else fold_mask(mask, T, groups)
    read = F.scaled_dot_product_attention(
        query_BHTD,
        key_BJSD,
        value_BJSD,
        attn_mask=mask,
        is_causal=causal,
        scale=scale,
        enable_gqa=groups > 1 and not folds,
    )
    return read.reshape(B, H, T, D) if folds else read


def fold_mask(mask: Tensor, num_tokens: int, groups: int) -> Tensor:
    """The mask over (B, J, groups * T, S) where queries are folded; as it is elsewhere."""
    if num_tokens > MOST_FOLDED or mask.shape[2] != num_tokens or mask.shape[2] == 1:
        return mask
    return mask.repeat(1, 1, groups, 1)


def split_heads(x_BTE: Tensor, head_dim: int) -> Tensor:
    """(B, T, H * D) -> (B, H, T, D)."""
    return x_BTE.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def merge_heads(x_BHTD: Tensor) -> Tensor:
    """(B, H, T, D) -> (B, T, H * D)."""
    return x_BHTD.transpose(1, 2).flatten(2)


def normed_products(norm: nn.RMSNorm, x: Tensor, linears: Sequence[nn.Module]) -> list[Tensor]:
    """What several linear layers make of the same normed input.

    While gradients are wanted it is one product, by weights that the norm's weight is multiplied
    into: that gives the norm its gradient without one of its whole output.
    """
    plain = [one for one in linears if isinstance(one, nn.Linear)]
    biases: list[Tensor] = [one.bias for one in plain if one.bias is not None]
    if not torch.is_grad_enabled() or len(plain) < len(linears) or 0 < len(biases) < len(plain):
        normed = norm(x)
        return [one(normed) for one in linears]
    weight = torch.cat([one.weight for one in plain]) * norm.weight
    bias = torch.cat(biases) if biases else None
    products = F.linear(F.rms_norm(x, norm.normalized_shape, eps=norm.eps), weight, bias)
    return list(products.split([one.out_features for one in plain], dim=-1))


class MLP(nn.Module):
    """Gated MLP, after the norm that it is given."""

    def __init__(self, config: LayerConfig, hidden_act: str) -> None:
        super().__init__()
        E, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(E, inner, bias=bias)
        self.up_proj = nn.Linear(E, inner, bias=bias)
        self.down_proj = nn.Linear(inner, E, bias=bias)
        self.act = ACT2FN[hidden_act]

    def inner(self, norm: nn.RMSNorm, x_BTE: Tensor) -> Tensor:
        """What enters the last projection, (B, T, inner), from states before the norm."""
        gate, up = normed_products(norm, x_BTE, (self.gate_proj, self.up_proj))
        return self.act(gate) * up


class QueryOutputProjection(nn.Module):
    """The half of an attention block that belongs to the reader: query and output projections."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        inner = config.num_heads * config.head_dim
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, inner, bias=config.qkv_bias)
        self.o_proj = nn.Linear(inner, config.hidden_size, bias=config.o_bias)

    def query(self, x_BTE: Tensor, cos_sin: CosSin) -> Tensor:
        """Rotated queries, (B, H, T, D)."""
        return self.rotated(self.q_proj(x_BTE), cos_sin)

    def rotated(self, query_BTX: Tensor, cos_sin: CosSin) -> Tensor:
        """What `q_proj` gave as rotated queries, (B, H, T, D)."""
        return rotate(split_heads(query_BTX, self.head_dim), cos_sin)


class KeyValueProjection(nn.Module):
    """The half of an attention block that belongs to what is read: keys and values."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        inner = config.num_kv_heads * config.head_dim
        self.head_dim, self.num_heads = config.head_dim, config.num_kv_heads
        self.k_proj = nn.Linear(config.hidden_size, inner, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, inner, bias=config.qkv_bias)

    def forward(self, x_BTE: Tensor, cos_sin: CosSin) -> tuple[Tensor, Tensor]:
        """Rotated keys and plain values, each (B, num_kv_heads, T, D)."""
        return self.rotated(self.k_proj(x_BTE), self.v_proj(x_BTE), cos_sin)

    def rotated(self, key_BTX: Tensor, value_BTX: Tensor, cos_sin: CosSin) -> tuple[Tensor, Tensor]:
        """What `k_proj` and `v_proj` gave as rotated keys and plain values, (B, H, T, D) each."""
        key = rotate(split_heads(key_BTX, self.head_dim), cos_sin)
        return key, split_heads(value_BTX, self.head_dim)


class AttentionBlock(nn.Module):
    """What every decoder layer here does around its attention: norms, residuals, MLP.

    Attributes:
        fused: this layer as kernels compute it, set on packed copies that decode.
        stack: the same with its attention, in one call.
    """

    fused: FusedLayer | None = None
    stack: FusedStack | None = None

    def __init__(self, config: LayerConfig, *, eps: float, hidden_act: str) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=eps)
        self.self_attn = QueryOutputProjection(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=eps)
        self.mlp = MLP(config, hidden_act)

    def in_one_call(
        self, x_BTE: Tensor, cos_sin: CosSin, attend: SelfAttend | CrossAttend
    ) -> Tensor | None:
        """The layer by kernels alone; None where they cannot compute all of it."""
        slots: Slots | None = getattr(attend, "slots", None)
        if self.stack is None or slots is None or x_BTE.shape[1] > MOST_QUERIES:
            return None
        mask: Tensor = attend.mask  # type: ignore[union-attr]
        return self.stack.run(x_BTE, *angles(cos_sin), mask.contiguous(), slots=slots, num=1)

    def finish(self, x_BTE: Tensor, read_BTX: Tensor) -> Tensor:
        """Output projection and residual connection, then the residual MLP.

        Args:
            x_BTE: what entered the layer.
            read_BTX: what its attention gave, heads side by side.
        """
        if self.fused is not None:
            return self.fused.finish(x_BTE, read_BTX)
        x_BTE = x_BTE + self.self_attn.o_proj(read_BTX)
        inner_BTI = self.mlp.inner(self.post_attention_layernorm, x_BTE)
        return x_BTE + self.mlp.down_proj(inner_BTI)

    def finish_mean(self, x_BTE: Tensor, read_BTX: Tensor) -> Tensor:
        """The mean over tokens of what `finish` gives, (B, E).

        The MLP's last projection is linear: it may follow the mean, at one T-th of its cost.
        """
        if self.fused is not None:
            return self.fused.finish_mean(x_BTE, read_BTX)
        x_BTE = x_BTE + self.self_attn.o_proj(read_BTX)
        inner_BTI = self.mlp.inner(self.post_attention_layernorm, x_BTE)
        return x_BTE.mean(dim=1) + self.mlp.down_proj(inner_BTI.mean(dim=1))

    def _read(self, x_BTE: Tensor, cos_sin: CosSin, attend: SelfAttend | CrossAttend) -> Tensor:
        """What attention gives, heads side by side, (B, T, H * D)."""
        joined = getattr(attend, "joined", None)
        if self.fused is None or joined is None:
            return merge_heads(attend(*self._projected(x_BTE, cos_sin)))
        return joined(self.fused.project(x_BTE, *angles(cos_sin)))

    def _projected(self, x_BTE: Tensor, cos_sin: CosSin) -> Sequence[Tensor]:
        """What attention is asked, each (B, heads, T, D)."""
        raise NotImplementedError


class DecoderLayer(AttentionBlock):
    """Pre-norm decoder layer whose tokens read themselves (SA, LSA)."""

    def __init__(self, config: LayerConfig, *, eps: float, hidden_act: str) -> None:
        super().__init__(config, eps=eps, hidden_act=hidden_act)
        self.key_value = KeyValueProjection(config)

    def keys_values(self, x_BTE: Tensor, cos_sin: CosSin) -> tuple[Tensor, Tensor]:
        """Keys and values of tokens whose own output nobody needs: what later tokens read."""
        if self.fused is not None:
            _, key_BCTD, value_BCTD = self._projected(x_BTE, cos_sin)
            return key_BCTD, value_BCTD
        return self.key_value(self.input_layernorm(x_BTE), cos_sin)

    def forward(self, x_BTE: Tensor, cos_sin: CosSin, attend: SelfAttend) -> Tensor:
        done = self.in_one_call(x_BTE, cos_sin, attend)
        if done is not None:
            return done
        return self.finish(x_BTE, self._read(x_BTE, cos_sin, attend))

    def mean(self, x_BTE: Tensor, cos_sin: CosSin, attend: SelfAttend) -> Tensor:
        """The mean over tokens of what `forward` gives, (B, E)."""
        return self.finish_mean(x_BTE, self._read(x_BTE, cos_sin, attend))

    def _projected(self, x_BTE: Tensor, cos_sin: CosSin) -> Sequence[Tensor]:
        """Rotated queries and keys, and values."""
        own, memory = self.self_attn, self.key_value
        if self.fused is not None:
            heads_BXTD = self.fused.project(x_BTE, *angles(cos_sin)).transpose(1, 2)
            counts = (heads_BXTD.shape[1] - 2 * memory.num_heads, *(memory.num_heads,) * 2)
            return heads_BXTD.split(counts, dim=1)
        linears = (own.q_proj, memory.k_proj, memory.v_proj)
        query, key, value = normed_products(self.input_layernorm, x_BTE, linears)
        return own.rotated(query, cos_sin), *memory.rotated(key, value, cos_sin)


class CrossAttentionLayer(AttentionBlock):
    """Pre-norm decoder layer whose tokens read what the encoder wrote (CA)."""

    def forward(self, x_BTE: Tensor, cos_sin: CosSin, attend: CrossAttend) -> Tensor:
        done = self.in_one_call(x_BTE, cos_sin, attend)
        if done is not None:
            return done
        return self.finish(x_BTE, self._read(x_BTE, cos_sin, attend))

    def _projected(self, x_BTE: Tensor, cos_sin: CosSin) -> Sequence[Tensor]:
        """Rotated queries."""
        if self.fused is not None:
            return (self.fused.project(x_BTE, *angles(cos_sin)).transpose(1, 2),)
        return (self.self_attn.query(self.input_layernorm(x_BTE), cos_sin),)


def angles(cos_sin: CosSin) -> CosSin:
    """Cosines and sines as kernels read them: as they are, but contiguous."""
    cos_B1TD, sin_B1TD = cos_sin
    return cos_B1TD.contiguous(), sin_B1TD.contiguous()
