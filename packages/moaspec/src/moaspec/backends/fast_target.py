"""A loaded target, accelerated in place: packed weights, fewer calls, CUDA graphs.

Legend: B batch, T new tokens, S visible keys or positions of a table, E hidden size, V vocabulary.
"""

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import c_int64
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from moaspec.backends import fast_sampling  # noqa: F401 - its kernels join with these
from moaspec.backends.angle_table import AngleTable
from moaspec.backends.cpu.build import call, library
from moaspec.backends.cpu.cpu_attention import MAX_ATTENDED, MAX_QUERIES
from moaspec.backends.cpu.embeddings import (
    EmbeddingTable,
    embed_by_kernels,
    embeddings_struct,
    kernels_embed,
)
from moaspec.backends.cpu.fused_layers import FusedNorm, FusedStack, TextStack
from moaspec.backends.cpu.matrix import Matrix
from moaspec.backends.cpu.structures import TextPassStruct
from moaspec.backends.cuda_graphs import GraphSafeWrite, PassGraphs
from moaspec.backends.fast_heads import FastLMHead
from moaspec.backends.fast_layers import AttentionInputs, kernel_norm, make_fast
from moaspec.backends.linear_backends import can_pack
from moaspec.backends.pack import FusedPart, Linear, PackedLinear, pack_linears
from moaspec.drafting.kv_cache import KVWriter
from moaspec.model.layers import CosSin
from moaspec.target.decoder_layers import (
    DecoderLayers,
    LMHead,
    Slots,
    WatchLayer,
    WriteKV,
)
from moaspec.target.families import BY_POSITION, FULL, RotaryEmbeddings
from moaspec.target.generic.generic_layers import GenericLayers
from moaspec.target.target import Target
from moaspec_core.process_memory import end_idle_threads, return_freed_memory


def accelerate(target: Target) -> bool:
    """Replace a target's layers and LM head by faster ones with the same methods, in place.

    On a CPU weights are packed: the target decodes and can be saved, but no longer be moved or
    cast. On a CUDA device passes are recorded as graphs.

    Returns:
        Whether weights were packed; False where there is nothing to gain.
    """
    if isinstance(target.layers, GenericLayers):
        return False  # its modules may use weights in other ways than linear layers do
    target.packed = can_pack(target.dtype, target.device)
    if target.packed:
        pack_linears(target.model, keep=(target.lm_head.linear,))
        if isinstance(target.lm_head.linear, Linear):  # a device's may have eight bits
            target.lm_head = FastLMHead(target.lm_head)
        embed_by_kernels(target.model)
    target.layers = FastDecoderLayers(target.layers, target.device)
    for matrix in _matrices(target):
        matrix.read()
    return_freed_memory()
    end_idle_threads()  # another thread may decode
    return target.packed


def same_bits(target: Target) -> bool:
    """Whether a token's results have the same bits in passes of any width, with drafts or without.

    Then drafts change no text, not even at a tie, and the clock may decide about them. It is so
    where kernels compute all layers and the head.
    """
    if not isinstance(target.lm_head, FastLMHead) or target.lm_head.matrix is None:
        return False
    return target.text_pass() is not None


def weight_bytes(target: Target) -> int:
    """Bytes of the weights that CPU kernels read in a pass; 0 without kernels."""
    return sum(matrix.num_bytes for matrix in _matrices(target))


def _matrices(target: Target) -> list[Matrix]:
    """The weights that CPU kernels read, each once."""
    layers = [one.joined if isinstance(one, FusedPart) else one for one in target.model.modules()]
    matrices = [one.matrix for one in layers if isinstance(one, PackedLinear)]
    if isinstance(target.lm_head, FastLMHead):
        matrices.append(target.lm_head.matrix)
    return list(dict.fromkeys(one for one in matrices if one is not None))


