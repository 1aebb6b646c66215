"""One call that encodes verified tokens, and one that drafts a tree for a request.

Legend: N tokens, T tokens read, L layers, K one layer's key and value, J KV heads, D head dim, R
the rotated dims, O outputs of the head, V vocabulary, E hidden size.
"""

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int64
from dataclasses import dataclass

import torch
from torch import Tensor

from moaspec.backends.cpu.build import call, library
from moaspec.backends.cpu.fused_layers import FusedLayer, FusedNorm, FusedStack, Pass, Slots
from moaspec.backends.cpu.fused_sampling import SamplerParams
from moaspec.backends.cpu.matrix import Matrix
from moaspec.backends.cpu.structures import (
    CouplingFacts,
    DrafterFacts,
    EncoderFacts,
    ExitFacts,
    GrowthFacts,
    PassFacts,
    SamplerFacts,
)


class FusedEncoder:
    """LSA, its mean over layers, the projection, and CA's keys and values, in one call.

    Args:
        layer: LSA, over the layers of one token.
        projection: applied to the mean over layers.
        memory: CA's projection to keys and values.
        scale: of LSA's scores.
    """

    def __init__(
        self, layer: FusedLayer, projection: Matrix, memory: FusedLayer, scale: float
    ) -> None:
        # Kept alive, because the C structure holds only their addresses.
        self._parts, self._scale = (layer, projection, memory), scale

    def run(
        self,
        kv_NLJ2D: Tensor,
        layer_angles: tuple[Tensor, Tensor],
        token_angles: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Keys (rotated), then values: (N, 2 J, D).

        Args:
            kv_NLJ2D: keys and values of N tokens in L layers, bf16. Only D must be contiguous, so a
                view of a cache needs no copy.
            layer_angles: cosines and sines of the layers, float32, contiguous, (..., L, R) each.
            token_angles: those of the tokens, (..., N, R) each.
        """
        assert kv_NLJ2D.dtype == torch.bfloat16
        layer, projection, memory = (part.described for part in self._parts)
        count, layers, heads, two, dim = kv_NLJ2D.shape
        assert heads * two * dim == layer.read.inputs
        assert token_angles[0].numel() == count * token_angles[0].shape[-1]
        *strides, last = kv_NLJ2D.stride()
        assert last == 1
        out = kv_NLJ2D.new_empty((count, 2 * memory.kv_heads, memory.head_dim))
        facts = EncoderFacts(
            ctypes.addressof(layer),
            *(part.data_ptr() for part in layer_angles),
            layer_angles[0].shape[-1],
            layers,
            self._scale,
            ctypes.addressof(projection),
            ctypes.addressof(memory),
            heads,
            *strides,
        )
        turned = token_angles[0].shape[-1]
        encode = library().moaspec_encode
        call(encode, ctypes.byref(facts), kv_NLJ2D, count, *token_angles, turned, out)
        return out


class FusedExit:
    """A norm, a linear layer and a scale, in one call."""

    def __init__(self, norm: FusedNorm, linear: Matrix, scale: float) -> None:
        assert linear.inputs == linear.outputs == len(norm.weight_E)
        self._parts = norm, linear  # kept alive: the C structure holds only their addresses
        self.described = ExitFacts(
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


@dataclass(frozen=True)
class TreePart:
    """The last layers of a stack, and the unread tokens that they process in `draft_tree`."""

    stack: FusedStack  # its last `num` layers run
    cos_TR: Tensor  # cosines: a row for each token, then for each level; float32, contiguous
    sin_TR: Tensor  # sines, in the same layout
    slots: Slots  # for the first of these tokens
    num: int = 1
    norm: FusedNorm | None = None  # after the last layer

    def described(self) -> Pass:
        """The pass over the first token."""
        return Pass(
            self.stack,
            1,
            (self.cos_TR, self.sin_TR),
            slots=self.slots,
            num=self.num,
            norm=self.norm,
        )


class Coupling:
    """How drafts are ranked for a request that samples; see `moaspec.drafting.path_scores`.

    Args:
        sampler: of the first level's tokens, its temperature divided by the sharpness.
        agreement: the target chooses the draft of rank r with probability
            sigmoid(a + b * margin), with a and b of line r; the last line holds for further ranks.
    """

    def __init__(self, sampler: SamplerParams, agreement: Sequence[tuple[float, float]]) -> None:
        numbers = [number for line in agreement for number in line]
        self._numbers = (c_float * len(numbers))(*numbers)  # kept alive: facts hold its address
        self.facts = CouplingFacts(
            SamplerFacts(*sampler), ctypes.addressof(self._numbers), len(agreement)
        )


def draft_tree(
    unread: Sequence[int],
    depth: int,
    breadth: int,
    least: float,
    *,
    text: TreePart,
    memory: TreePart,
    exit_: FusedExit | None = None,
    last: TreePart | None = None,
    finished: int = 1,
    head: Matrix,
    names_O: Tensor,
    embeddings_VE: Tensor,
    coupling: Coupling | None = None,
) -> tuple[list[int], list[int], list[float], int, int]:
    """Draft a tree level by level: the best tokens after a text, then after the best of these.

    Args:
        unread: the end of the text, at least one token.
        depth: levels to draft, at most.
        breadth: nodes of a level that get children, at most, and children of each; at most O.
        least: log-probability that a path needs for its last node to get children.
        text: SA, over the unread tokens and then the drafts. Each token takes the next slot, and
            sees the text and its ancestors.
        memory: CA, over the last `finished` unread tokens and then the drafts; all tokens see the
            same slots.
        exit_: norm and linear layer after CA, if any.
        last: the target's last layers, over the same tokens as CA, if any. Slots in the target's
            cache, and what a token sees, are as in SA.
        finished: unread tokens that CA processes: the last one, and with `last` also the tokens
            before it that the target's cache lacks.
        names_O: int64, token ids of the head's outputs.
        embeddings_VE: of all ids, bf16.
        coupling: for a request that samples; its filters drop drafts.

    Returns:
        Three lists over the drafted nodes, parents first: token ids in the target's vocabulary;
        parents, -1 for the root; log-probabilities of paths (with `coupling`: that the target
        chooses them). Then the number of levels, and of nodes that got children.
    """
    assert embeddings_VE.dtype == torch.bfloat16
    assert names_O.dtype == torch.int64
    assert len(names_O) == head.outputs
    assert 0 < breadth <= head.outputs
    assert len(text.cos_TR) == len(unread) + depth - 1
    assert 1 <= finished <= len(unread)
    parts = [text, memory] if last is None else [text, memory, last]
    assert all(len(part.cos_TR) == finished + depth - 1 for part in parts[1:])
    names_O = names_O.contiguous()
    passes = [part.described() for part in parts]
    facts = [one.facts for one in passes]
    drafter = DrafterFacts(
        text.stack.address(1),
        memory.stack.address(1),
        None if last is None else last.stack.address(last.num),
        0 if last is None else last.num,
        None if exit_ is None else ctypes.addressof(exit_.described),
        *(facts if last is not None else [*facts, PassFacts()]),
        finished,
        ctypes.addressof(head.described),
        names_O.data_ptr(),
        embeddings_VE.data_ptr(),
        embeddings_VE.shape[1],
    )
    most = breadth + (depth - 1) * breadth**2
    tokens, parents, scores = (c_int64 * most)(), (c_int64 * most)(), (c_float * most)()
    nodes = (ctypes.addressof(array) for array in (tokens, parents, scores))
    coupled = None if coupling is None else ctypes.addressof(coupling.facts)
    growth = GrowthFacts(depth, breadth, least, 0, 0, 0, *nodes, coupled)
    text_ids = (c_int64 * len(unread))(*unread)
    draft = library().moaspec_tree
    call(draft, ctypes.byref(drafter), text_ids, len(unread), ctypes.byref(growth))
    count = growth.nodes
    return tokens[:count], parents[:count], scores[:count], growth.levels, growth.leaves
