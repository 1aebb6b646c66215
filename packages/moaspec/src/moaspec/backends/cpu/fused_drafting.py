"""The calls of kernels that encode verified tokens and draft a tree for a request.

Legend: N tokens, T tokens read, L layers, K one layer's key and value, J KV heads, D head dim, R
the rotated dims, O outputs of the head, V vocabulary, E hidden size.
"""

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int64, c_void_p

import torch
from torch import Tensor

from moaspec.backends.angle_table import AngleRows, FindAngles
from moaspec.backends.cpu.build import call, library
from moaspec.backends.cpu.embeddings import EmbeddingTable, embeddings_struct
from moaspec.backends.cpu.fused_layers import FusedLayer, FusedNorm, TextStack, angle_addresses
from moaspec.backends.cpu.matrix import Matrix
from moaspec.backends.cpu.structures import (
    CouplingStruct,
    DrafterStruct,
    EncoderStruct,
    ExitStruct,
    GrowthStruct,
    SamplerStruct,
)
from moaspec.sampling.kernels import SamplerParams


class FusedEncoder:
    """LSA, its mean over layers, the projection, and CA's keys and values, in one call.

    Args:
        layer: LSA, over the layers of one token.
        projection: applied to the mean over layers.
        memory: CA's projection to keys and values.
        layer_angles: of the layers that LSA attends over.
        scale: of LSA's scores.
    """

    def __init__(
        self,
        layer: FusedLayer,
        projection: Matrix,
        memory: FusedLayer,
        layer_angles: FindAngles,
        scale: float,
    ) -> None:
        # Kept alive, because the C structure holds only their addresses.
        self._held, self._layer_angles = (layer, projection, memory), layer_angles
        self._layer, self._memory = layer.described, memory.described
        self._struct = EncoderStruct(
            layer=ctypes.addressof(self._layer),
            scale=scale,
            projection=ctypes.addressof(projection.described),
            memory=ctypes.addressof(self._memory),
        )

    def run(
        self, cache: Tensor, row: int, slots: range, token_angles: AngleRows, memory: Tensor
    ) -> None:
        """Write CA's keys (rotated) and values of neighbouring tokens into these slots of `memory`.

        Args:
            cache: the target's, see `Slots`.
            slots: of the tokens, in this row of both caches.
            token_angles: those of the tokens.
            memory: CA's cache, of one layer.
        """
        layer, half, cache_row, head, slot, last = cache.stride()
        layers, _, _, heads, _, dim = cache.shape
        assert (2 * heads * dim, last) == (self._layer.read.inputs, 1)
        struct = EncoderStruct.from_buffer_copy(self._struct)  # another thread may encode, too
        struct.layers, struct.heads = layers, heads
        layer_angles = self._layer_angles(0, layers)  # kept alive until the call returns
        struct.cos, struct.sin, struct.turned = angle_addresses(layer_angles)
        struct.token_stride, struct.layer_stride = slot, layer
        struct.head_stride, struct.half_stride = head, half
        address = cache.data_ptr() + cache.itemsize * (row * cache_row + slots.start * slot)
        cos, sin, turned = angle_addresses(token_angles)
        tokens = c_void_p(address), len(slots), c_void_p(cos), c_void_p(sin), turned
        _, half, cache_row, head, slot, _ = memory.stride()
        keys = memory.data_ptr() + memory.itemsize * (row * cache_row + slots.start * slot)
        values = keys + memory.itemsize * half
        to = c_void_p(keys), c_void_p(values), head
        call(library().moaspec_encode, ctypes.byref(struct), *tokens, *to)

    def new_memory(self, num_tokens: int) -> Tensor:
        """A `memory` for `run`, of one row."""
        size = 1, 2, 1, self._memory.kv_heads, num_tokens, self._memory.head_dim
        return torch.empty(size, dtype=torch.bfloat16)


