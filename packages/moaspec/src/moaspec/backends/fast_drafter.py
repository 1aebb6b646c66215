"""A drafter for decoding: a copy with packed weights whose modules are replaced by faster ones.

Each replacement subclasses the module of `moaspec.model` that it stands for and has the same
methods. Where the CPU kernels cannot compute a module, the plain one stays.

Legend: B batch, T tokens, H query heads, J KV heads, C CA's KV heads, D head dim, E hidden size, L
target layers, K one layer's key and value, M tokens of a batch, X heads.
"""

import copy
import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from moaspec.backends.angle_table import AngleTable, FindAngles
from moaspec.backends.cpu.cpu_attention import MAX_QUERIES, fast_attention
from moaspec.backends.cpu.fused_drafting import FusedEncoder, FusedExit
from moaspec.backends.cpu.fused_layers import FusedLayer, FusedNorm, FusedStack
from moaspec.backends.cpu.quantized_weight import LANES
from moaspec.backends.fast_heads import fast_draft_head
from moaspec.backends.linear_backends import can_pack
from moaspec.backends.pack import is_silu, join_linears, joint_matrix, pack_linears
from moaspec.drafting.kv_cache import StoredAttention, StoredMemory
from moaspec.model.layers import (
    AttentionBlock,
    CosSin,
    CrossAttend,
    CrossAttentionLayer,
    DecoderLayer,
    LongRope,
    Rope,
    SelfAttend,
)
from moaspec.model.moa import ExitAdapter, MoADrafter, TargetEncoder
from moaspec.target.target import Target
from moaspec_core.process_memory import end_idle_threads, return_freed_memory

Module = TypeVar("Module", bound=nn.Module)


def prepared(drafter: MoADrafter, target: Target) -> tuple[MoADrafter, nn.Module]:
    """The drafter and its head for decoding: packed copies if they are faster on this CPU.

    They are made once, and again when weights change, so a drafter can be tried out during
    training. The drafter itself does not change. A drafter with hooks or replaced methods is not
    copied, so that these are called.
    """
    altered = _is_altered(drafter)
    ids = drafter.draft_token_ids
    key = (
        weakref.ref(target),
        target.packed,
        target.dtype,
        _version(drafter),
        drafter.training,
        altered,
        None if ids is None else ids.data_ptr(),
    )
    latest = _PREPARED.get(drafter)
    if latest is None or latest[0] != key:
        head = fast_draft_head(target, ids, drafter.head_moment)
        # Packing, the last of both, gives freed memory back.
        packed = drafter if drafter.training or altered else _packed(drafter)
        latest = key, None if packed is drafter else packed, head
        _PREPARED[drafter] = latest
    _, copied, head = latest
    return copied or drafter, head


_PREPARED: weakref.WeakKeyDictionary[MoADrafter, tuple[object, MoADrafter | None, nn.Module]] = (
    weakref.WeakKeyDictionary()
)
"""The latest result of `prepared` for each drafter; None stands for the drafter itself. It is not
an attribute of the drafter, which is copied, moved and saved without it."""


def _packed(drafter: MoADrafter) -> MoADrafter:
    # The encoder's outputs for a prompt are cached and sent to devices, which have no encoder.
    encoder = getattr(drafter, "encoder", None)
    return packed_copy(drafter, exact=[] if encoder is None else [encoder])


def _version(drafter: nn.Module) -> tuple[tuple[int, int], ...]:
    """A value that changes with the weights: where each is stored, and how often it was written."""
    return tuple(
        (p.data_ptr(), 0 if p.is_inference() else p._version) for p in drafter.parameters()
    )


def _is_altered(drafter: nn.Module) -> bool:
    """Whether a module has hooks or replaced methods."""
    return any(
        module._forward_hooks
        or module._forward_pre_hooks
        or any(
            callable(value) and hasattr(type(module), name) for name, value in vars(module).items()
        )
        for module in drafter.modules()
    )


