"""The drafter's part on a device as one ONNX graph: embedding, SA, CA and draft head, for N = 0.

One run stores SA's keys and values of T tokens in slots start ... start + T - 1, and drafts the
token after the last of them. So one graph processes a prompt (T tokens) and drafts (T = 1). SA is
one layer: of all tokens but the last only keys and values are needed.

Caches have as many slots as the caller gives them. The text cache is an input and an output; bound
to one buffer it is written in place, without a copy. CA's keys and values of verified tokens come
from the server: the caller writes them at their positions.

    inputs   token_ids (T,) int64, start (1,) int64, memory_mask (M,) bool,
             text_key, text_value (J, S, D), memory_key, memory_value (C, M, D) float32
    outputs  new_text_key, new_text_value as above,
             top_token_ids (K,) int64, top_log_q (K,) float32, the most probable first

Legend: T tokens, S text slots, M memory slots, J SA's KV heads, C CA's, H query heads, G query
heads of a KV head, D head dim, E hidden size, V draft vocabulary, K drafts per run.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, helper
from torch import Tensor

from moaspec.errors import InputError
from moaspec.model.drafter_config import LayerConfig
from moaspec.model.layers import AttentionBlock, Rope
from moaspec.model.moa import MoADrafter
from moaspec.model.rope import LongRope
from moaspec.remote.device_onnx.onnx_ops import CONTRIB, GraphBuilder, Matrix, Weights, to_numpy

OPSET, IR_VERSION = 21, 10
TOP = 64  # K, unless the draft vocabulary is smaller; a sampled draft is chosen among them
HIDDEN = -1e30  # added to the scores of hidden slots; with infinity an empty row would become NaN


class TargetParts(NamedTuple):
    """What a graph needs of the target."""

    embedding_VE: Tensor  # its embedding
    factor: float = 1.0  # what the model multiplies embeddings with
    # Weight of the head's rows that can be drafted; None where they are the embedding's, which the
    # graph then holds once.
    head: Tensor | None = None
    bias: Tensor | None = None  # of these rows, or None
    # scale, cap: of the logits (`LMHead`).
    scale: float = 1.0
    cap: float | None = None


def draft_graph(drafter: MoADrafter, target: TargetParts, weights: Weights) -> onnx.ModelProto:
    """Build the graph; see the module's docstring.

    Args:
        drafter: its decoder is used, and its adapter for N = 0 where it has adapters.

    Raises:
        InputError: the drafter lacks a part (an ablation), or its target has LongRoPE or an
            activation that is not known here.
    """
    if drafter.config.without:
        raise InputError(
            f"The drafter was trained without {', '.join(drafter.config.without)} (an ablation); "
            "an ONNX bundle needs a whole one."
        )
    if isinstance(drafter.decoder.self_rope, LongRope):
        raise InputError(
            "The target has LongRoPE, whose frequencies change with the text's length; an ONNX "
            "bundle cannot hold them. Make a bundle for PyTorch."
        )
    return _DraftGraph(drafter, weights).build(target)


class _DraftGraph(GraphBuilder):
    """Builds the graph of one drafter."""

    def __init__(self, drafter: MoADrafter, weights: Weights) -> None:
        super().__init__(weights)
        self.drafter = drafter
        self.last = self.constant([-1])
        """Index of the last token."""
        self.positions_T = self._positions()
        self.position_1 = self.op("Gather", self.positions_T, self.last, axis=0)

    def build(self, target: TargetParts) -> onnx.ModelProto:
        table = self.matrix(to_numpy(target.embedding_VE))
        x_TE = self.rows("token_ids", table)
        if target.factor != 1.0:
            x_TE = self.op("Mul", x_TE, self.constant(target.factor))
        x_1E = self.run_cross_attention(self.run_self_attention(x_TE))
        adapter = self.drafter.adapter(0)
        if adapter is not None:
            x_1E = self.linear(self.norm(x_1E, adapter.norm), adapter.linear)
            x_1E = self.op("Mul", x_1E, self.constant(to_numpy(adapter.scale)))
        return self._model(self.take_top(x_1E, self._draft_head(target, table), target))

    def _draft_head(self, target: TargetParts, table: Matrix) -> Matrix:
        """The head for the tokens that can be drafted."""
        ids = self.drafter.draft_token_ids
        if target.head is not None:
            return self.matrix(to_numpy(target.head))
        return table if ids is None else self.selected(table, ids.cpu().numpy())

    def logits(self, product: str, bias: str | None, target: TargetParts) -> str:
        """See `LMHead.logits`."""
        found = product if bias is None else self.op("Add", product, bias)
        if target.scale != 1.0:
            found = self.op("Mul", found, self.constant(target.scale))
        if target.cap is not None:
            cap = self.constant(float(target.cap))
            found = self.op("Mul", self.op("Tanh", self.op("Div", found, cap)), cap)
        return found

    def run_self_attention(self, x_TE: str) -> str:
        """Store keys and values of all tokens; SA's output for the last one, (1, E)."""
        layer, sizes = self.drafter.decoder.self_attention, self.drafter.config.self_attention
        rope = self.drafter.decoder.self_rope
        normed_TE = self.norm(x_TE, layer.input_layernorm)
        heads = self.constant([-1, sizes.num_kv_heads, sizes.head_dim])
        key_TJD, value_TJD = (
            self.op("Reshape", self.linear(normed_TE, one), heads)
            for one in (layer.key_value.k_proj, layer.key_value.v_proj)
        )
        key_TJD = self.rotated(key_TJD, self.positions_T, rope, sizes.head_dim)
        slots = self._slots(sizes.num_kv_heads)
        key, value = (
            self.op("ScatterND", cache, slots, self.op("Transpose", new, perm=[1, 0, 2]), name=name)
            for cache, new, name in (
                ("text_key", key_TJD, "new_text_key"),
                ("text_value", value_TJD, "new_text_value"),
            )
        )
        visible_S = self.op("LessOrEqual", self._up_to(self._size("text_key", 1)), self.position_1)
        normed_1E = self.op("Gather", normed_TE, self.last, axis=0)
        query = self.queries(normed_1E, layer, sizes, rope)
        attention = self.attend(query, key, value, visible_S)
        return self.finish(self.op("Gather", x_TE, self.last, axis=0), layer, attention)

    def run_cross_attention(self, x_1E: str) -> str:
        """CA's output for the last token, (1, E)."""
        layer, sizes = self.drafter.decoder.cross_attention, self.drafter.config.cross_attention
        normed_1E = self.norm(x_1E, layer.input_layernorm)
        query = self.queries(normed_1E, layer, sizes, self.drafter.decoder.cross_rope)
        attention = self.attend(query, "memory_key", "memory_value", "memory_mask")
        return self.finish(x_1E, layer, attention)

    def queries(self, normed_1E: str, layer: AttentionBlock, sizes: LayerConfig, rope: Rope) -> str:
        """Rotated and scaled queries by KV head, (J, G, D)."""
        query = self.linear(normed_1E, layer.self_attn.q_proj)
        heads = self.constant([1, sizes.num_heads, sizes.head_dim])
        query = self.op("Reshape", query, heads)
        query = self.rotated(query, self.position_1, rope, sizes.head_dim)
        query = self.op("Mul", query, self.constant(sizes.head_dim**-0.5))
        groups = sizes.num_heads // sizes.num_kv_heads
        shape = self.constant([sizes.num_kv_heads, groups, sizes.head_dim])
        return self.op("Reshape", query, shape)

    def attend(self, query_JGD: str, key_JSD: str, value_JSD: str, visible_S: str) -> str:
        """The attention's output, heads side by side, (1, H * D)."""
        scores = self.op("MatMul", query_JGD, self.op("Transpose", key_JSD, perm=[0, 2, 1]))
        hidden = self.op("Where", visible_S, self.constant(0.0), self.constant(HIDDEN))
        weights = self.op("Softmax", self.op("Add", scores, hidden), axis=-1)
        output = self.op("MatMul", weights, value_JSD)
        return self.op("Reshape", output, self.constant([1, -1]))

    def finish(self, x_1E: str, layer: AttentionBlock, attention: str) -> str:
        """See `AttentionBlock.finish`."""
        x_1E = self.op("Add", x_1E, self.linear(attention, layer.self_attn.o_proj))
        normed, mlp = self.norm(x_1E, layer.post_attention_layernorm), layer.mlp
        gate = self.activation(self.linear(normed, mlp.gate_proj), self.drafter.config.hidden_act)
        inner = self.op("Mul", gate, self.linear(normed, mlp.up_proj))
        return self.op("Add", x_1E, self.linear(inner, mlp.down_proj))

    def rotated(self, x_THD: str, positions_T: str, rope: Rope, head_dim: int) -> str:
        """Apply rotary embeddings; see `model.layers.rotate`."""
        half = rope.inv_freq.shape[0]
        position = self.op("Cast", positions_T, to=TensorProto.FLOAT)
        position = self.op("Reshape", position, self.constant([-1, 1, 1]))
        angles = self.op("Mul", position, self.constant(to_numpy(rope.inv_freq)))
        scaling = self.constant(float(rope.attention_scaling))
        cos, sin = (self.op("Mul", self.op(name, angles), scaling) for name in ("Cos", "Sin"))
        first, second, *rest = (
            self.op("Slice", x_THD, *(self.constant([one]) for one in (start, stop, 2)))
            for start, stop in ((0, half), (half, 2 * half), (2 * half, head_dim))
            if start < stop
        )
        parts = (("Sub", (first, cos), (second, sin)), ("Add", (second, cos), (first, sin)))
        turned = (self.op(sign, self.op("Mul", *a), self.op("Mul", *b)) for sign, a, b in parts)
        return self.op("Concat", *turned, *rest, axis=-1)

    def take_top(self, x_1E: str, head: Matrix, target: TargetParts) -> int:
        """The outputs: K most probable draft tokens and their log-probabilities; returns K.

        Products round their inputs to few bits, so the logits of these K are computed once more.
        """
        bias = None if target.bias is None else self.constant(to_numpy(target.bias))
        whole, count = self.constant([-1]), min(TOP, head.num_rows)
        products_V = self.op("Reshape", self.product(x_1E, head), whole)
        logits_V = self.logits(products_V, bias, target)
        total = self.op("ReduceLogSumExp", logits_V, keepdims=1)
        logits, index = self.ops("TopK", logits_V, self.constant([count]), count=2)
        if self.weights != "float32":
            products = self.op("MatMul", self.rows(index, head), self.op("Reshape", x_1E, whole))
            bias = bias and self.op("Gather", bias, index)
            logits = self.logits(products, bias, target)
            logits, order = self.ops("TopK", logits, self.constant([count]), count=2)
            index = self.op("Gather", index, order)
        self.op("Sub", logits, total, name="top_log_q")
        ids = self.drafter.draft_token_ids
        if ids is None:
            self.op("Identity", index, name="top_token_ids")
        else:
            self.op("Gather", self.constant(ids.cpu().numpy()), index, name="top_token_ids")
        return count

    def _positions(self) -> str:
        """Positions of the tokens, which are their slots, (T,) int64."""
        return self.op("Add", self._up_to(self._size("token_ids", 0)), "start")

    def _slots(self, num_heads: int) -> str:
        """Indices of the tokens' slots in a cache, (J, T, 2)."""
        sizes = self.constant([num_heads]), self.op("Shape", "token_ids"), self.constant([1])
        shape = self.op("Concat", *sizes, axis=0)
        heads = self.constant(np.arange(num_heads)[:, None, None])
        slots = self.op("Unsqueeze", self.positions_T, self.constant([0, 2]))
        return self.op("Concat", *(self.op("Expand", one, shape) for one in (heads, slots)), axis=2)

    def _size(self, name: str, axis: int) -> str:
        return self.op("Squeeze", self.op("Shape", name, start=axis, end=axis + 1))

    def _up_to(self, count: str) -> str:
        """0 ... count - 1, int64."""
        return self.op("Range", self.constant(np.int64(0)), count, self.constant(np.int64(1)))

    def _model(self, top: int) -> onnx.ModelProto:
        config = self.drafter.config
        text, memory = (
            (one.num_kv_heads, slots, one.head_dim)
            for one, slots in ((config.self_attention, "S"), (config.cross_attention, "M"))
        )
        caches = {"text_key": text, "text_value": text}
        inputs: dict[str, Any] = {"token_ids": ("T",), "start": (1,), "memory_mask": ("M",)}
        inputs |= caches | {"memory_key": memory, "memory_value": memory}
        outputs: dict[str, Any] = {f"new_{name}": shape for name, shape in caches.items()}
        outputs |= {"top_token_ids": (top,), "top_log_q": (top,)}
        kinds = {"memory_mask": TensorProto.BOOL}
        kinds |= dict.fromkeys(("token_ids", "start", "top_token_ids"), TensorProto.INT64)

        def values(shapes: dict[str, Any]) -> list[onnx.ValueInfoProto]:
            return [
                helper.make_tensor_value_info(name, kinds.get(name, TensorProto.FLOAT), shape)
                for name, shape in shapes.items()
            ]

        graph = helper.make_graph(
            self.nodes, "draft", values(inputs), values(outputs), self.initializers
        )
        versions = [helper.make_opsetid("", OPSET), helper.make_opsetid(CONTRIB, 1)]
        return helper.make_model(graph, opset_imports=versions, ir_version=IR_VERSION)
