"""Products of a GGUF file's weights with inputs in 8 bits, as llama.cpp multiplies them.

Each 32 inputs of a linear layer become multiples of the 127th part of the largest. Kernels then
multiply integers (`gguf_integers.h`), whose sums are exact, so that a token's results have the same
bits in passes of any width and on every instruction set. Weights stay as the file has them. The
target is another one, with texts of its own, as `weight_only` makes it.

Rounded are all layers that kernels read in the file's bits, the LM head among them.
"""

import logging
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moaspec.backends.cpu.build import must_compile, why_not
from moaspec.backends.pack import GATED, JOINED, in_one_format
from moaspec.target.weights.stored import StoredLinear
from moaspec_core.errors import InputError

log = logging.getLogger(__name__)

INPUTS = "inputs"
"""The value of `quantize`."""
GROUP = 32  # inputs that share a scale
LEVELS = 127  # of a number's magnitude
SMALLEST = 1e-30  # groups whose largest magnitude is not above it become 0


def require_inputs(*, dtype: str, device: str, packed: bool) -> None:
    """Refuse what cannot be done, before anything is loaded.

    Raises:
        InputError: not on a CPU; or kernels shall multiply and cannot, or in another dtype.
    """
    if torch.device(device).type != "cpu":
        raise InputError(f"quantize={INPUTS!r} is for the CPU, not for device {device!r}.")
    if not packed:
        return
    if dtype != "bfloat16":
        raise InputError(f"quantize={INPUTS!r} goes with dtype bfloat16, got {dtype}.")
    if not must_compile():
        _require_kernels()


def _require_kernels() -> None:
    if (reason := why_not()) is not None:
        raise InputError(f"quantize={INPUTS!r} takes moaspec's kernels: {reason}.")


def round_inputs(model: Any, *, name: str, packed: bool) -> None:
    """Let layers with weights in a file's bits round their inputs, in place.

    Args:
        model: has weights in the file's bits, see `fill_from_file`.
        packed: kernels will round; else PyTorch does, with weights widened, for comparisons.

    Raises:
        InputError: no weights are in a file's bits; or kernels could not be compiled.
    """
    if packed:
        _require_kernels()
    for module in list(model.modules()):
        for names in (GATED, (JOINED,)):
            parts = [getattr(module, one, None) for one in names]
            found = [part for part in parts if isinstance(part, StoredLinear)]
            if len(found) == len(names):
                for one, part in zip(names, in_one_format(found), strict=True):
                    setattr(module, one, part)
    stored = {path: one for path, one in model.named_modules() if isinstance(one, StoredLinear)}
    if not stored:
        raise InputError(
            f"quantize={INPUTS!r} is for GGUF files of quantised weights, without an adapter; "
            f"{name} is none. Load it without, or with quantize='int8'."
        )
    for path, layer in stored.items():
        layer.rounds_inputs = True
        if not packed:
            model.set_submodule(path, RoundingLinear(layer))
    log.warning(
        "%s multiplies inputs of 8 bits: its text is the rounded target's, not the original's.",
        name,
    )


class RoundingLinear(nn.Linear):
    """A frozen layer that rounds its inputs, by PyTorch, with its weight widened."""

    def __init__(self, layer: StoredLinear) -> None:
        has_bias = layer.bias is not None
        super().__init__(layer.in_features, layer.out_features, bias=has_bias, device="meta")
        self.weight = nn.Parameter(layer.weight, requires_grad=False)
        if layer.bias is not None:
            self.bias = nn.Parameter(layer.bias, requires_grad=False)

    def forward(self, input: Tensor) -> Tensor:
        """The product of rounded inputs, (..., I), in their dtype."""
        return F.linear(in_8_bits(input).to(input.dtype), self.weight, self.bias)


def in_8_bits(x: Tensor) -> Tensor:
    """Each 32 numbers of the last dimension as kernels round them, float32."""
    groups = x.float().unflatten(-1, (-1, GROUP))
    most = groups.abs().amax(-1, keepdim=True)
    steps = torch.where(most > SMALLEST, torch.full_like(most, LEVELS) / most, 0.0)
    return ((groups * steps).round() * (most / LEVELS)).flatten(-2)