class FusedExit:
    """A norm, a linear layer and a scale, in one call."""

    def __init__(self, norm: FusedNorm, linear: Matrix, scale: float) -> None:
        assert linear.inputs == linear.outputs == len(norm.weight_E)
        self._parts = norm, linear  # kept alive: the C structure holds only their addresses
        self.described = ExitStruct(
            norm.weight_E.data_ptr(), ctypes.addressof(linear.described), norm.eps, scale
        )

    def run(self, x: Tensor) -> Tensor:
        """Apply the exit to x, (..., E) bf16."""
        assert x.dtype == torch.bfloat16
        width = self._parts[1].outputs
        assert x.shape[-1] == width
        x = x.clone(memory_format=torch.contiguous_format)
        call(library().moaspec_exit, ctypes.byref(self.described), x, x.numel() // width)
        return x


class Coupling:
    """How drafts are ranked for a request that samples; see `moaspec.drafting.path_scores`.

    Args:
        sampler: of the first level's tokens, its temperature divided by the sharpness.
        agreement: the target chooses the draft of rank r with probability
            sigmoid(a + b * margin), with a and b of line r; the last line holds for further ranks.
    """

    def __init__(self, sampler: SamplerParams, agreement: Sequence[tuple[float, float]]) -> None:
        numbers = [number for line in agreement for number in line]
        self._numbers = (c_float * len(numbers))(*numbers)  # kept alive: struct hold its address
        self.struct = CouplingStruct(
            SamplerStruct(*sampler), ctypes.addressof(self._numbers), len(agreement)
        )


class FusedDrafter:
    """Drafts a tree in one call, level by level: the best tokens after a text, then after these.

    The C structures are kept between calls, so no two threads may use it at once. Before a call,
    each part must `begin`.

    Args:
        text: SA, over the unread tokens and then the drafts. Each token takes the next slot, and
            sees the text and its ancestors.
        memory: CA, over the last `finished` unread tokens and then the drafts; all tokens see the
            same slots.
        last: the target's last layers, over the same tokens as CA, if any. Slots in the target's
            cache, and what a token sees, are as in SA.
        exit_: norm and linear layer after CA, if any.
        names_O: int64, contiguous, token ids of the head's outputs.
        table: embeddings of all ids.
    """

    def __init__(
        self,
        text: TextStack,
        memory: TextStack,
        last: TextStack | None,
        exit_: FusedExit | None,
        *,
        head: Matrix,
        names_O: Tensor,
        table: EmbeddingTable,
    ) -> None:
        assert names_O.dtype == torch.int64
        assert len(names_O) == head.outputs
        self.text, self.memory, self.last = text, memory, last
        self._head, self._table, self._held = head, table, (exit_, names_O)
        self._struct = struct = DrafterStruct(text.layers, text.num, memory.layers)
        struct.head, struct.names = ctypes.addressof(head.described), names_O.data_ptr()
        struct.width = table.embedding_dim
        # From now on the parts write into this structure.
        struct.text_pass, struct.memory_pass = text.struct, memory.struct
        text.struct, memory.struct = struct.text_pass, struct.memory_pass
        if last is not None:
            struct.last, struct.reused, struct.last_pass = last.layers, last.num, last.struct
            last.struct = struct.last_pass
        if exit_ is not None:
            struct.exit = ctypes.addressof(exit_.described)
        self._growth = GrowthStruct()
        self._nodes = (c_int64 * 0)(), (c_int64 * 0)(), (c_float * 0)()

    def draft_tree(
        self,
        unread: Sequence[int],
        finished: int,
        shape: tuple[int, int, float],
        coupling: Coupling | None,
    ) -> tuple[list[int], list[int], list[float], int, int]:
        """Draft a tree after a text.

        Args:
            unread: the end of the text, at least one token.
            finished: unread tokens that CA processes, at most `MAX_ATTENDED`: the last one, and
                with `last` also the tokens before it that the target's cache lacks.
            shape: most levels to draft; most nodes of a level that get children, and most children
                of each; the log-probability that a path needs for its last node to get children.
            coupling: for a request that samples; its filters drop drafts.

        Returns:
            Three lists over the drafted nodes, parents first: token ids in the target's vocabulary;
            parents, -1 for the root; log-probabilities of paths (with `coupling`: that the target
            chooses them). Then the number of levels, and of nodes that got children.
        """
        assert 1 <= finished <= len(unread)
        struct, growth, (depth, breadth, least) = self._struct, self._growth, shape
        assert 0 < breadth <= self._head.outputs
        struct.finished, struct.embeddings = finished, embeddings_struct(self._table)
        growth.depth, growth.breadth, growth.least = depth, breadth, least
        growth.coupling = None if coupling is None else ctypes.addressof(coupling.struct)
        most = breadth + (depth - 1) * breadth**2
        if most > len(self._nodes[0]):
            self._nodes = (c_int64 * most)(), (c_int64 * most)(), (c_float * most)()
            growth.tokens, growth.parents, growth.scores = (
                ctypes.addressof(array) for array in self._nodes
            )
        tokens, parents, scores = self._nodes
        text_ids = (c_int64 * len(unread))(*unread)
        addresses = ctypes.byref(struct), text_ids, len(unread), ctypes.byref(growth)
        call(library().moaspec_tree, *addresses)
        count = growth.nodes
        return tokens[:count], parents[:count], scores[:count], growth.levels, growth.leaves