class TabulatedRotary(RotaryEmbeddings):
    """Cosines and sines in float32, looked up where they depend on positions alone."""

    def __init__(self, rotary: RotaryEmbeddings) -> None:
        vars(self).update(vars(rotary))
        self._tables = {
            kind: AngleTable(partial(self._of_positions, kind))
            for kind, parameters in self.parameters.items()
            if parameters["rope_type"] in BY_POSITION
        }

    def angles(
        self, kind: str | None, like: Tensor, position_ids_BT: Tensor, lengths_B: Tensor
    ) -> CosSin:
        if kind in self._tables:
            return self._tables[kind](position_ids_BT)
        return super().angles(kind, like[:, :1].float(), position_ids_BT, lengths_B)

    def table(self, kind: str) -> AngleTable | None:
        """The table of a layer type, or None."""
        return self._tables.get(None if None in self.parameters else kind)

    def _of_positions(self, kind: str | None, position_ids_S: Tensor) -> CosSin:
        cos_1SD, sin_1SD = self.embed(kind, torch.empty(0), position_ids_S[None])
        return cos_1SD[0], sin_1SD[0]


@dataclass(frozen=True)
class LastLayers:
    """A target's last layers, for kernels that run them inside a larger call."""

    stack: FusedStack
    norm: FusedNorm
    angles: AngleTable  # float32, of any position


class FastDecoderLayers(DecoderLayers):
    """`DecoderLayers` in fewer calls.

    CPU kernels run all layers in one call where they can. Else layers run one by one, each in few
    calls, on a GPU replayed from a CUDA graph.

    Attributes:
        fused: the layers by kernels, or None.
        graphs: recordings of passes on a CUDA device, or None.
    """

    def __init__(self, layers: DecoderLayers, device: torch.device) -> None:
        vars(self).update(vars(layers))
        present = [layer for layer in self._base.layers if hasattr(layer, "self_attn")]
        self.fused: FusedStack | None = make_fast(present)
        self.graphs: PassGraphs | None = PassGraphs.of(device)
        self._fast_norm: FusedNorm | None = None
        self._hooks = _hooks(present)
        if self.fused is not None:
            self._fast_norm = kernel_norm(self._base.norm)
            self._rotary, self._is_plain = TabulatedRotary(self._rotary), False

    @property
    def records(self) -> bool:  # type: ignore[override]
        return self.graphs is not None and self.graphs.failure is None

    def run(
        self,
        states_BTE: Tensor,
        position_ids_BT: Tensor,
        *,
        num: int,
        mask_B1TS: Tensor | None,
        write: WriteKV,
        lengths_B: Tensor | None = None,
        watch: WatchLayer | None = None,
    ) -> Tensor:
        inputs = self._inputs(states_BTE, position_ids_BT, mask_B1TS, lengths_B)
        kinds = self._last_types(num)
        if watch is None and len(kinds) == 1:
            (kind,) = kinds
            done_BTE = self._in_one_call(states_BTE, *inputs[kind], write, num)
            if done_BTE is not None:
                return done_BTE
        dtype, fused = states_BTE.dtype, self.fused is not None
        attention_inputs = {
            kind: AttentionInputs.of(cos_sin, mask, self._groups, dtype, fused=fused)
            for kind, (cos_sin, mask) in inputs.items()
        }
        graphs = self.graphs if watch is None else None
        # A recording would skip hooks and gradients.
        watched = any(self._hooks) or self._watches_norm() or states_BTE.requires_grad
        if graphs is not None and isinstance(write, GraphSafeWrite) and not watched:
            return graphs.run(
                partial(self._few_calls, num), states_BTE, attention_inputs, write, key=num
            )
        return self._few_calls(num, states_BTE, attention_inputs, write, watch)

    def last(self, num: int) -> LastLayers | None:
        """The last `num` layers for kernels, if these can run them with full causal attention."""
        if self.fused is None or any(self._hooks) or self._last_types(num) != {FULL}:
            return None
        assert isinstance(self._rotary, TabulatedRotary)
        norm, angles = self._unwatched_norm(), self._rotary.table(FULL)
        if norm is None or angles is None:
            return None
        return LastLayers(self.fused, norm, angles)

    def text_pass(self, table: nn.Module | None, head: LMHead) -> "FusedTextPass | None":
        """None where kernels lack a part of the target."""
        last = self.last(len(self.types))
        if last is None or not kernels_embed(table):
            return None
        return FusedTextPass(last, len(self.types), self._base, head)

    def _last_types(self, num: int) -> set[str]:
        return set(self.types[len(self.types) - num :])

    def _few_calls(
        self,
        num: int,
        states_BTE: Tensor,
        attention_inputs: Mapping[str, AttentionInputs],
        write: WriteKV,
        watch: WatchLayer | None = None,
    ) -> Tensor:
        shared = {kind: {"inputs": inputs} for kind, inputs in attention_inputs.items()}
        return self._one_by_one(states_BTE, shared, write, num, watch)

    def _norm(self, states_BTE: Tensor) -> Tensor:
        """The final norm; the same bits however many tokens a pass has."""
        norm = self._unwatched_norm()
        if norm is None or states_BTE.requires_grad:
            return super()._norm(states_BTE)
        return norm(states_BTE)

    def _unwatched_norm(self) -> FusedNorm | None:
        """The final norm by kernels, unless it has hooks."""
        return None if self._watches_norm() else self._fast_norm

    def _watches_norm(self) -> bool:
        return any(_hooks([self._base.norm]))

    def _in_one_call(
        self,
        states_BTE: Tensor,
        cos_sin: CosSin,
        mask_B1TS: Tensor | None,
        write: WriteKV,
        num: int,
    ) -> Tensor | None:
        """The last `num` layers and the final norm over a few tokens by kernels.

        None if layers must run one by one: they have hooks, or their keys and values do not go into
        a cache that kernels know.
        """
        if (
            self.fused is None
            or mask_B1TS is None
            or mask_B1TS.shape[2] > MAX_QUERIES
            or not isinstance(write, KVWriter)
            or any(self._hooks)
            or states_BTE.requires_grad
        ):
            return None
        cos_BTR, sin_BTR = (part.contiguous() for part in cos_sin)
        norm = self._unwatched_norm()
        done_BTE = self.fused.run(
            states_BTE,
            cos_BTR,
            sin_BTR,
            mask_B1TS.contiguous(),
            slots=write.slots,
            num=num,
            norm=norm,
        )
        return done_BTE if norm is not None else cast(Tensor, self._base.norm(done_BTE))


