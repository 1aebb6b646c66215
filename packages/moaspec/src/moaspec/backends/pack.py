"""Linear layers packed for this CPU, see `linear_backends`. LM heads: see `fast_heads`.

Projections of one input (query, key and value; gate and up) become one matrix. Layers that only
draft may be rounded to four bits, a quarter of the bytes to read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moaspec.backends.cpu.matrix import Matrix
from moaspec.backends.linear_backends import CpuKernelLinear, LinearBackend, fastest_backend
from moaspec.target.decoder_layers import frozen_linear
from moaspec.target.weights.stored import StoredLinear, StoredWeight

Linear = nn.Linear | StoredLinear
GATED, JOINED = ("gate_proj", "up_proj"), "gate_up_proj"
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("k_proj", "v_proj"), GATED)
"""Names of layers that read one and the same input, in the order in which they are called."""


class PackedLinear(nn.Module):
    """A frozen `nn.Linear` in the fastest form; see the module's docstring.

    Args:
        linear: the layer to pack, on the CPU. It is not changed.
        drafts: whether its outputs are only drafts, so that it may be rounded to four bits.
        moment_II: mean outer product of its inputs, which reduces the error of rounding.
    """

    is_head = False

    _backend: LinearBackend

    def __init__(
        self, linear: Linear, *, drafts: bool = False, moment_II: Tensor | None = None
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._dtype = linear.dtype if isinstance(linear, StoredLinear) else linear.weight.dtype
        # Not a parameter: a packed tensor cannot be moved, cast or trained.
        bias = None if linear.bias is None else linear.bias.detach()
        if isinstance(linear, StoredLinear) and Matrix.can_hold_stored(linear.stored):
            matrix = Matrix.of_stored(linear.stored, bias, rounds_inputs=linear.rounds_inputs)
            self._backend = CpuKernelLinear(matrix, bias)
            return
        weight = linear.weight.detach()
        self._backend = fastest_backend(
            weight, bias, drafts=drafts, moment_II=moment_II, head=self.is_head
        )

    @property
    def weight(self) -> Tensor:
        """The weight as the plain layer had it, or as it was rounded; unpacked on every access."""
        return self._backend.weight().to(self._dtype)

    @property
    def bias(self) -> Tensor | None:
        """The bias as the plain layer had it."""
        return None if self._backend.bias is None else self._backend.bias.to(self._dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self._backend.product(x)

    def single(self, x: Tensor) -> Tensor:
        """`forward` in float32, from unrounded sums if the backend has them."""
        if isinstance(self._backend, CpuKernelLinear) and not x.requires_grad:
            return self._backend.matrix.product(x, single=True)
        return self._backend.product(x).float()

    def product(self) -> Callable[[Tensor], Tensor]:
        """The product alone, without the overhead of a PyTorch module."""
        return self._backend.product

    @property
    def matrix(self) -> Matrix | None:
        """The weight as `moaspec.backends.cpu` has it; None where another form is in use."""
        return self._backend.matrix if isinstance(self._backend, CpuKernelLinear) else None

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Appear in `state_dict` like the plain layer, so that a packed model can be saved."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        _save(self, destination, prefix)


class FusedPart(nn.Module):
    """One of several layers that read the same input and whose weights are packed as one matrix.

    The first of them to see an input computes the product for all; the others take their columns.
    """

    def __init__(self, fused: _FusedLinears, columns: slice) -> None:
        super().__init__()
        self._fused, self._columns = fused, columns
        self.in_features, self.out_features = fused.in_features, columns.stop - columns.start

    @property
    def joined(self) -> PackedLinear:
        """The matrix that this is a part of."""
        return self._fused.linear

    @property
    def weight(self) -> Tensor:
        """The weight as the plain layer had it, unpacked anew on every access."""
        return self.joined.weight[self._columns]

    @property
    def bias(self) -> Tensor | None:
        """The bias as the plain layer had it."""
        bias = self.joined.bias
        return None if bias is None else bias[self._columns]

    def forward(self, x: Tensor) -> Tensor:
        last = self._columns.stop == self._fused.out_features
        return self._fused.product(x, last=last)[..., self._columns]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        _save(self, destination, prefix)


class _FusedLinears:
    """The matrix behind several `FusedPart`s, and its product with the latest input."""

    def __init__(self, linears: Sequence[Linear], *, drafts: bool) -> None:
        joined = _side_by_side(linears)
        self.linear = PackedLinear(joined, drafts=drafts)
        self.in_features, self.out_features = joined.in_features, joined.out_features
        self._latest: tuple[Tensor, Tensor] | None = None

    def product(self, x: Tensor, *, last: bool) -> Tensor:
        """All columns for this input, multiplied once: it is kept until its `last` part."""
        # One assignment, one read: threads that share a target may compute twice, never mix.
        latest = self._latest
        if latest is None or latest[0] is not x:
            latest = (x, self.linear(x))
        self._latest = None if last else latest
        return latest[1]


def _side_by_side(linears: Sequence[Linear]) -> Linear:
    """One layer with the outputs of all."""
    has_bias = linears[0].bias is not None
    bias = torch.cat([one.bias for one in linears if one.bias is not None]) if has_bias else None
    stored = [one for one in linears if isinstance(one, StoredLinear)]
    if len(stored) == len(linears):
        weight = StoredWeight.joined([one.stored for one in stored])
        joined = StoredLinear(weight, bias, stored[0].dtype)
        joined.rounds_inputs = stored[0].rounds_inputs
        return joined
    return frozen_linear(torch.cat([one.weight for one in linears]), bias)


def in_one_format(linears: Sequence[Linear]) -> list[Linear]:
    """Dequantise layers whose GGUF types differ, as kernels read gate and up from one matrix.

    Others stay as they are.
    """
    kinds = {
        part.kind for one in linears if isinstance(one, StoredLinear) for part in one.stored.parts
    }
    if len(kinds) < 2:
        return list(linears)
    return [frozen_linear(one.weight, one.bias) for one in linears]


def _joint(parts: Sequence[nn.Module]) -> PackedLinear | None:
    """The packed layer with the outputs of all these layers side by side, or None."""
    first = parts[0]
    if isinstance(first, FusedPart):
        same = all(isinstance(part, FusedPart) and part.joined is first.joined for part in parts)
        return first.joined if same else None
    return first if len(parts) == 1 and isinstance(first, PackedLinear) else None


def joint_product(parts: Sequence[nn.Module]) -> Callable[[Tensor], Tensor]:
    """One call that gives the outputs of layers which read the same input, side by side."""
    joint = _joint(parts)
    if joint is not None:
        return joint.product()
    return parts[0] if len(parts) == 1 else lambda x: torch.cat([part(x) for part in parts], dim=-1)


def joint_matrix(parts: Sequence[nn.Module]) -> Matrix | None:
    """The joint matrix of layers with one input as `backends.cpu` has it, or None."""
    joint = _joint(parts)
    return None if joint is None else joint.matrix


def is_silu(act: Callable[[Tensor], Tensor]) -> bool:
    """Whether an activation is SiLU; kernels compute no other."""
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
        keep: modules to leave as they are.
    """
    _fuse(module, keep, drafts=drafts)
    for name, child in list(module.named_children()):
        if child in keep:
            continue
        if _is_plain(child):
            (one,) = in_one_format([child]) if name == JOINED else (child,)
            setattr(module, name, PackedLinear(one, drafts=drafts))
        else:
            pack_linears(child, keep=keep, drafts=drafts)


