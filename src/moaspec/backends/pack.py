"""Linear layers in the form that this CPU multiplies fastest, see `forms`.

Projections of one input (query, key and value; gate and up) become one matrix. What only drafts may
be rounded to four bits, of which a draft step reads a quarter of the bytes. LM heads: see `heads`.
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeGuard, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moaspec.backends.cpu.fused_drafting import FusedEncoder, FusedExit
from moaspec.backends.cpu.fused_layers import FusedLayer, FusedNorm, FusedStack
from moaspec.backends.cpu.matrix import Matrix
from moaspec.backends.cpu.quantized_weight import LANES
from moaspec.backends.linear_backends import CpuKernelLinear, can_pack, fastest_form
from moaspec.model.layers import AttentionBlock
from moaspec.model.moa import ExitAdapter
from moaspec.model.rope import Rope
from moaspec.model.target_encoder import TargetEncoder

Drafter = TypeVar("Drafter", bound=nn.Module)

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of layers that read one and the same input, in the order in which they are called."""


class PackedLinear(nn.Module):
    """A frozen `nn.Linear` in the fastest form; see the module's docstring.

    Args:
        linear: what to pack, on the CPU. It is not changed.
        drafts: what it computes is only proposed, so it may be rounded.
        moment_II: how its inputs vary together, so that rounding does less harm.
    """

    def __init__(
        self, linear: nn.Linear, *, drafts: bool = False, moment_II: Tensor | None = None
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._dtype = linear.weight.dtype
        # Not a parameter: a packed tensor cannot be moved, cast or trained.
        bias = None if linear.bias is None else linear.bias.detach()
        weight = linear.weight.detach()
        self._form = fastest_form(weight, bias, drafts=drafts, moment_II=moment_II)

    @property
    def weight(self) -> Tensor:
        """The weight as the plain layer had it, or as it was rounded; unpacked on every access."""
        return self._form.weight().to(self._dtype)

    @property
    def bias(self) -> Tensor | None:
        """The bias as the plain layer had it."""
        return None if self._form.bias is None else self._form.bias.to(self._dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self._form.product(x)

    def single(self, x: Tensor) -> Tensor:
        """`forward` in float32, of sums that were not rounded where that can be had."""
        if isinstance(self._form, CpuKernelLinear) and not x.requires_grad:
            return self._form.matrix.product(x, single=True)
        return self.forward(x).float()

    def product(self) -> Callable[[Tensor], Tensor]:
        """`forward` itself, without what PyTorch does around it."""
        return self._form.product

    @property
    def matrix(self) -> Matrix | None:
        """The weight as `moaspec.backends.cpu` has it; None where another form is in use."""
        return self._form.matrix if isinstance(self._form, CpuKernelLinear) else None

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Appear in `state_dict` like the plain layer, so that a packed model can be saved."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        _save(self, destination, prefix)


class FusedPart(nn.Module):
    """One of several layers that read the same input and whose weights are packed as one matrix.

    The first of them to see an input computes the product for all; the others take their columns.

    Args:
        fused: the matrix, shared by all parts.
        columns: this part's outputs.
    """

    def __init__(self, fused: _FusedLinears, columns: slice) -> None:
        super().__init__()
        self._fused, self._columns = fused, columns
        self.in_features, self.out_features = fused.in_features, columns.stop - columns.start

    @property
    def weight(self) -> Tensor:
        """The weight as the plain layer had it, unpacked anew on every access."""
        return self._fused.linear.weight[self._columns]

    @property
    def bias(self) -> Tensor | None:
        """The bias as the plain layer had it."""
        bias = self._fused.linear.bias
        return None if bias is None else bias[self._columns]

    @property
    def joined(self) -> PackedLinear:
        """The matrix that this is a part of."""
        return self._fused.linear

    def beside(self, other: nn.Module) -> bool:
        """Whether the other is a part of the same matrix."""
        return isinstance(other, FusedPart) and other._fused is self._fused

    def forward(self, x: Tensor) -> Tensor:
        last = self._columns.stop == self._fused.out_features
        return self._fused.product(x, last=last)[..., self._columns]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        _save(self, destination, prefix)


class _FusedLinears:
    """The matrix behind several `FusedPart`s, and its product with the latest input."""

    def __init__(self, linears: Sequence[nn.Linear], *, drafts: bool) -> None:
        with torch.device("meta"):
            width = sum(linear.out_features for linear in linears)
            joined = nn.Linear(linears[0].in_features, width, bias=linears[0].bias is not None)
        joined.weight = nn.Parameter(torch.cat([one.weight.detach() for one in linears]))
        if linears[0].bias is not None:
            joined.bias = nn.Parameter(torch.cat([one.bias.detach() for one in linears]))
        self.linear = PackedLinear(joined, drafts=drafts)
        self.in_features, self.out_features = joined.in_features, width
        self._latest: tuple[Tensor, Tensor] | None = None

    def product(self, x: Tensor, *, last: bool) -> Tensor:
        """All columns for this input; the very same tensor is multiplied once.

        Args:
            x: the input.
            last: whether no other part will ask for this input, so that nothing need be kept.
        """
        # One assignment, one read: threads that share a target may compute twice, never mix.
        latest = self._latest
        if latest is None or latest[0] is not x:
            latest = (x, self.linear(x))
        self._latest = None if last else latest
        return latest[1]


def joint_product(parts: Sequence[nn.Module]) -> Callable[[Tensor], Tensor]:
    """One call that gives the outputs of layers which read the same input, side by side."""
    first = parts[0]
    if isinstance(first, FusedPart) and all(first.beside(part) for part in parts):
        return first.joined.product()
    if len(parts) == 1:
        return first.product() if isinstance(first, PackedLinear) else first
    return lambda x: torch.cat([part(x) for part in parts], dim=-1)


def joint_matrix(parts: Sequence[nn.Module]) -> Matrix | None:
    """The joint matrix of layers with one input as `backends.cpu` has it, or None."""
    first = parts[0]
    if isinstance(first, FusedPart) and all(first.beside(part) for part in parts):
        return first.joined.matrix
    return first.matrix if len(parts) == 1 and isinstance(first, PackedLinear) else None


def packed_copy(drafter: Drafter, *, exact: Collection[nn.Module] = ()) -> Drafter:
    """A drafter as this CPU runs it fastest; itself where there is nothing to gain.

    Args:
        drafter: stays as it is.
        exact: children of it whose results are more than drafts, so that nothing is rounded.
    """
    weight = next(drafter.parameters())
    if not can_pack(weight.dtype, weight.device):
        return drafter
    copied = copy.deepcopy(drafter)
    kept = {name for name, child in drafter.named_children() if child in exact}
    for name, child in copied.named_children():
        for layer in child.modules():
            if isinstance(layer, AttentionBlock):
                pack_layer(layer, drafts=name not in kept)
    pack_linears(copied)
    for module in copied.modules():
        if isinstance(module, Rope):
            module.tabulate()
        elif isinstance(module, TargetEncoder):
            module.fused = _fused_memory(module)
            module.in_one_call = _fused_encoder(module)
        elif isinstance(module, ExitAdapter):
            module.fused = _fused_exit(module)
    return_freed_memory()
    return copied


def _fused_memory(encoder: TargetEncoder) -> FusedLayer | None:
    """CA's norm, keys and values in one call, where kernels can compute them."""
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


def _fused_encoder(encoder: TargetEncoder) -> FusedEncoder | None:
    """All that becomes of keys and values, where kernels have each part of it."""
    layer, memory = encoder.layer_self_attention, encoder.fused
    projection = joint_matrix([encoder.projection])
    if layer.fused is None or memory is None or projection is None or encoder.last_layer_only:
        return None
    return FusedEncoder(layer.fused, projection, memory, layer.self_attn.head_dim**-0.5)


def _fused_exit(adapter: ExitAdapter) -> FusedExit | None:
    """An adapter in one call, where kernels have its linear layer."""
    matrix, eps = joint_matrix([adapter.linear]), adapter.norm.eps
    if matrix is None or eps is None or matrix.outputs % LANES:
        return None
    return FusedExit(FusedNorm(adapter.norm.weight.detach(), eps), matrix, adapter.scale.item())


def pack_layer(layer: AttentionBlock, *, drafts: bool) -> None:
    """Pack a layer of a drafter, in place; kernels compute it where they can.

    Its projections lie in two modules, and become one matrix all the same.

    Args:
        layer: that will only decode.
        drafts: see `PackedLinear`.
    """
    own, memory = layer.self_attn, getattr(layer, "key_value", None)
    homes = {"q_proj": own} | ({} if memory is None else {"k_proj": memory, "v_proj": memory})
    reads = [getattr(home, name) for name, home in homes.items()]
    if not all(type(one) is nn.Linear for one in reads):  # a device's, in eight bits
        pack_linears(layer, drafts=drafts)
        return
    if len({one.bias is None for one in reads}) == 1:
        for part, (name, home) in zip(_joined(reads, drafts=drafts), homes.items(), strict=True):
            setattr(home, name, part)
    pack_linears(layer, drafts=drafts)
    norms = (layer.input_layernorm, layer.post_attention_layernorm)
    if norms[0].eps is None or not is_silu(layer.mlp.act):
        return
    matrices = (
        joint_matrix([getattr(home, name) for name, home in homes.items()]),
        joint_matrix([own.o_proj]),
        joint_matrix([layer.mlp.gate_proj, layer.mlp.up_proj]),
        joint_matrix([layer.mlp.down_proj]),
    )
    num_heads = reads[0].out_features // own.head_dim
    layer.fused = FusedLayer.of(
        matrices,
        norms=[norm.weight for norm in norms],
        head_norms=None,
        eps=norms[0].eps,
        heads=(num_heads, 0 if memory is None else memory.num_heads),
        head_dim=own.head_dim,
    )
    if layer.fused is not None:
        layer.stack = FusedStack([layer.fused], own.head_dim**-0.5)


def is_silu(act: Callable[[Tensor], Tensor]) -> bool:
    """Whether an activation is the one that kernels compute."""
    probe = torch.linspace(-4, 4, 9)
    return torch.equal(act(probe), F.silu(probe))


def _save(layer: PackedLinear | FusedPart, destination: Any, prefix: str) -> None:
    destination[f"{prefix}weight"] = layer.weight
    if layer.bias is not None:
        destination[f"{prefix}bias"] = layer.bias


def pack_linears(
    module: nn.Module, *, keep: tuple[nn.Module, ...] = (), drafts: bool = False
) -> None:
    """Replace every `nn.Linear` inside a module, one after another, freeing the weight it had.

    Projections of one input (query, key and value; gate and up) become one matrix.

    Args:
        module: changed in place.
        keep: modules to leave as they are.
        drafts: see `PackedLinear`.
    """
    _fuse(module, keep, drafts=drafts)
    for name, child in list(module.named_children()):
        if child in keep:
            continue
        if _is_plain(child):
            setattr(module, name, PackedLinear(child, drafts=drafts))
        else:
            pack_linears(child, keep=keep, drafts=drafts)


def _is_plain(module: object) -> TypeGuard[nn.Linear]:
    """Whether it is a linear layer of numbers; torchao's tensors multiply by themselves."""
    return type(module) is nn.Linear and type(module.weight) is nn.Parameter


def return_freed_memory() -> None:
    """Give what was freed back to the system: glibc keeps it, after packing most of a model."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):  # another C library has no such call
        return


def _fuse(module: nn.Module, keep: tuple[nn.Module, ...], *, drafts: bool) -> None:
    """Replace this module's own groups of projections, where all of a group are there."""
    for names in SIBLINGS:
        linears = [getattr(module, name, None) for name in names]
        found = [one for one in linears if _is_plain(one) and one not in keep]
        biased = {one.bias is None for one in found}
        if len(found) < len(names) or len({one.in_features for one in found}) * len(biased) > 1:
            continue
        for name, part in zip(names, _joined(found, drafts=drafts), strict=True):
            setattr(module, name, part)


def _joined(linears: Sequence[nn.Linear], *, drafts: bool) -> list[FusedPart]:
    """Layers that read one input, as parts of one matrix."""
    fused, start = _FusedLinears(linears, drafts=drafts), 0
    parts: list[FusedPart] = []
    for linear in linears:
        parts.append(FusedPart(fused, slice(start, start + linear.out_features)))
        start += linear.out_features
    return parts
