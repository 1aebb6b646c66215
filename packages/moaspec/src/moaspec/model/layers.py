"""Decoder layers of the drafter, and rotary embeddings.

A layer computes projections, norms and MLP. The caller passes the attention operation, which also
stores and looks up keys and values. So training (whole sequences under a mask), the engine
(preallocated caches) and vLLM (paged attention) use the same layers.

Legend: B batch, H heads, J KV heads, T tokens, S keys, D head dim, E width of the layer,
L target layers, K one layer's key and value (for each KV head its key, then its value).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from moaspec_core.checkpoint.drafter_config import DrafterConfig, LayerConfig
from moaspec_core.errors import ShapeError

CosSin = tuple[Tensor, Tensor]
SelfAttend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(query_BHTD, key_BJTD, value_BJTD) of new tokens -> attention outputs, (B, H, T, D)."""
CrossAttend = Callable[[Tensor], Tensor]
"""query_BHTD -> attention outputs over keys and values stored elsewhere, (B, H, T, D)."""

MAX_FOLDED_TOKENS = 4
"""Up to this many tokens, the query heads of a KV head are folded into the token axis: no key or
value is copied. PyTorch divides longer passes among cores by head, and folding leaves fewer heads.
"""

FOLD_CHUNK_TOKENS = 512
"""Tokens whose keys are turned at once; bounds memory for long prompts."""


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
        mask: (B, 1, T or 1, S), the same for all heads; boolean (True: may attend) or added to the
            scores; may be folded already by `fold_mask`.
        scale: of the scores; 1 / sqrt(D) by default.
        causal: instead of a mask, where queries and keys are the same tokens.
    """
    B, H, T, D = query_BHTD.shape
    groups = H // key_BJSD.shape[1]
    causal = causal and T > 1
    folds = groups > 1 and T <= MAX_FOLDED_TOKENS and not causal
    if folds:
        query_BHTD = query_BHTD.reshape(B, -1, groups * T, D)
        mask = None if mask is None else fold_mask(mask, T, groups)
    elif groups > 1 and mask is not None and query_BHTD.is_cuda and torch.is_grad_enabled():
        # For a mask and grouped heads together PyTorch would keep all scores.
        key_BJSD, value_BJSD = (x.repeat_interleave(groups, 1) for x in (key_BJSD, value_BJSD))
        groups = 1
    output = F.scaled_dot_product_attention(
        query_BHTD,
        key_BJSD,
        value_BJSD,
        attn_mask=mask,
        is_causal=causal,
        scale=scale,
        enable_gqa=groups > 1 and not folds,
    )
    return output.reshape(B, H, T, D) if folds else output


def attention_among_few(query_BHTD: Tensor, key_BJSD: Tensor, value_BJSD: Tensor) -> Tensor:
    """Attention without a mask among few tokens, such as the layers of LSA.

    With gradients on a CPU by products: PyTorch's kernel goes back block by block there, which
    takes ten times as long for 24 tokens.
    """
    if query_BHTD.device.type != "cpu" or not torch.is_grad_enabled():
        return masked_attention(query_BHTD, key_BJSD, value_BJSD)
    B, H, T, D = query_BHTD.shape
    J = key_BJSD.shape[1]
    scaled = query_BHTD.reshape(B, J, H // J * T, D) * D**-0.5
    scores = scaled @ key_BJSD.transpose(-1, -2)
    shares = scores.softmax(-1, dtype=torch.float32).to(value_BJSD.dtype)
    return (shares @ value_BJSD).reshape(B, H, T, D)


def fold_mask(mask: Tensor, num_tokens: int, groups: int) -> Tensor:
    """The mask of folded queries, (B, 1, groups * T, S).

    Unchanged if the queries are not folded, if it has one row, or if it is folded already.
    """
    if num_tokens > MAX_FOLDED_TOKENS or mask.shape[2] != num_tokens or mask.shape[2] == 1:
        return mask
    return mask.repeat(1, 1, groups, 1)


class Rope(nn.Module):
    """Cosines and sines of rotary position embeddings for given positions.

    Frequencies stay in float32 in layers of any dtype: in bf16 neighbouring positions beyond 256
    would coincide.
    """

    inv_freq: Tensor

    def __init__(self, inv_freq: Tensor, attention_scaling: float = 1.0) -> None:
        super().__init__()
        self.register_buffer("inv_freq", inv_freq.float(), persistent=False)
        self.attention_scaling = attention_scaling

    @classmethod
    def plain(cls, head_dim: int, theta: float) -> Self:
        """Unscaled rotary embeddings (LSA over layer indices, CA over positions)."""
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        return cls(1.0 / theta**exponent)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Follow the module to its device, never to its dtype."""
        exact = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, buffer in exact.items():
            moved = self._buffers[name]
            if buffer is not None and moved is not None:
                self._buffers[name] = buffer.to(moved.device)
        return self

    def forward(self, position_ids_BT: Tensor) -> CosSin:
        """Return cosines and sines, each (B, 1, T, D) in float32."""
        cos, sin = self.angles(position_ids_BT)
        return cos[:, None], sin[:, None]

    def between(self, start: int, stop: int) -> CosSin:
        """Cosines and sines of positions start..stop - 1, (1, 1, stop - start, D) each."""
        cos, sin = self.along(start, stop)
        return cos[None, None], sin[None, None]

    def along(self, start: int, stop: int) -> CosSin:
        """`between` without leading axes, contiguous, (stop - start, D) each."""
        cos, sin = self(torch.arange(start, stop, device=self.inv_freq.device)[None])
        return cos[0, 0], sin[0, 0]

    def angles(self, position_ids: Tensor) -> CosSin:
        """Cosines and sines, (..., T, D) each."""
        angles = position_ids[..., None].float() * self.frequencies(position_ids)
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin, scale = angles.cos(), angles.sin(), self.attention_scaling
        return (cos, sin) if scale == 1.0 else (cos * scale, sin * scale)

    def frequencies(self, _position_ids: Tensor) -> Tensor:
        """The frequencies for these positions."""
        return self.inv_freq


