"""Linear layers in the form that this CPU multiplies fastest.

What a pass over a few tokens costs is what speculation lives on, and the kernels behind `nn.Linear`
are poor at it, in ways that depend on dtype and CPU:

- bf16, with bf16 instructions: the weight is copied into the kernel's own layout on every call. It
  is laid out in advance instead (oneDNN).
- bf16 without them: products are emulated, row by row; a second token adds half a pass. They are
  computed in float32 instead, from weights kept in 16 bits (FBGEMM): float16 holds a bf16 weight
  exactly, once the matrix is scaled by a power of two. Where an entry would still be lost, or
  FBGEMM is missing, the weight is kept as float32. Sums run in float32, as the emulation's do, and
  results are rounded to bf16.
- float32: MKL streams the weight once for up to three rows on Intel's CPUs, faster than a packed
  one, so it is left alone there. On other makers' it copies the weight for two rows and more, which
  then cost twice as much as one: there it is laid out in advance too.

Projections of one input (query, key and value; gate and up) become one matrix. What only drafts may
be rounded to four bits, of which a draft step reads a quarter of the bytes. An LM head in bf16
becomes a packed copy; the embedding that shares its weight, of which a token reads one row, is left
to a file then.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of layers that read one and the same input, in the order in which they are called."""

EXPECTED_ROWS = 8
"""Rows that oneDNN's layout is chosen for; other numbers work and are nearly as fast."""


