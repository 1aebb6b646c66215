"""The drafter's two halves in few calls, with the kernels that vLLM's own models use.

A draft step multiplies a few rows by two layers' weights. As modules, half of its time would go
into the many small operations around those products, and encoding a prompt would write every
intermediate of LSA to memory. These compute what `moaspec.model` computes, from its weights.

Legend: N tokens, L target layers, K = 2 * H * D of the target, E hidden size, X heads times D,
I inner size of an MLP.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from vllm import _custom_ops as ops

from moaspec.model import MoADrafter
from moaspec.model.layers import DecoderLayer, ReadingLayer, masked_attention
from moaspec.model.rope import Rope
from moaspec.vllm_plugin.products import Product, product

PagedAttend = Callable[..., Tensor]
"""(query_NHD, key_NCD and value_NCD of their own or neither) -> what each query reads, (N, X)."""

CACHED_ROWS = 2048
"""Rows of LSA (a token has L) that a CPU computes at once, so that they stay in its cache."""

CHUNK_TOKENS = 512
"""Tokens that are encoded at once elsewhere; bounds memory for long prompts."""


class Norm:
    """RMSNorm in one call."""

    def __init__(self, norm: nn.RMSNorm) -> None:
        assert norm.eps is not None
        self._weight, self._eps = norm.weight.detach(), norm.eps

    def __call__(self, x_NE: Tensor) -> Tensor:
        """The normed states, apart from x."""
        out_NE = torch.empty_like(x_NE)
        ops.rms_norm(out_NE, x_NE, self._weight, self._eps)
        return out_NE

    def of_sum(self, x_NE: Tensor, sum_NE: Tensor) -> Tensor:
        """Add x to the sum in place, and give the normed sum in the place of x."""
        ops.fused_add_rms_norm(x_NE, sum_NE, self._weight, self._eps)
        return x_NE


class Rotary:
    """Rotary embeddings out of a table of all positions."""

    def __init__(self, rope: Rope, head_dim: int, *, positions: int, like: Tensor) -> None:
        cos_11TD, sin_11TD = rope(torch.arange(positions, device=like.device)[None])
        half = cos_11TD.shape[-1] // 2
        halves = (cos_11TD[0, 0, :, :half], sin_11TD[0, 0, :, :half])
        self._cos_sin = torch.cat(halves, dim=-1).to(like.dtype)
        self._head_dim = head_dim

    def __call__(self, position_N: Tensor, x_NX: Tensor, y_NX: Tensor | None = None) -> None:
        """Rotate the heads of one or two tensors in place."""
        ops.rotary_embedding(position_N, x_NX, y_NX, self._head_dim, self._cos_sin, True)


class Layer:
    """A decoder layer around whatever attention.

    Args:
        layer: whose weights these are.
        rotary: of its queries and keys.
        drafts: what it computes is only proposed, so weights may be rounded.
    """

    def __init__(self, layer: ReadingLayer, rotary: Rotary, *, drafts: bool) -> None:
        own, mlp = layer.self_attn, layer.mlp
        linears = [own.q_proj]
        if isinstance(layer, DecoderLayer):
            linears += [layer.key_value.k_proj, layer.key_value.v_proj]
        self.before = Norm(layer.input_layernorm)
        self.between = Norm(layer.post_attention_layernorm)
        self.inputs = joined(linears, drafts=drafts)
        self.output = joined([own.o_proj], drafts=drafts)
        self.gate_up = joined([mlp.gate_proj, mlp.up_proj], drafts=drafts)
        self.down = joined([mlp.down_proj], drafts=drafts)
        self._act, self._rotary, self._head_dim = mlp.act, rotary, own.head_dim
        self._widths = [linear.out_features for linear in linears]

    def projected(self, normed_NE: Tensor, position_N: Tensor) -> list[Tensor]:
        """Rotated queries, and rotated keys and values where the layer has them, by head."""
        parts = self.inputs(normed_NE).split_with_sizes(self._widths, dim=-1)
        self._rotary(position_N, *parts[:2])
        return [_by_head(part, self._head_dim) for part in parts]

    def inner(self, read_NX: Tensor, sum_NE: Tensor) -> Tensor:
        """What enters the last product of the MLP, (N, I); the sum grows by what was read."""
        normed_NE = self.between.of_sum(self.output(read_NX), sum_NE)
        gate_NI, up_NI = self.gate_up(normed_NE).chunk(2, dim=-1)
        return self._act(gate_NI).mul_(up_NI)


class LeanEncoder:
    """What verified tokens leave behind: CA's keys and values.

    Args:
        drafter: whose encoder this is; it is not needed after that.
        num_layers: L.
        positions: of the longest text.
    """

    def __init__(self, drafter: MoADrafter, *, num_layers: int, positions: int) -> None:
        own, like = drafter.encoder, drafter.encoder.projection.weight
        lsa, memory = drafter.config.layer_self_attention, own.memory_key_value
        self._last_layer_only = own.last_layer_only
        num_layers = 1 if self._last_layer_only else num_layers
        layer_rotary = Rotary(own.layer_rope, lsa.head_dim, positions=num_layers, like=like)
        self.lsa = Layer(own.layer_self_attention, layer_rotary, drafts=False)
        self.projection = joined([own.projection], drafts=False)
        self.key_value = joined([memory.k_proj, memory.v_proj], drafts=False)
        self._norm, self._head_dim = Norm(own.memory_norm), memory.head_dim
        self._rotary = Rotary(own.memory_rope, memory.head_dim, positions=positions, like=like)
        rows = CACHED_ROWS if like.device.type == "cpu" else CHUNK_TOKENS * num_layers
        self._chunk = max(1, rows // num_layers)
        layer_ids = torch.arange(num_layers, device=like.device)
        self._layer_ids = layer_ids.repeat(self._chunk)

    def memory(self, kv_NLK: Tensor, position_N: Tensor) -> tuple[Tensor, Tensor]:
        """CA's rotated keys and values, (N, C, D) each. Spends `kv_NLK`: it is written over."""
        kv_NLK = (kv_NLK[:, -1:] if self._last_layer_only else kv_NLK).contiguous()
        means = [self._mean(chunk_NLK) for chunk_NLK in kv_NLK.split(self._chunk)]
        means_NK = means[0] if len(means) == 1 else torch.cat(means)
        normed_NE = self._norm(self.projection(means_NK))
        key_NX, value_NX = self.key_value(normed_NE).chunk(2, dim=-1)
        self._rotary(position_N, key_NX)
        return _by_head(key_NX, self._head_dim), _by_head(value_NX, self._head_dim)

    def _mean(self, sum_NLK: Tensor) -> Tensor:
        """LSA and the mean over layers: (N, L, K) -> (N, K)."""
        (tokens, layers, _), rows_RK = sum_NLK.shape, sum_NLK.flatten(0, 1)
        heads = self.lsa.projected(self.lsa.before(rows_RK), self._layer_ids[: len(rows_RK)])
        shape = (tokens, layers, -1, heads[0].shape[-1])
        read_NHLD = masked_attention(*(x_RHD.view(shape).transpose(1, 2) for x_RHD in heads))
        inner_RI = self.lsa.inner(read_NHLD.transpose(1, 2).reshape(len(rows_RK), -1), rows_RK)
        mean_NI = _mean(inner_RI.view(tokens, layers, -1))
        return _mean(sum_NLK).add_(self.lsa.down(mean_NI))