class LongRope(Rope):
    """LongRoPE: one set of frequencies for texts of up to `switch` tokens, one for longer texts.

    All positions of a longer text use the second set, so a cache must compute its keys again when a
    text grows past the switch. The largest position of a row tells the length of its text.
    """

    long_inv_freq: Tensor

    def __init__(
        self, inv_freq: Tensor, attention_scaling: float, *, long_inv_freq: Tensor, switch: int
    ) -> None:
        super().__init__(inv_freq, attention_scaling)
        self.register_buffer("long_inv_freq", long_inv_freq, persistent=False)
        self.switch = switch

    def frequencies(self, position_ids_BT: Tensor) -> Tensor:
        """(B, 1, D / 2)."""
        is_long = (position_ids_BT.amax(-1) >= self.switch)[:, None, None]
        return torch.where(is_long, self.long_inv_freq, self.inv_freq)


def scaled_rope(head_dim: int, parameters: dict[str, Any], max_positions: int) -> Rope:
    """Rotary embeddings as the target has them, scaling included (SA).

    Args:
        head_dim: D of the layer.
        parameters: transformers' `rope_parameters` (`rope_type`, `rope_theta`, ...).
        max_positions: the target's `max_position_embeddings`.
    """
    kind = parameters.get("rope_type", "default")
    if kind == "default":
        rotary_dim = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
        return Rope.plain(rotary_dim, parameters["rope_theta"])
    config = PreTrainedConfig(
        rope_parameters=dict(parameters),
        head_dim=head_dim,
        hidden_size=head_dim,
        num_attention_heads=1,
        max_position_embeddings=max_positions,
    )
    compute = ROPE_INIT_FUNCTIONS[kind]
    device = torch.get_default_device()
    inv_freq, attention_scaling = compute(config, device)
    if kind != "longrope":
        return Rope(inv_freq, attention_scaling)
    switch = int(parameters["original_max_position_embeddings"])
    long_inv_freq, _ = compute(config, device, seq_len=switch + 1)
    return LongRope(inv_freq, attention_scaling, long_inv_freq=long_inv_freq, switch=switch)


