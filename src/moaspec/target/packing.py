"""Linear layers whose weights are laid out once for this CPU.

A plain `nn.Linear` hands its weight to the matrix kernel as it lies in memory. From four rows on
the kernel then copies it into its own layout, on every call: a pass over four tokens costs half as
much again as one over three. Laid out in advance, passes over 1 to 8 tokens cost nearly the same,
which is what speculation lives on.

A CPU without bf16 instructions emulates bf16 products one row at a time. There the weights are kept
as float32, which holds every bf16 number exactly; sums run in float32, as the emulation's do, and
results are rounded to bf16. The numbers are the same, only sooner, for twice the memory.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

EXPECTED_ROWS = 8
"""Rows that the layout is chosen for; other numbers of rows work and are nearly as fast."""


class PackedLinear(nn.Module):
    """A frozen `nn.Linear` in the layout of the CPU's matrix kernels.

    Args:
        linear: what to pack, float32 or bfloat16, on the CPU. It is not changed.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        dtype = compute_dtype(linear.weight.dtype)
        weight = linear.weight.detach().to(dtype)
        # Not a parameter: a packed tensor cannot be moved, cast or trained.
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, EXPECTED_ROWS)
        self._bias = None if linear.bias is None else linear.bias.detach().to(dtype)
        self._compute, self._dtype = dtype, linear.weight.dtype

    @property
    def weight(self) -> Tensor:
        """The weight as the plain layer had it, unpacked anew on every access."""
        return cast(Tensor, self._packed.to_dense()).to(self._dtype)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(
            x.to(self._compute), self._packed, self._bias, "none", [], ""
        )
        return result.to(x.dtype)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Appear in `state_dict` like the plain layer, so that a packed model can be saved."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.weight
        if self._bias is not None:
            destination[f"{prefix}bias"] = self._bias.to(self._dtype)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that products of this dtype are computed in on this CPU."""
    if dtype == torch.bfloat16 and not _bf16_instructions():
        return torch.float32
    return dtype


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether linear layers can be packed here: float32 or bf16 on a CPU that oneDNN knows."""
    return (
        device.type == "cpu"
        and dtype in {torch.float32, torch.bfloat16}
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and torch.cpu._is_avx2_supported()
    )


def pack_linears(module: nn.Module, *, keep: tuple[nn.Module, ...] = ()) -> None:
    """Replace every `nn.Linear` inside a module, one after another, freeing the weight it had.

    Args:
        module: changed in place.
        keep: modules to leave as they are.
    """
    for name, child in list(module.named_children()):
        if child in keep:
            continue
        if type(child) is nn.Linear:
            setattr(module, name, PackedLinear(child))
        else:
            pack_linears(child, keep=keep)


def pack_like(linear: nn.Linear) -> nn.Module:
    """A faster stand-in for a layer whose own weight stays in use elsewhere (a tied LM head).

    The copy is made only where the plain layer would have to emulate its dtype.
    """
    if can_pack(linear.weight.dtype, linear.weight.device) and (
        compute_dtype(linear.weight.dtype) != linear.weight.dtype
    ):
        return PackedLinear(linear)
    return linear


def _bf16_instructions() -> bool:
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