class LeanSpeaker:
    """What a draft step computes: SA, then CA.

    Args:
        drafter: whose speaker this is; it is not needed after that.
        positions: of the longest text.
    """

    def __init__(self, drafter: MoADrafter, *, positions: int) -> None:
        own, config, like = drafter.speaker, drafter.config, drafter.encoder.projection.weight
        text_dim, memory_dim = config.self_attention.head_dim, config.cross_attention.head_dim
        text = Rotary(own.self_rope, text_dim, positions=positions, like=like)
        memory = Rotary(own.cross_rope, memory_dim, positions=positions, like=like)
        self.text = Layer(own.self_attention, text, drafts=True)
        self.cross = Layer(own.cross_attention, memory, drafts=True)
        self._without_text = own.without_text

    def remember(self, embeddings_NE: Tensor, position_N: Tensor) -> tuple[Tensor, Tensor]:
        """SA's rotated keys and values, (N, C, D) each."""
        _, key, value = self.text.projected(self.text.before(embeddings_NE), position_N)
        return key, value

    def read(
        self, sum_NE: Tensor, position_N: Tensor, text: PagedAttend, memory: PagedAttend
    ) -> Tensor:
        """CA's output, (N, E), in the place of the tokens' embeddings."""
        if self._without_text:
            normed_NE = self.cross.before(sum_NE)
        else:
            heads = self.text.projected(self.text.before(sum_NE), position_N)
            added_NE = self.text.down(self.text.inner(text(*heads), sum_NE))
            normed_NE = self.cross.before.of_sum(added_NE, sum_NE)
        read_NX = memory(*self.cross.projected(normed_NE, position_N))
        return sum_NE.add_(self.cross.down(self.cross.inner(read_NX, sum_NE)))


def joined(linears: Sequence[nn.Linear], *, drafts: bool) -> Product:
    """One product for layers that read the same input."""
    weight = torch.cat([linear.weight.detach() for linear in linears])
    biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
    return product(weight, torch.cat(biases) if biases else None, drafts=drafts)


def _by_head(x_NX: Tensor, head_dim: int) -> Tensor:
    """(N, X) -> (N, heads, D)."""
    return x_NX.view(x_NX.shape[0], -1, head_dim)


def _mean(x_NLX: Tensor) -> Tensor:
    # A sum is vectorised; a mean in 16 bits is not.
    return x_NLX.sum(dim=1).div_(x_NLX.shape[1])