def _hooks(modules: Sequence[nn.Module]) -> list[Mapping[int, Any]]:
    """The hooks of modules, now and later."""
    return [
        hooks for module in modules for hooks in (module._forward_hooks, module._forward_pre_hooks)
    ]


class FusedTextPass:
    """A `TextPass` by CPU kernels.

    Args:
        layers: all of the target's, `num` of them.
        base: transformers' model without its head; its input embedding is bf16.
    """

    def __init__(self, layers: LastLayers, num: int, base: Any, head: LMHead) -> None:
        matrix = head.matrix if isinstance(head, FastLMHead) else None
        self._table: EmbeddingTable = base.embed_tokens
        self._text = TextStack(layers.stack, layers.angles.rows, num=num, norm=layers.norm)
        self._struct = TextPassStruct(self._text.layers, num, self._text.struct)
        self._text.struct = self._struct.text  # from now on it writes into this structure
        self._head, self._hooks = matrix, _hooks([*base.layers, base.norm, self._table])
        if matrix is not None:
            self._struct.head = ctypes.addressof(matrix.described)

    def run(
        self,
        token_ids: Sequence[int],
        parents: Sequence[int],
        slots: Slots,
        *,
        finished: int,
        choices: int,
    ) -> tuple[Tensor, list[int] | None] | None:
        count, vocabulary = len(token_ids), self._table.num_embeddings
        assert choices <= finished, "a choice needs the state before it"
        assert 1 <= finished <= count
        if count > MAX_ATTENDED or any(self._hooks):
            return None
        if not 0 <= min(token_ids) <= max(token_ids) < vocabulary:
            return None
        choices = 0 if self._head is None else choices
        states_TE = torch.empty((count, self._table.embedding_dim), dtype=torch.bfloat16)
        ids, before = (c_int64 * count)(*token_ids), (c_int64 * count)(*parents)
        chosen = (c_int64 * choices)()
        ((row,), (start,)), stop = (slots.rows_B, slots.starts_B), slots.visible
        self._text.begin(slots.cache, row, start, stop, stop)
        self._struct.embeddings = embeddings_struct(self._table)
        struct = ctypes.byref(self._struct)
        numbers = states_TE, finished, choices, chosen
        call(library().moaspec_text, struct, ids, before, count, *numbers)
        return states_TE[count - finished :], None if self._head is None else chosen[:]