def rotate(x_BHTD: Tensor, cos_sin: CosSin) -> Tensor:
    """Apply rotary embeddings to queries or keys, keeping their dtype.

    Where there are fewer angles than dimensions (partial rotary embeddings), the rest stays.
    """
    cos, sin = (part.to(x_BHTD.dtype) for part in cos_sin)
    turned, rest = x_BHTD.split([cos.shape[-1], x_BHTD.shape[-1] - cos.shape[-1]], dim=-1)
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


def split_heads(x_BTE: Tensor, head_dim: int) -> Tensor:
    """(B, T, H * D) -> (B, H, T, D)."""
    return x_BTE.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def merge_heads(x_BHTD: Tensor) -> Tensor:
    """(B, H, T, D) -> (B, T, H * D)."""
    return x_BHTD.transpose(1, 2).flatten(2)


def folded(norm: nn.RMSNorm, linears: Sequence[nn.Linear]) -> Tensor:
    """The linear weights, below one another, with the norm's weight multiplied in."""
    return torch.cat([linear.weight for linear in linears]) * norm.weight


class StepWeights:
    """Folded weights that all passes of a step share, and the sums of their gradients."""

    def __init__(self) -> None:
        # By norm: the folded weight, its copy that gathers gradients, and that in autocast's dtype.
        self._made: dict[nn.RMSNorm, tuple[Tensor, Tensor, Tensor]] = {}

    def folded(self, norm: nn.RMSNorm, linears: Sequence[nn.Linear]) -> Tensor:
        """As the function of this name, in the dtype that a product takes here."""
        if norm not in self._made:
            whole = folded(norm, linears)
            leaf = whole.detach().requires_grad_(whole.requires_grad)
            kind = whole.device.type
            cast = torch.is_autocast_enabled(kind)
            self._made[norm] = (
                whole,
                leaf,
                leaf.to(torch.get_autocast_dtype(kind)) if cast else leaf,
            )
        return self._made[norm][2]

    def backward(self) -> None:
        """Give the gradients to the weights that were folded."""
        found = [(whole, leaf.grad) for whole, leaf, _ in self._made.values()]
        used = [(whole, gradient) for whole, gradient in found if gradient is not None]
        torch.autograd.backward([whole for whole, _ in used], [gradient for _, gradient in used])


_STEP: ContextVar[StepWeights | None] = ContextVar("step", default=None)


@contextmanager
def weights_of_a_step() -> Iterator[None]:
    """Fold weights once for all passes in this context, forward and backward.

    At its end the parameters get the gradients that they had if each pass folded them, but for
    rounding. Weights must not change inside.
    """
    weights = StepWeights()
    token = _STEP.set(weights)
    try:
        yield
    finally:
        _STEP.reset(token)
    weights.backward()


def normed_products(norm: nn.RMSNorm, x: Tensor, linears: Sequence[nn.Module]) -> list[Tensor]:
    """The outputs of several linear layers for the same normed input.

    With gradients enabled this is one product: the norm's weight is multiplied into the linear
    weights, so that backward needs no gradient of the norm's output.
    """
    plain = [linear for linear in linears if isinstance(linear, nn.Linear)]
    biases: list[Tensor] = [linear.bias for linear in plain if linear.bias is not None]
    if not torch.is_grad_enabled() or len(plain) < len(linears) or 0 < len(biases) < len(plain):
        normed = norm(x)
        return [linear(normed) for linear in linears]
    step = _STEP.get()
    weight = folded(norm, plain) if step is None else step.folded(norm, plain)
    bias = torch.cat(biases) if biases else None
    products = F.linear(F.rms_norm(x, norm.normalized_shape, eps=norm.eps), weight, bias)
    return list(products.split([linear.out_features for linear in plain], dim=-1))


class MLP(nn.Module):
    """Gated MLP: down_proj(act(gate_proj(x)) * up_proj(x))."""

    def __init__(self, config: LayerConfig, hidden_act: str) -> None:
        super().__init__()
        E, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(E, inner, bias=bias)
        self.up_proj = nn.Linear(E, inner, bias=bias)
        self.down_proj = nn.Linear(inner, E, bias=bias)
        self.act = ACT2FN[hidden_act]

    def inner(self, norm: nn.RMSNorm, x_BTE: Tensor) -> Tensor:
        """The input of `down_proj`, (B, T, inner), from states before the norm."""
        gate, up = normed_products(norm, x_BTE, (self.gate_proj, self.up_proj))
        return self.act(gate) * up