def _is_plain(module: object) -> TypeGuard[Linear]:
    """Whether it is a linear layer of numbers; torchao's tensors multiply by themselves."""
    if type(module) is nn.Linear:
        return type(module.weight) is nn.Parameter
    return isinstance(module, StoredLinear)


def _fuse(module: nn.Module, keep: tuple[nn.Module, ...], *, drafts: bool) -> None:
    """Replace this module's own groups of projections, where all of a group are there."""
    for names in SIBLINGS:
        linears = [getattr(module, name, None) for name in names]
        found = [one for one in linears if _is_plain(one) and one not in keep]
        biased = {one.bias is None for one in found}
        if len(found) < len(names) or len({one.in_features for one in found}) * len(biased) > 1:
            continue
        if names == GATED:
            found = in_one_format(found)
        for name, part in zip(names, join_linears(found, drafts=drafts), strict=True):
            setattr(module, name, part)


def join_linears(linears: Sequence[Linear], *, drafts: bool) -> list[FusedPart]:
    """Layers that read one input, as parts of one matrix."""
    fused, start = _FusedLinears(linears, drafts=drafts), 0
    parts: list[FusedPart] = []
    for linear in linears:
        parts.append(FusedPart(fused, slice(start, start + linear.out_features)))
        start += linear.out_features
    return parts
