"""The drafter's part on a device as one ONNX graph: embedding, SA, CA, reused target layers, head.

One run stores keys and values of T tokens in slots start ... start + T - 1, and drafts the token
after the last of them. So one graph processes a prompt (T tokens) and drafts (T = 1). With N = 0
SA's last layer computes only keys and values of all tokens but the last. With N > 0 the tokens
without activations (`memory_mask`) pass CA and the target's last layers, too.

Caches have as many slots as the caller gives them. Text and layer caches are inputs and outputs;
bound to one buffer they are written in place, without a copy. CA's and the reused layers' keys and
values of verified tokens come from the server: the caller writes them at their positions.

    inputs   token_ids (T,) int64, start (1,) int64, memory_mask (M,) bool,
             text_key, text_value (J, S, D), memory_key, memory_value (C, M, D) float32,
             text_key_i, text_value_i of SA's further layers, i > 0,
             layer_key_n, layer_value_n (target's KV heads, S, target's head dim) for n < N; M = S
    outputs  new_text_key, new_layer_key_n and so on as above,
             top_token_ids (K,) int64, top_log_q (K,) float32, the most probable first

Legend: T tokens, W tokens that are computed whole (N = 0: the last alone), X is T or W, S text
slots, M memory slots, J KV heads, C CA's, H query heads, G query heads of a KV head, R = G X,
D head dim, E hidden size, V draft vocabulary, K drafts per run.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper
from torch import Tensor

from moaspec.model.layers import LongRope
from moaspec.model.moa import MoADrafter
from moaspec_core.checkpoint.drafter_config import LayerConfig
from moaspec_core.errors import InputError
from moaspec_edge.device_onnx.manifest import text_caches
from moaspec_edge.device_onnx.onnx_ops import (
    ACTIVATIONS,
    CONTRIB,
    GraphBuilder,
    Matrix,
    Weights,
    to_numpy,
)

OPSET, IR_VERSION = 21, 10
TOP = 64
"""K, unless the draft vocabulary is smaller; a sampled draft is chosen among them."""
MOST = 2**31 - 1
"""End of a slice that ends with its input."""
HIDDEN = -1e30
"""Added to the scores of hidden slots; with infinity an empty row would become NaN."""


class ReusedLayers(NamedTuple):
    """The target's last N layers.

    Attributes:
        layers: of transformers, built as Llama's, with the drafter's activation.
        sizes: of their attention.
        rope: their rotary embeddings, which depend on a token's position alone.
        norm: the target's final norm.
    """

    layers: Sequence[Any]
    sizes: LayerConfig
    rope: Any
    norm: Any


class TargetParts(NamedTuple):
    """The parts of the target in a graph.

    Attributes:
        embedding_VE: its embedding.
        factor: multiplies the embeddings.
        head: weight of the head's rows that can be drafted; None if head and embedding are one
            matrix, which the graph then holds once.
        bias: of these rows, or None.
        scale, cap: of the logits (`LMHead`).
        reused: its last layers; None for N = 0.
    """

    embedding_VE: Tensor
    factor: float = 1.0
    head: Tensor | None = None
    bias: Tensor | None = None
    scale: float = 1.0
    cap: float | None = None
    reused: ReusedLayers | None = None


def check_drafter(drafter: MoADrafter) -> None:
    """InputError for an ablation, LongRoPE, or an activation that is not known here."""
    if drafter.config.without:
        raise InputError(
            f"The drafter was trained without {', '.join(drafter.config.without)} (an "
            "ablation); an ONNX bundle needs a whole one."
        )
    if isinstance(drafter.decoder.self_rope, LongRope):
        raise InputError(
            "The target has LongRoPE, whose frequencies change with the text's length; an ONNX "
            "bundle cannot hold them. Make a bundle for PyTorch."
        )
    if drafter.config.hidden_act not in ("silu", *ACTIVATIONS):
        raise InputError(
            "An ONNX bundle cannot be made of a drafter with activation "
            f"{drafter.config.hidden_act!r}; known: silu, {', '.join(ACTIVATIONS)}."
        )


def learned_weights(drafter: MoADrafter, weights: Weights, num_target_layers: int) -> bytes:
    """The bytes that a version of a drafter puts in place of those of `DraftGraph.learned`.

    Raises:
        InputError: see `check_drafter`.
    """
    graph = DraftGraph(drafter, TargetParts(torch.empty(0)), weights)
    graph.run_decoder("embeddings", num_target_layers)
    return b"".join(one.raw_data for one in graph.learned)


class DraftGraph(GraphBuilder):
    """Builds the graph of one drafter; see the module's docstring.

    Args:
        drafter: its decoder is used, and its adapter for N where it has adapters.
        weights: of all matrices.

    Raises:
        InputError: see `check_drafter`.
    """

    def __init__(self, drafter: MoADrafter, target: TargetParts, weights: Weights) -> None:
        super().__init__(weights)
        check_drafter(drafter)
        self.drafter, self.target = drafter, target
        self.last = self.constant([-1])
        """Index of the last token."""
        self.positions_T = self.op("Add", self._up_to(self._size("token_ids", 0)), "start")
        self.first = self._first_without_activations() if target.reused else self.last
        """Index of the first of W tokens."""
        self.positions_W = self.newest(self.positions_T)
        self.text_caches = text_caches(drafter.config.self_attention_layers)
        self.slots_S = self._up_to(self._size("text_key", 1))
        self.earlier_WS = self._earlier(self.positions_W)

    def build(self) -> onnx.ModelProto:
        table = self.matrix(to_numpy(self.target.embedding_VE))
        x_TE = self.rows("token_ids", table)
        if self.target.factor != 1.0:
            x_TE = self.op("Mul", x_TE, self.constant(self.target.factor))
        reused = self.target.reused
        x_WE = self.run_decoder(x_TE, len(reused.layers) if reused else 0)
        if reused:
            x_WE = self.run_reused_layers(x_WE, reused)
        x_1E = self.op("Gather", x_WE, self.last, axis=0)
        return self._model(self.take_top(x_1E, self._draft_head(table)))

    def run_decoder(self, x_TE: str, num_target_layers: int) -> str:
        """SA, CA and the adapter, all that learns; (W, E)."""
        self.is_learning = True
        x_WE = self.run_cross_attention(self.run_self_attention(x_TE))
        adapter = self.drafter.adapter(num_target_layers)
        if adapter is not None:
            x_WE = self.linear(self.norm(x_WE, adapter.norm), adapter.linear)
            x_WE = self.op("Mul", x_WE, self.weight(to_numpy(adapter.scale)))
        self.is_learning = False
        return x_WE

    def _draft_head(self, table: Matrix) -> Matrix:
        """The head for the tokens that can be drafted."""
        ids = self.drafter.draft_token_ids
        if self.target.head is not None:
            return self.matrix(to_numpy(self.target.head))
        return table if ids is None else self.selected(table, ids.cpu().numpy())

    def logits(self, product: str, bias: str | None) -> str:
        """Logits of the head's product: bias, scale and soft cap as `LMHead.logits` has them."""
        found = product if bias is None else self.op("Add", product, bias)
        if self.target.scale != 1.0:
            found = self.op("Mul", found, self.constant(self.target.scale))
        if self.target.cap is not None:
            cap = self.constant(float(self.target.cap))
            found = self.op("Mul", self.op("Tanh", self.op("Div", found, cap)), cap)
        return found

    def newest(self, x_T: str) -> str:
        """The W last of T rows."""
        return self.op("Slice", x_T, self.first, self.constant([MOST]), self.constant([0]))

    def run_self_attention(self, x_TE: str) -> str:
        """Store keys and values of all tokens; SA's output for W of them, (W, E)."""
        sizes, rope = self.drafter.config.self_attention, self.drafter.decoder.self_rope
        *before, last = zip(self.drafter.decoder.text_layers, self.text_caches, strict=True)
        at, heads = self.positions_T, sizes.num_kv_heads
        hidden = self.hidden(self._earlier(at), sizes) if before else ""
        for layer, caches in (*before, last):
            normed_TE = self.norm(x_TE, layer.input_layernorm)
            new = self.keys_and_values(normed_TE, layer.key_value, self.positions_T, sizes, rope)
            key, value = (
                self.store(cache, new[name], self.positions_T, heads)
                for name, cache in zip(new, caches, strict=True)
            )
            if layer is last[0]:
                x_TE, normed_TE, at = self.newest(x_TE), self.newest(normed_TE), self.positions_W
                hidden = self.hidden(self.earlier_WS, sizes)
            query = self.queries(normed_TE, layer, at, sizes, rope)
            x_TE = self.finish(x_TE, layer, self.attend(query, key, value, hidden, sizes))
        return x_TE

    def run_cross_attention(self, x_WE: str) -> str:
        """CA's output, (W, E)."""
        layer, sizes = self.drafter.decoder.cross_attention, self.drafter.config.cross_attention
        normed_WE = self.norm(x_WE, layer.input_layernorm)
        rope = self.drafter.decoder.cross_rope
        query = self.queries(normed_WE, layer, self.positions_W, sizes, rope)
        hidden_M = self.op("Where", "memory_mask", self.constant(0.0), self.constant(HIDDEN))
        attention = self.attend(query, "memory_key", "memory_value", hidden_M, sizes)
        return self.finish(x_WE, layer, attention)

    def run_reused_layers(self, x_WE: str, reused: ReusedLayers) -> str:
        """The target's last layers and final norm, (W, E); see `MoADraftRound`.

        Keys and values of tokens with activations stay as the server has sent them. Positions
        before these without any are hidden.
        """
        known_S = self.op("GreaterOrEqual", self.slots_S, self.num_encoded)
        known_S = self.op("Or", known_S, "memory_mask")
        at = self.positions_W
        known_W = self.op("Gather", "memory_mask", at, axis=0)
        known = self.op("Unsqueeze", known_W, self.constant([1, 2]))
        visible_WS = self.op("And", self.earlier_WS, known_S)
        sizes, rope, heads = reused.sizes, reused.rope, reused.sizes.num_kv_heads
        hidden = self.hidden(visible_WS, sizes)
        for index, layer in enumerate(reused.layers):
            normed_WE = self.norm(x_WE, layer.input_layernorm)
            part = layer.self_attn
            new = self.keys_and_values(normed_WE, part, at, sizes, rope)
            key, value = (self.store(f"layer_{k}_{index}", new[k], at, heads, known) for k in new)
            query = self.queries(normed_WE, layer, at, sizes, rope)
            x_WE = self.finish(x_WE, layer, self.attend(query, key, value, hidden, sizes))
        return self.norm(x_WE, reused.norm)

    def keys_and_values(
        self, normed_TE: str, part: Any, positions_T: str, sizes: LayerConfig, rope: Any
    ) -> dict[str, str]:
        """Rotated "key", and "value", (T, J, D) each."""
        heads = self.constant([-1, sizes.num_kv_heads, sizes.head_dim])
        key_TJD, value_TJD = (
            self.op("Reshape", self.linear(normed_TE, one), heads)
            for one in (part.k_proj, part.v_proj)
        )
        key_TJD = self.rotated(key_TJD, positions_T, rope, sizes.head_dim)
        return {"key": key_TJD, "value": value_TJD}

    def store(
        self, cache: str, new_TJD: str, positions_T: str, num_heads: int, known_T11: str = ""
    ) -> str:
        """The cache with the keys or values of these positions, except where it holds them."""
        if known_T11:
            old_JTD = self.op("Gather", cache, positions_T, axis=1)
            old_TJD = self.op("Transpose", old_JTD, perm=[1, 0, 2])
            new_TJD = self.op("Where", known_T11, old_TJD, new_TJD)
        slots = self._slots(positions_T, num_heads)
        new_JTD = self.op("Transpose", new_TJD, perm=[1, 0, 2])
        return self.op("ScatterND", cache, slots, new_JTD, name=f"new_{cache}")

    def queries(
        self, normed_XE: str, layer: Any, positions_X: str, sizes: LayerConfig, rope: Any
    ) -> str:
        """Rotated and scaled queries by KV head, (J, R, D)."""
        query = self.linear(normed_XE, layer.self_attn.q_proj)
        query = self.op("Reshape", query, self.constant([-1, sizes.num_heads, sizes.head_dim]))
        query = self.rotated(query, positions_X, rope, sizes.head_dim)
        query = self.op("Mul", query, self.constant(sizes.head_dim**-0.5))
        heads = sizes.num_kv_heads
        query = self.op("Reshape", query, self.constant([0, heads, -1, sizes.head_dim]))
        query = self.op("Transpose", query, perm=[1, 2, 0, 3])
        return self.op("Reshape", query, self.constant([heads, -1, sizes.head_dim]))

    def hidden(self, visible_XS: str, sizes: LayerConfig) -> str:
        """The mask of R queries, (R, S): added to their scores."""
        hidden_XS = self.op("Where", visible_XS, self.constant(0.0), self.constant(HIDDEN))
        groups = sizes.num_heads // sizes.num_kv_heads
        return self.op("Tile", hidden_XS, self.constant([groups, 1]))

    def _earlier(self, positions_X: str) -> str:
        """Which slots hold tokens up to each of these positions, (X, S)."""
        position_X1 = self.op("Unsqueeze", positions_X, self.constant([1]))
        return self.op("LessOrEqual", self.slots_S, position_X1)

    def attend(
        self, query_JRD: str, key_JSD: str, value_JSD: str, hidden: str, sizes: LayerConfig
    ) -> str:
        """The attention's output, heads side by side, (X, H * D)."""
        scores = self.op("MatMul", query_JRD, self.op("Transpose", key_JSD, perm=[0, 2, 1]))
        weights = self.op("Softmax", self.op("Add", scores, hidden), axis=-1)
        output = self.op("MatMul", weights, value_JSD)
        heads = [sizes.num_kv_heads, sizes.num_heads // sizes.num_kv_heads]
        output = self.op("Reshape", output, self.constant([*heads, -1, sizes.head_dim]))
        output = self.op("Transpose", output, perm=[2, 0, 1, 3])
        return self.op("Reshape", output, self.constant([0, -1]))

    def finish(self, x_WE: str, layer: Any, attention: str) -> str:
        """Output projection, residual and MLP, as `AttentionBlock.finish` computes them."""
        x_WE = self.op("Add", x_WE, self.linear(attention, layer.self_attn.o_proj))
        normed, mlp = self.norm(x_WE, layer.post_attention_layernorm), layer.mlp
        gate = self.activation(self.linear(normed, mlp.gate_proj), self.drafter.config.hidden_act)
        inner = self.op("Mul", gate, self.linear(normed, mlp.up_proj))
        return self.op("Add", x_WE, self.linear(inner, mlp.down_proj))

    def rotated(self, x_THD: str, positions_T: str, rope: Any, head_dim: int) -> str:
        """Apply rotary embeddings; see `model.layers.rotate`."""
        half = rope.inv_freq.shape[0]
        position = self.op("Cast", positions_T, to=TensorProto.FLOAT)
        position = self.op("Reshape", position, self.constant([-1, 1, 1]))
        angles = self.op("Mul", position, self.constant(to_numpy(rope.inv_freq)))
        scaling = self.constant(float(rope.attention_scaling))
        cos, sin = (self.op("Mul", self.op(name, angles), scaling) for name in ("Cos", "Sin"))
        bounds = (0, half), (half, 2 * half), (2 * half, head_dim)
        first, second, *rest = (self.cut(x_THD, a, b, axis=2) for a, b in bounds if a < b)
        parts = (("Sub", (first, cos), (second, sin)), ("Add", (second, cos), (first, sin)))
        turned = (self.op(sign, self.op("Mul", *a), self.op("Mul", *b)) for sign, a, b in parts)
        return self.op("Concat", *turned, *rest, axis=-1)

    def take_top(self, x_1E: str, head: Matrix) -> int:
        """The outputs: K most probable draft tokens and their log-probabilities; returns K.

        Products round their inputs to few bits, so the logits of these K are computed once more.
        """
        bias = None if self.target.bias is None else self.constant(to_numpy(self.target.bias))
        whole, count = self.constant([-1]), min(TOP, head.num_rows)
        products_V = self.op("Reshape", self.product(x_1E, head), whole)
        logits_V = self.logits(products_V, bias)
        total = self.op("ReduceLogSumExp", logits_V, keepdims=1)
        logits, index = self.ops("TopK", logits_V, self.constant([count]), count=2)
        if self.weights != "float32":
            column_E1 = self.op("Reshape", x_1E, self.constant([-1, 1]))
            products = self.op("MatMul", self.rows(index, head), column_E1)
            products = self.op("Reshape", products, whole)
            bias = bias and self.op("Gather", bias, index)
            logits = self.logits(products, bias)
            logits, order = self.ops("TopK", logits, self.constant([count]), count=2)
            index = self.op("Gather", index, order)
        self.op("Sub", logits, total, name="top_log_q")
        ids = self.drafter.draft_token_ids
        if ids is None:
            self.op("Identity", index, name="top_token_ids")
        else:
            self.op("Gather", self.constant(ids.cpu().numpy()), index, name="top_token_ids")
        return count

    @property
    def num_encoded(self) -> str:
        """Tokens up to the last one with activations, (1,) int64."""
        numbers_S = self._up_to(self._size("memory_mask", 0))
        numbers_S = self.op("Add", numbers_S, self.constant(np.int64(1)))
        numbers_S = self.op("Where", "memory_mask", numbers_S, self.constant(np.int64(0)))
        return self.op("ReduceMax", numbers_S, keepdims=1)

    def _first_without_activations(self) -> str:
        """Index of the first of the T tokens that has none, at most of the last one, (1,) int64."""
        first = self.op("Max", self.op("Sub", self.num_encoded, "start"), self.constant([0]))
        last = self.op("Sub", self.op("Shape", "token_ids"), self.constant([1]))
        return self.op("Min", first, last)

    def _slots(self, positions_T: str, num_heads: int) -> str:
        """Indices of positions in a cache, (J, T, 2)."""
        sizes = self.constant([num_heads]), self.op("Shape", positions_T), self.constant([1])
        shape = self.op("Concat", *sizes, axis=0)
        heads = self.constant(np.arange(num_heads)[:, None, None])
        slots = self.op("Unsqueeze", positions_T, self.constant([0, 2]))
        return self.op("Concat", *(self.op("Expand", one, shape) for one in (heads, slots)), axis=2)

    def _size(self, name: str, axis: int) -> str:
        return self.op("Squeeze", self.op("Shape", name, start=axis, end=axis + 1))

    def _up_to(self, count: str) -> str:
        """0 ... count - 1, int64."""
        return self.op("Range", self.constant(np.int64(0)), count, self.constant(np.int64(1)))

    def _model(self, top: int) -> onnx.ModelProto:
        config, reused = self.drafter.config, self.target.reused
        slots = "S" if reused else "M"
        text, memory = (
            (one.num_kv_heads, slots, one.head_dim)
            for one, slots in ((config.self_attention, "S"), (config.cross_attention, slots))
        )
        caches = {name: text for pair in self.text_caches for name in pair}
        if reused:
            shape = (reused.sizes.num_kv_heads, "S", reused.sizes.head_dim)
            for index in range(len(reused.layers)):
                caches |= {f"layer_key_{index}": shape, f"layer_value_{index}": shape}
        inputs: dict[str, Any] = {"token_ids": ("T",), "start": (1,), "memory_mask": (slots,)}
        inputs |= caches | {"memory_key": memory, "memory_value": memory}
        outputs: dict[str, Any] = {f"new_{name}": shape for name, shape in caches.items()}
        outputs |= {"top_token_ids": (top,), "top_log_q": (top,)}
        kinds = {"memory_mask": TensorProto.BOOL}
        kinds |= dict.fromkeys(("token_ids", "start", "top_token_ids"), TensorProto.INT64)
        ends = (
            [
                helper.make_tensor_value_info(name, kinds.get(name, TensorProto.FLOAT), shape)
                for name, shape in one.items()
            ]
            for one in (inputs, outputs)
        )
        graph = helper.make_graph(self.nodes, "draft", *ends, self.initializers)
        versions = [helper.make_opsetid("", OPSET), helper.make_opsetid(CONTRIB, 1)]
        return helper.make_model(graph, opset_imports=versions, ir_version=IR_VERSION)