class QueryOutputProjection(nn.Module):
    """Query and output projections of an attention."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        inner = config.num_heads * config.head_dim
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, inner, bias=config.qkv_bias)
        self.o_proj = nn.Linear(inner, config.hidden_size, bias=config.o_bias)

    def query(self, x_BTE: Tensor, cos_sin: CosSin) -> Tensor:
        return self.rotated(self.q_proj(x_BTE), cos_sin)

    def rotated(self, query_BTX: Tensor, cos_sin: CosSin) -> Tensor:
        """Rotated queries from the output of `q_proj`, (B, H, T, D)."""
        return rotate(split_heads(query_BTX, self.head_dim), cos_sin)


class KeyValueProjection(nn.Module):
    """Key and value projections of an attention."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        inner = config.num_kv_heads * config.head_dim
        self.head_dim, self.num_heads = config.head_dim, config.num_kv_heads
        self.k_proj = nn.Linear(config.hidden_size, inner, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, inner, bias=config.qkv_bias)

    def forward(self, x_BTE: Tensor, cos_sin: CosSin) -> tuple[Tensor, Tensor]:
        """Rotated keys, and values: (B, J, T, D) each."""
        return self.rotated(self.k_proj(x_BTE), self.v_proj(x_BTE), cos_sin)

    def rotated(self, key_BTX: Tensor, value_BTX: Tensor, cos_sin: CosSin) -> tuple[Tensor, Tensor]:
        """Rotated keys, and values, of the outputs of `k_proj` and `v_proj`, (B, J, T, D) each."""
        key = rotate(split_heads(key_BTX, self.head_dim), cos_sin)
        return key, split_heads(value_BTX, self.head_dim)


class AttentionBlock(nn.Module):
    """A pre-norm decoder layer without its keys and values: norms, attention, residuals, MLP.

    y = x + o_proj(attention(norm_1(x))); the layer's output is y + MLP(norm_2(y)).
    """

    def __init__(self, config: LayerConfig, *, eps: float, hidden_act: str) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=eps)
        self.self_attn = QueryOutputProjection(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=eps)
        self.mlp = MLP(config, hidden_act)

    def forward(self, x_BTE: Tensor, cos_sin: CosSin, attend: SelfAttend | CrossAttend) -> Tensor:
        return self.finish(x_BTE, self.attention(x_BTE, cos_sin, attend))

    def mean(self, x_BTE: Tensor, cos_sin: CosSin, attend: SelfAttend | CrossAttend) -> Tensor:
        """The mean over tokens of the layer's output, (B, E)."""
        return self.finish_mean(x_BTE, self.attention(x_BTE, cos_sin, attend))

    def attention(self, x_BTE: Tensor, cos_sin: CosSin, attend: SelfAttend | CrossAttend) -> Tensor:
        """The attention's output before `o_proj`, heads side by side, (B, T, H * D)."""
        return merge_heads(attend(*self.attention_inputs(x_BTE, cos_sin)))

    def attention_inputs(self, x_BTE: Tensor, cos_sin: CosSin) -> Sequence[Tensor]:
        """The arguments of `attend`, each (B, heads, T, D)."""
        raise NotImplementedError

    def finish(self, x_BTE: Tensor, attention_BTX: Tensor) -> Tensor:
        """Output projection of what `attention` returned and residual, then the residual MLP."""
        x_BTE = x_BTE + self.self_attn.o_proj(attention_BTX)
        inner_BTI = self.mlp.inner(self.post_attention_layernorm, x_BTE)
        return x_BTE + self.mlp.down_proj(inner_BTI)

    def finish_mean(self, x_BTE: Tensor, attention_BTX: Tensor) -> Tensor:
        """The mean over tokens of `finish`, (B, E).

        The MLP's last projection is linear: it may follow the mean, at one T-th of its cost.
        """
        x_BTE = x_BTE + self.self_attn.o_proj(attention_BTX)
        inner_BTI = self.mlp.inner(self.post_attention_layernorm, x_BTE)
        return x_BTE.mean(dim=1) + self.mlp.down_proj(inner_BTI.mean(dim=1))


