"""The decoder layers that the drafter is made of.

A layer computes projections, norms and MLP; *how* attention reads and stores keys and values is
handed to it as an operation. So training (whole sequences under a mask), the engine (preallocated
caches) and other servers (their own paged attention) share these layers.

Legend: B batch, H heads, T tokens, D head dim, E width of the layer.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from moaspec.model.config import LayerConfig
from moaspec.model.rope import CosSin, rotate

SelfAttend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(query_BHTD, key_BHTD, value_BHTD) of new tokens -> what they read, (B, H, T, D)."""
CrossAttend = Callable[[Tensor], Tensor]
"""query_BHTD -> what it reads from keys and values stored elsewhere, (B, H, T, D)."""


def masked_attention(
    query_BHTD: Tensor, key_BHSD: Tensor, value_BHSD: Tensor, mask: Tensor | None = None
) -> Tensor:
    """Grouped-query attention under a boolean mask (True: may attend) over (B, H, T, S)."""
    grouped = query_BHTD.shape[1] != key_BHSD.shape[1]
    return F.scaled_dot_product_attention(
        query_BHTD, key_BHSD, value_BHSD, attn_mask=mask, enable_gqa=grouped
    )


def split_heads(x_BTE: Tensor, head_dim: int) -> Tensor:
    """(B, T, H * D) -> (B, H, T, D)."""
    return x_BTE.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def merge_heads(x_BHTD: Tensor) -> Tensor:
    """(B, H, T, D) -> (B, T, H * D)."""
    return x_BHTD.transpose(1, 2).flatten(2)


class MLP(nn.Module):
    """Gated MLP."""

    def __init__(self, config: LayerConfig, hidden_act: str) -> None:
        super().__init__()
        E, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(E, inner, bias=bias)
        self.up_proj = nn.Linear(E, inner, bias=bias)
        self.down_proj = nn.Linear(inner, E, bias=bias)
        self.act = ACT2FN[hidden_act]

    def forward(self, x_BTE: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x_BTE)) * self.up_proj(x_BTE))


class QueryOutput(nn.Module):
    """The half of an attention block that belongs to the reader: query and output projections."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        inner = config.num_heads * config.head_dim
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, inner, bias=config.qkv_bias)
        self.o_proj = nn.Linear(inner, config.hidden_size, bias=config.o_bias)

    def query(self, x_BTE: Tensor, cos_sin: CosSin) -> Tensor:
        """Rotated queries, (B, H, T, D)."""
        return rotate(split_heads(self.q_proj(x_BTE), self.head_dim), cos_sin)

    def output(self, read_BHTD: Tensor) -> Tensor:
        """Attention output back at the layer's width, (B, T, E)."""
        return self.o_proj(merge_heads(read_BHTD))


class KeyValue(nn.Module):
    """The half of an attention block that belongs to what is read: keys and values."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        inner = config.num_kv_heads * config.head_dim
        self.head_dim = config.head_dim
        self.k_proj = nn.Linear(config.hidden_size, inner, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, inner, bias=config.qkv_bias)

    def forward(self, x_BTE: Tensor, cos_sin: CosSin) -> tuple[Tensor, Tensor]:
        """Rotated keys and plain values, each (B, num_kv_heads, T, D)."""
        key = rotate(split_heads(self.k_proj(x_BTE), self.head_dim), cos_sin)
        return key, split_heads(self.v_proj(x_BTE), self.head_dim)


class ReadingLayer(nn.Module):
    """What every decoder layer here does around its attention: norms, residuals, MLP."""

    def __init__(self, config: LayerConfig, *, eps: float, hidden_act: str) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=eps)
        self.self_attn = QueryOutput(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=eps)
        self.mlp = MLP(config, hidden_act)

    def finish(self, x_BTE: Tensor, read_BHTD: Tensor) -> Tensor:
        """Residual around the attention, then the residual MLP."""
        x_BTE = x_BTE + self.self_attn.output(read_BHTD)
        return x_BTE + self.mlp(self.post_attention_layernorm(x_BTE))


class DecoderLayer(ReadingLayer):
    """Pre-norm decoder layer whose tokens read themselves (SA, LSA)."""

    def __init__(self, config: LayerConfig, *, eps: float, hidden_act: str) -> None:
        super().__init__(config, eps=eps, hidden_act=hidden_act)
        self.key_value = KeyValue(config)

    def remember(self, x_BTE: Tensor, cos_sin: CosSin) -> tuple[Tensor, Tensor]:
        """Keys and values of tokens whose own output nobody needs: what later tokens read."""
        return self.key_value(self.input_layernorm(x_BTE), cos_sin)

    def forward(self, x_BTE: Tensor, cos_sin: CosSin, attend: SelfAttend) -> Tensor:
        normed = self.input_layernorm(x_BTE)
        query = self.self_attn.query(normed, cos_sin)
        key, value = self.key_value(normed, cos_sin)
        return self.finish(x_BTE, attend(query, key, value))


class CrossLayer(ReadingLayer):
    """Pre-norm decoder layer whose tokens read what the encoder wrote (CA)."""

    def forward(self, x_BTE: Tensor, cos_sin: CosSin, attend: CrossAttend) -> Tensor:
        query = self.self_attn.query(self.input_layernorm(x_BTE), cos_sin)
        return self.finish(x_BTE, attend(query))