class PackedLinear(nn.Module):
    """A frozen `nn.Linear` in the fastest form; see the module's docstring.

    Args:
        linear: what to pack, on the CPU. It is not changed.
        drafts: what it computes is only proposed, so it may be rounded.
    """

    def __init__(self, linear: nn.Linear, *, drafts: bool = False) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._dtype = linear.weight.dtype
        # Not a parameter: a packed tensor cannot be moved, cast or trained.
        bias = None if linear.bias is None else linear.bias.detach()
        weight = linear.weight.detach()
        few_bits = drafts and _FourBits.can_hold(weight)
        self._form = _FourBits(weight, bias) if few_bits else _fastest_form(weight, bias)

    @property
    def weight(self) -> Tensor:
        """The weight as the plain layer had it, unpacked anew on every access."""
        return self._form.weight().to(self._dtype)

    @property
    def bias(self) -> Tensor | None:
        """The bias as the plain layer had it."""
        return None if self._form.bias is None else self._form.bias.to(self._dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self._form.product(x)

    def product(self) -> Callable[[Tensor], Tensor]:
        """`forward` itself, without what PyTorch does around it."""
        return self._form.product

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Appear in `state_dict` like the plain layer, so that a packed model can be saved."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        _save(self, destination, prefix)


class _Form(Protocol):
    """A weight (and bias) laid out for one kernel."""

    bias: Tensor | None

    def weight(self) -> Tensor: ...

    def product(self, x: Tensor) -> Tensor:
        """The product of x and the transposed weight, plus the bias, in the dtype of x."""
        ...


class _OneDNN:
    """bf16 or float32, in oneDNN's own layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.bias = bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, EXPECTED_ROWS)
        self._kernel = torch.ops.mkldnn._linear_pointwise.default

    def weight(self) -> Tensor:
        return self._packed.to_dense()

    def product(self, x: Tensor) -> Tensor:
        if x.requires_grad:  # the kernel has no derivative
            return F.linear(x, self.weight(), self.bias)
        return cast(Tensor, self._kernel(x, self._packed, self.bias, "none", [], ""))


class _Half:
    """float16, times a power of two where that is needed, for products in float32."""

    def __init__(self, scaled: Tensor, scale: float, bias: Tensor | None) -> None:
        self.bias, self._scale = bias, scale
        # A tensor: a Python number would be converted on every call.
        self._back = None if scale == 1.0 else torch.tensor(1.0 / scale)
        added = None if bias is None else bias.float() * scale
        self._packed = torch.ops.quantized.linear_prepack_fp16(scaled, added)
        # The overload itself: choosing it on every call takes longer than rounding the result.
        self._kernel = torch.ops.quantized.linear_dynamic_fp16.default

    @classmethod
    def exactly(cls, weight: Tensor, bias: Tensor | None) -> _Half | None:
        """Of a float32 weight; None where float16 cannot hold each of its entries."""
        for scale in (1.0, _into_highest_range(weight)):
            scaled = weight * scale
            if torch.equal(scaled.half().float(), scaled):
                return cls(scaled, scale, bias)
        return None

    def weight(self) -> Tensor:
        scaled, _ = torch.ops.quantized.linear_unpack_fp16(self._packed)
        return scaled / self._scale

    def product(self, x: Tensor) -> Tensor:
        if x.requires_grad:  # the kernel has no derivative
            added = None if self.bias is None else self.bias.float()
            return F.linear(x.float(), self.weight(), added).to(x.dtype)
        scaled = self._kernel(x.float(), self._packed)
        return (scaled if self._back is None else scaled.mul_(self._back)).to(x.dtype)


def _into_highest_range(weight: Tensor) -> float:
    """The power of two that takes a weight's largest entry into float16's highest range."""
    largest = float(weight.abs().max())
    return 1.0 if largest == 0.0 else 2.0 ** (15 - math.frexp(largest)[1])


class _Single:
    """float32."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self.bias = weight, bias
        self._added = None if bias is None else bias.float()

    def weight(self) -> Tensor:
        return self._weight

    def product(self, x: Tensor) -> Tensor:
        return F.linear(x.float(), self._weight, self._added).to(x.dtype)


class _FourBits:
    """Four bits for a few rows, which read a quarter of the bytes; the weight itself for more.

    Groups of 32 inputs share a scale and a zero. What comes out is rounded, so it is for drafts.
    """

    GROUP, MOST_ROWS, BLOCK = 32, 8, 64
    """More rows are multiplied faster by the weight itself. The kernel takes outputs in blocks."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.bias, self._whole = bias, _OneDNN(weight, bias)
        codes_RI, self._scales = self._rounded(weight)
        self._codes = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes_RI, 1)
        self._kernel = torch.ops.aten._weight_int4pack_mm_for_cpu.default

    @classmethod
    def can_hold(cls, weight: Tensor) -> bool:
        """Whether there is a kernel for this weight, and gain in it."""
        return (
            weight.dtype == torch.bfloat16
            and _bf16_instructions()
            and hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu")
            and weight.shape[0] % cls.BLOCK == 0
            and weight.shape[1] % cls.GROUP == 0
        )

    @classmethod
    def _rounded(cls, weight_RI: Tensor) -> tuple[Tensor, Tensor]:
        """Numbers 0 to 15, (R, I), of scale * (number - 8) + zero, (I / GROUP, R, 2) of both."""
        groups_RGI = weight_RI.float().unflatten(1, (-1, cls.GROUP))
        low_RG1, high_RG1 = groups_RGI.amin(-1, keepdim=True), groups_RGI.amax(-1, keepdim=True)
        scale_RG1 = ((high_RG1 - low_RG1) / 15).clamp(min=1e-9).bfloat16()
        zero_RG1 = (low_RG1 + 8 * scale_RG1.float()).bfloat16()
        numbers_RGI = (groups_RGI - zero_RG1.float()) / scale_RG1.float() + 8
        codes_RI = numbers_RGI.round().clamp(0, 15).to(torch.int32).flatten(1)
        return codes_RI, torch.cat((scale_RG1, zero_RG1), dim=-1).transpose(0, 1).contiguous()

    def weight(self) -> Tensor:
        return self._whole.weight()

    def product(self, x: Tensor) -> Tensor:
        rows_NI = x.reshape(-1, x.shape[-1])
        if x.requires_grad or len(rows_NI) > self.MOST_ROWS:
            return self._whole.product(x)
        out_NR = self._kernel(rows_NI, self._codes, self.GROUP, self._scales)
        out_NR = out_NR if self.bias is None else out_NR + self.bias
        return cast(Tensor, out_NR.view(*x.shape[:-1], out_NR.shape[-1]))


def _fastest_form(weight: Tensor, bias: Tensor | None) -> _Form:
    if compute_dtype(weight.dtype) == weight.dtype:
        return _OneDNN(weight, bias)
    single = weight.float()
    if "fbgemm" in torch.backends.quantized.supported_engines:
        half = _Half.exactly(single, bias)
        if half is not None:
            return half
    return _Single(single, bias)


class FusedPart(nn.Module):
    """One of several layers that read the same input and whose weights are packed as one matrix.

    The first of them to see an input computes the product for all; the others take their columns.

    Args:
        fused: the matrix, shared by all parts.
        columns: this part's outputs.
    """

    def __init__(self, fused: _Fused, columns: slice) -> None:
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


class _Fused:
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


def _save(layer: PackedLinear | FusedPart, destination: Any, prefix: str) -> None:
    destination[f"{prefix}weight"] = layer.weight
    if layer.bias is not None:
        destination[f"{prefix}bias"] = layer.bias


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that products of this dtype are computed in on this CPU."""
    if dtype == torch.bfloat16 and not _bf16_instructions():
        return torch.float32
    return dtype


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether linear layers can be packed here, on a CPU that oneDNN knows, and gain by it."""
    return (
        device.type == "cpu"
        and (dtype == torch.bfloat16 or (dtype == torch.float32 and _mkl_copies_weights()))
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and torch.cpu._is_avx2_supported()
    )


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
        if type(child) is nn.Linear:
            setattr(module, name, PackedLinear(child, drafts=drafts))
        else:
            pack_linears(child, keep=keep, drafts=drafts)


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
        found = [one for one in linears if type(one) is nn.Linear and one not in keep]
        biased = {one.bias is None for one in found}
        if len(found) < len(names) or len({one.in_features for one in found}) * len(biased) > 1:
            continue
        fused, start = _Fused(found, drafts=drafts), 0
        for name, linear in zip(names, found, strict=True):
            columns = slice(start, start + linear.out_features)
            setattr(module, name, FusedPart(fused, columns))
            start = columns.stop


class StreamedLinear(nn.Module):
    """A float32 layer whose own weight stays in use elsewhere, streamed once for a few rows.

    MKL copies the right-hand matrix of a product, so here the weight is the left-hand one.

    Args:
        linear: on the CPU; its weight is shared, not copied.
    """

    MOST_ROWS = 16
    """Up to which that is faster."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        rows_NE = x.reshape(-1, x.shape[-1])
        num = len(rows_NE)
        if not 1 <= num <= self.MOST_ROWS:
            return self.linear(x)
        # A single row would be multiplied by another kernel, which takes three times as long.
        wide_NE = rows_NE.repeat(2, 1) if num == 1 else rows_NE
        out_NX = torch.mm(self.linear.weight, wide_NE.t())[:, :num].t()
        if self.linear.bias is not None:
            out_NX = out_NX + self.linear.bias
        return out_NX.contiguous().reshape(*x.shape[:-1], -1)


def pack_like(linear: nn.Linear, *, directory: Path) -> tuple[nn.Module, Callable[[], None]]:
    """A faster stand-in for a layer whose own weight stays in use elsewhere (a tied LM head).

    The bf16 one is a packed copy. Of the weight itself only single rows are read from then on (by
    an embedding that shares it, or for a draft head), so it is left to a file, see
    `map_into_memory`.

    Args:
        linear: is kept, and so is the value of its weight.
        directory: for that file.

    Returns:
        The stand-in, and a call that gives back the memory of the weight's rows that were read.
    """
    if not can_pack(linear.weight.dtype, linear.weight.device):
        return linear, lambda: None
    if linear.weight.dtype == torch.float32:
        return StreamedLinear(linear), lambda: None
    return PackedLinear(linear), map_into_memory(linear.weight, directory)


def map_into_memory(table: Tensor, directory: Path) -> Callable[[], None]:
    """Let a tensor's numbers live in a file, of which only what is read takes memory.

    The file has no name, and is gone with the tensor. Without room for it all stays as it is.

    Args:
        table: contiguous, on the CPU; changed in place.
        directory: on a disk, made where it is missing.

    Returns:
        A call that gives back the memory of what was read so far; nothing may have been written.
    """
    numbers = table.detach().view(torch.uint8).numpy()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=directory) as file:
            numbers.tofile(file)
            file.flush()
            pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError):
        return lambda: None
    table.data = torch.frombuffer(pages, dtype=table.dtype).view(table.shape)
    if not hasattr(mmap, "MADV_DONTNEED"):
        return lambda: None
    return lambda: pages.madvise(mmap.MADV_DONTNEED)


def _bf16_instructions() -> bool:
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def _mkl_copies_weights() -> bool:
    """Whether float32 products are MKL's, on a CPU that it was not written for."""
    return torch.backends.mkl.is_available() and "Intel" not in _cpu_name()


@cache
def _cpu_name() -> str:
    return str(torch.cpu.get_capabilities().get("cpu_name", ""))