class DecoderLayer(AttentionBlock):
    """Pre-norm decoder layer with self-attention (LSA, SA)."""

    def __init__(self, config: LayerConfig, *, eps: float, hidden_act: str) -> None:
        super().__init__(config, eps=eps, hidden_act=hidden_act)
        self.key_value = KeyValueProjection(config)

    def keys_values(self, x_BTE: Tensor, cos_sin: CosSin) -> tuple[Tensor, Tensor]:
        """Keys and values alone, of tokens whose output is not needed, (B, J, T, D) each."""
        return self.key_value(self.input_layernorm(x_BTE), cos_sin)

    def attention_inputs(self, x_BTE: Tensor, cos_sin: CosSin) -> Sequence[Tensor]:
        linears = (self.self_attn.q_proj, self.key_value.k_proj, self.key_value.v_proj)
        query, key, value = normed_products(self.input_layernorm, x_BTE, linears)
        return (
            self.self_attn.rotated(query, cos_sin),
            *self.key_value.rotated(key, value, cos_sin),
        )


class CrossAttentionLayer(AttentionBlock):
    """Pre-norm decoder layer with cross-attention to keys and values of the encoder (CA)."""

    def attention_inputs(self, x_BTE: Tensor, cos_sin: CosSin) -> Sequence[Tensor]:
        """Rotated queries alone: keys and values are the encoder's."""
        return (self.self_attn.query(self.input_layernorm(x_BTE), cos_sin),)


class FoldedPositions(nn.Module):
    """Reads keys of later positions as keys of the second half of the trained positions.

    The target rotates its keys by their positions before LSA reads them, and LSA knows only the
    angles that it was trained on. Rotary embeddings are turned back exactly: a key of position p,
    rotated by the angles of p' - p, is the key of position p'. The first half is not used: LSA has
    seen only beginnings of prompts there.

    Args:
        config: of a drafter with `trained_positions`; all layers of its target have the rotary
            embeddings `rope_parameters`.

    Raises:
        ShapeError: the config has no target, or rotary embeddings that change with a text's length.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        if config.target is None:
            raise ShapeError("trained_positions needs the sizes of the target.")
        self.trained, self.head_dim = config.trained_positions, config.target.head_dim
        rope = scaled_rope(self.head_dim, config.rope_parameters, config.max_position_embeddings)
        if isinstance(rope, LongRope):
            raise ShapeError("trained_positions must be 0 for a target with LongRoPE.")
        self.rope = Rope(rope.inv_freq)  # without the scale, which the keys have already

    def forward(self, kv_BTLK: Tensor, position_ids_BT: Tensor) -> Tensor:
        """Keys and values of the same shape and dtype; values are unchanged.

        Args:
            kv_BTLK: (B, T, L, K) keys (after rotary embedding) and values.
            position_ids_BT: (B, T) int64, the tokens' positions.
        """
        if position_ids_BT.device.type == "cpu" and bool((position_ids_BT < self.trained).all()):
            return kv_BTLK
        half = max(1, self.trained // 2)
        back_BT = ((position_ids_BT - self.trained) // half + 1).clamp(min=0) * half
        chunks = (kv_BTLK.split(FOLD_CHUNK_TOKENS, dim=1), back_BT.split(FOLD_CHUNK_TOKENS, dim=1))
        turned = [self._turned(kv, back) for kv, back in zip(*chunks, strict=True)]
        return torch.cat(turned, dim=1) if len(turned) > 1 else turned[0]

    def _turned(self, kv_BTLK: Tensor, back_BT: Tensor) -> Tensor:
        """Keys rotated back by these numbers of positions, and the values."""
        cos, sin = self.rope.angles(back_BT)  # (B, T, D)
        key, value = kv_BTLK.unflatten(-1, (-1, 2, self.head_dim)).unbind(-2)  # (B, T, L, J, D)
        turned = rotate(key.float(), (cos[:, :, None, None], -sin[:, :, None, None]))
        return torch.stack((turned.to(value.dtype), value), dim=-2).flatten(-3)