def packed_copy(drafter: Module, *, exact: Collection[nn.Module] = ()) -> Module:
    """The fastest copy of a drafter on this CPU; the drafter itself if no copy is faster.

    Args:
        exact: children whose outputs are more than drafts, so that their weights keep all bits.
    """
    weight = next(drafter.parameters())
    if not can_pack(weight.dtype, weight.device):
        return drafter
    copied = copy.deepcopy(drafter)
    kept = {name for name, child in drafter.named_children() if child in exact}
    for name, child in list(copied.named_children()):
        setattr(copied, name, _replaced(child, partial(_fast_layer, drafts=name not in kept)))
    pack_linears(copied)
    copied = cast(Module, _replaced(copied, _fast))
    return_freed_memory()
    end_idle_threads()  # another thread may decode
    return copied


def _fast_layer(module: nn.Module, *, drafts: bool) -> nn.Module:
    return fast_layer(module, drafts=drafts) if isinstance(module, AttentionBlock) else module


def _replaced(module: nn.Module, fast: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """Replace a module after all modules inside it."""
    for name, child in list(module.named_children()):
        setattr(module, name, _replaced(child, fast))
    return fast(module)


def _fast(module: nn.Module) -> nn.Module:
    """The replacement of a module whose linear layers are packed."""
    if isinstance(module, TargetEncoder):
        return FastTargetEncoder(module)
    if isinstance(module, ExitAdapter):
        return FastExitAdapter.of(module)
    return TabulatedRope.of(module) if isinstance(module, Rope) else module


def _adopt(fast: nn.Module, plain: nn.Module) -> None:
    """Initialise a module with the weights, children and settings of the one it replaces."""
    nn.Module.__init__(fast)
    vars(fast).update(vars(plain))


class TabulatedRope(Rope):
    """`Rope` with a table of cosines and sines by position."""

    def __init__(self, rope: Rope) -> None:
        _adopt(self, rope)
        self.table = AngleTable(rope.angles)

    @classmethod
    def of(cls, rope: Rope) -> Rope:
        """A table, unless frequencies depend on the text's length or a lookup would await a GPU."""
        plain = isinstance(rope, LongRope) or rope.inv_freq.device.type != "cpu"
        return rope if plain else cls(rope)

    def angles(self, position_ids: Tensor) -> CosSin:
        return self.table(position_ids)

    def along(self, start: int, stop: int) -> CosSin:
        return self.table.between(start, stop)


def angle_rows(rope: Rope) -> FindAngles:
    """`AngleTable.rows` of rotary embeddings; computed in every call where there is no table."""
    if isinstance(rope, TabulatedRope):
        return rope.table.rows
    return lambda start, stop: (*rope.along(start, stop), 0)


class JoinedAttend(ABC):
    """An `attend` over a cache of its own that needs no split of the heads."""

    @abstractmethod
    def joined(self, heads_BTXD: Tensor) -> Tensor:
        """Attend with queries, and keys and values if the layer has its own, in one tensor.

        Args:
            heads_BTXD: (B, T, H, D) or (B, T, H + 2 J, D).

        Returns:
            (B, T, H * D).
        """


class FastAttentionBlock(AttentionBlock):
    """A decoder layer by CPU kernels, with the same bits for any number of tokens.

    An `attend` over a cache of the core lets kernels compute the whole layer in one call; see also
    `JoinedAttend`.

    Args:
        fused: the projections, norms and MLP.
        heads: H, and twice J where the layer has keys and values of its own.
    """

    def __init__(self, layer: AttentionBlock, fused: FusedLayer, heads: Sequence[int]) -> None:
        _adopt(self, layer)
        self.fused, self._heads = fused, list(heads)
        self.stack = FusedStack([fused], layer.self_attn.head_dim**-0.5)

    def forward(self, x_BTE: Tensor, cos_sin: CosSin, attend: SelfAttend | CrossAttend) -> Tensor:
        done = self.in_one_call(x_BTE, cos_sin, attend)
        return super().forward(x_BTE, cos_sin, attend) if done is None else done

    def in_one_call(
        self, x_BTE: Tensor, cos_sin: CosSin, attend: SelfAttend | CrossAttend
    ) -> Tensor | None:
        """The whole layer; None over another cache, or with too many tokens."""
        if x_BTE.shape[1] > MAX_QUERIES or not isinstance(attend, StoredAttention | StoredMemory):
            return None
        mask = attend.mask.contiguous()
        return self.stack.run(x_BTE, *_contiguous(cos_sin), mask, slots=attend.slots, num=1)

    def attention(self, x_BTE: Tensor, cos_sin: CosSin, attend: SelfAttend | CrossAttend) -> Tensor:
        if isinstance(attend, JoinedAttend):
            return attend.joined(self.fused.project(x_BTE, *_contiguous(cos_sin)))
        return super().attention(x_BTE, cos_sin, attend)

    def attention_inputs(self, x_BTE: Tensor, cos_sin: CosSin) -> Sequence[Tensor]:
        heads_BTXD = self.fused.project(x_BTE, *_contiguous(cos_sin))
        return heads_BTXD.transpose(1, 2).split(self._heads, dim=1)

    def finish(self, x_BTE: Tensor, attention_BTX: Tensor) -> Tensor:
        return self.fused.finish(x_BTE, attention_BTX)

    def finish_mean(self, x_BTE: Tensor, attention_BTX: Tensor) -> Tensor:
        return self.fused.finish_mean(x_BTE, attention_BTX)


class FastDecoderLayer(FastAttentionBlock, DecoderLayer):
    """A `DecoderLayer` by CPU kernels."""

    def keys_values(self, x_BTE: Tensor, cos_sin: CosSin) -> tuple[Tensor, Tensor]:
        _, key_BJTD, value_BJTD = self.attention_inputs(x_BTE, cos_sin)
        return key_BJTD, value_BJTD


class FastCrossAttentionLayer(FastAttentionBlock, CrossAttentionLayer):
    """A `CrossAttentionLayer` by CPU kernels."""


def fast_layer(layer: AttentionBlock, *, drafts: bool) -> AttentionBlock:
    """Pack a layer of a drafter in place; by kernels where they can compute it.

    Queries, keys and values become one matrix, although two modules hold their projections.

    Args:
        layer: for decoding alone from now on.
    """
    own, memory = layer.self_attn, getattr(layer, "key_value", None)
    homes = {"q_proj": own} | ({} if memory is None else {"k_proj": memory, "v_proj": memory})
    projections = [getattr(home, name) for name, home in homes.items()]
    if not all(type(one) is nn.Linear for one in projections):  # a device's, in eight bits
        pack_linears(layer, drafts=drafts)
        return layer
    if len({one.bias is None for one in projections}) == 1:
        parts = join_linears(projections, drafts=drafts)
        for part, (name, home) in zip(parts, homes.items(), strict=True):
            setattr(home, name, part)
    pack_linears(layer, drafts=drafts)
    num_heads = projections[0].out_features // own.head_dim
    fused = _fused_layer(layer, [getattr(home, name) for name, home in homes.items()], num_heads)
    if fused is None:
        return layer
    if isinstance(layer, DecoderLayer):
        num_kv_heads = layer.key_value.num_heads
        return FastDecoderLayer(layer, fused, (num_heads, num_kv_heads, num_kv_heads))
    return FastCrossAttentionLayer(layer, fused, (num_heads,))


def _fused_layer(
    layer: AttentionBlock, projections: Sequence[nn.Module], num_heads: int
) -> FusedLayer | None:
    norms = (layer.input_layernorm, layer.post_attention_layernorm)
    if norms[0].eps is None or not is_silu(layer.mlp.act):
        return None
    return FusedLayer.of(
        (
            joint_matrix(projections),
            joint_matrix([layer.self_attn.o_proj]),
            joint_matrix([layer.mlp.gate_proj, layer.mlp.up_proj]),
            joint_matrix([layer.mlp.down_proj]),
        ),
        norms=[norm.weight for norm in norms],
        head_norms=None,
        eps=norms[0].eps,
        heads=(num_heads, layer.key_value.num_heads if isinstance(layer, DecoderLayer) else 0),
        head_dim=layer.self_attn.head_dim,
    )


class FastTargetEncoder(TargetEncoder):
    """A `TargetEncoder` by CPU kernels, as far as they can compute it.

    Attributes:
        fused: CA's norm, keys and values in one call, or None.
        in_one_call: the whole encoder in one call, or None.
    """

    def __init__(self, encoder: TargetEncoder) -> None:
        _adopt(self, encoder)
        self.fused = _fused_memory(encoder)
        self.in_one_call = _fused_encoder(encoder, self.fused)
        self._memory_angles = angle_rows(encoder.memory_rope)
        self._unfolded = encoder.fold.trained if encoder.fold else sys.maxsize

    def encode(self, kv_BTLK: Tensor, position_ids_BT: Tensor) -> tuple[Tensor, Tensor]:
        if self.in_one_call is None or kv_BTLK.dtype != torch.bfloat16 or not kv_BTLK.numel():
            return super().encode(kv_BTLK, position_ids_BT)
        kv_BTLK = self.fold(kv_BTLK, position_ids_BT) if self.fold else kv_BTLK
        rows, tokens, layers, _ = kv_BTLK.shape
        # As a cache of one row and one head.
        kv_NL112D = kv_BTLK.contiguous().view(rows * tokens, layers, 1, 1, 2, -1)
        angles = *_contiguous(self.memory_rope(position_ids_BT)), 0
        as_cache, slots = kv_NL112D.permute(1, 4, 2, 3, 0, 5), range(rows * tokens)
        memory_121CND = self.in_one_call.new_memory(len(slots))
        self.in_one_call.run(as_cache, 0, slots, angles, memory_121CND)
        key_CBTD, value_CBTD = memory_121CND[0, :, 0].unflatten(2, (rows, tokens))
        return key_CBTD.transpose(0, 1), value_CBTD.transpose(0, 1)

    def encode_stored(self, cache: Tensor, row: int, tokens: range, memory: Tensor) -> bool:
        """`encode` of neighbouring tokens of one text in one call; False if kernels lack a part.

        Args:
            cache: the target's, see `Slots`; of the drafter's dtype.
            row: the text's, in both caches.
            memory: CA's cache, which gets the result.
        """
        if self.in_one_call is None or tokens.stop > self._unfolded:
            return False
        angles = self._memory_angles(tokens.start, tokens.stop)
        self.in_one_call.run(cache, row, tokens, angles, memory)
        return True

    def layer_mean(self, x_MLK: Tensor) -> Tensor:
        cos_sin = self.layer_rope.between(0, x_MLK.shape[1])
        return self.layer_self_attention.mean(x_MLK, cos_sin, fast_attention)

    def project_kv(self, states_BTE: Tensor, position_ids_BT: Tensor) -> tuple[Tensor, Tensor]:
        if self.fused is None:
            return super().project_kv(states_BTE, position_ids_BT)
        cos_sin = _contiguous(self.memory_rope(position_ids_BT))
        heads_BXTD = self.fused.project(states_BTE, *cos_sin).transpose(1, 2)
        key_BCTD, value_BCTD = heads_BXTD.chunk(2, dim=1)
        return key_BCTD, value_BCTD


def _fused_memory(encoder: TargetEncoder) -> FusedLayer | None:
    memory, norm = encoder.memory_key_value, encoder.memory_norm
    if norm.eps is None:
        return None
    return FusedLayer.of(
        [joint_matrix([memory.k_proj, memory.v_proj])],
        norms=[norm.weight],
        head_norms=None,
        eps=norm.eps,
        heads=(0, memory.num_heads),
        head_dim=memory.head_dim,
    )


def _fused_encoder(encoder: TargetEncoder, memory: FusedLayer | None) -> FusedEncoder | None:
    layer, projection = encoder.layer_self_attention, joint_matrix([encoder.projection])
    if not isinstance(layer, FastDecoderLayer) or encoder.last_layer_only:
        return None
    if memory is None or projection is None:
        return None
    angles, scale = angle_rows(encoder.layer_rope), layer.self_attn.head_dim**-0.5
    return FusedEncoder(layer.fused, projection, memory, angles, scale)


class FastExitAdapter(ExitAdapter):
    """An `ExitAdapter` by a CPU kernel."""

    def __init__(self, adapter: ExitAdapter, fused: FusedExit) -> None:
        _adopt(self, adapter)
        self.fused = fused

    @classmethod
    def of(cls, adapter: ExitAdapter) -> ExitAdapter:
        matrix, eps = joint_matrix([adapter.linear]), adapter.norm.eps
        if matrix is None or eps is None or matrix.outputs % LANES:
            return adapter
        norm = FusedNorm(adapter.norm.weight.detach(), eps)
        return cls(adapter, FusedExit(norm, matrix, adapter.scale.item()))

    def forward(self, states_BTE: Tensor) -> Tensor:
        return self.fused.run(states_BTE)


def _contiguous(cos_sin: CosSin) -> CosSin:
    cos_B1TD, sin_B1TD = cos_sin
    return cos_B1TD.contiguous(), sin_B1TD.contiguous()
