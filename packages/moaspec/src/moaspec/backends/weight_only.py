"""Weights in eight or four bits: a target in fewer bits is another target, with texts of its own.

torchao chooses the numbers of all linear layers inside the decoder layers. Embedding, norms and LM
head stay as they are. What becomes of the weights depends on who multiplies them:

- On a CPU each group of 32 inputs becomes scale * code + zero, and the result an ordinary weight.
  `backends/cpu/quantized_weight.py` finds the codes: with AMX or AVX512-BF16 it keeps and reads
  only these. torchao's own tensors would be widened, a whole matrix in every call. Elsewhere on
  CPUs the same numbers take as many bytes as before.
- On a CUDA device torchao's tensors take the weights' place, and its kernels multiply them.

Legend: I inputs and O outputs of a matrix, N = I / 32 groups, X groups of some rows.
"""

import importlib
import logging
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moaspec.backends.cpu.quantized_weight import BLOCK, QuantizedWeight
from moaspec.backends.rounded_inputs import INPUTS
from moaspec_core.errors import InputError
from moaspec_core.support.extras import require

log = logging.getLogger(__name__)

BITS = {"int8": 8, "int4": 4}  # values of `quantize`
DTYPES = {"cpu": ("float32", "bfloat16"), "cuda": ("bfloat16",)}
"""Of a quantised target's other numbers, by kind of device."""
ROWS = 2048  # outputs that are rounded at a time, to bound the memory that takes


def require_quantize(quantize: str, *, dtype: str, device: str) -> None:
    """Refuse what cannot be done, before anything is loaded.

    Raises:
        InputError: an unknown kind, a device or dtype for which there is none, or no torchao.
    """
    if quantize not in BITS:
        choices = ", ".join((*BITS, INPUTS))
        raise InputError(f"Unknown quantize={quantize!r}; choose one of {choices}.")
    dtypes = DTYPES.get(torch.device(device).type)
    if dtypes is None:
        raise InputError(
            f"quantize={quantize!r} is for {' and '.join(DTYPES)}, not for device {device!r}."
        )
    if dtype not in dtypes:
        raise InputError(
            f"quantize={quantize!r} on {device} goes with dtype {' or '.join(dtypes)}, got {dtype}."
        )
    _torchao()


def quantise(model: Any, quantize: str, *, name: str, packed: bool) -> None:
    """Round the linear layers inside a model's decoder layers, in place.

    Args:
        quantize: "int8" or "int4".
        packed: False leaves ordinary weights of the same numbers on every device, which comparisons
            want.

    Raises:
        InputError: the model is quantised already, its sizes are no multiples of 32, or this device
            has no kernels for it.
    """
    if getattr(model.config, "quantization_config", None) is not None:
        raise InputError(f"{name} is quantised already: load it without quantize={quantize!r}.")
    layers = model.base_model.layers
    linears = {name: one for name, one in layers.named_modules() if isinstance(one, nn.Linear)}
    for part, linear in linears.items():
        if linear.in_features % BLOCK:
            raise InputError(
                f"quantize={quantize!r} takes inputs in groups of {BLOCK}, and layers.{part} of "
                f"{name} has {linear.in_features}."
            )
    if model.device.type == "cpu":
        for linear in linears.values():
            parts = linear.weight.detach().split(ROWS)
            _replace(linear, torch.cat([in_groups(part, BITS[quantize]) for part in parts]))
    else:
        by_torchao(layers, quantize)
        for linear in () if packed else linears.values():
            _replace(linear, _widened(linear))
    said = "%s is rounded to %s: its text is the rounded target's, not the original's."
    log.warning(said, name, quantize)


def in_groups(weight_OI: Tensor, bits: int) -> Tensor:
    """The nearest weight that is scale * code + zero in each group of 32 inputs, in its dtype.

    Scales and zeros are float16, and results are bf16 numbers in the weight's dtype.
    """
    ao = _torchao()
    groups_XI = weight_OI.float().reshape(-1, BLOCK)
    zero_X1 = groups_XI.amin(1, keepdim=True) if bits == 4 else torch.zeros(len(groups_XI), 1)
    kind, low, high = ("ASYMMETRIC", 0, 15) if bits == 4 else ("SYMMETRIC", -127, 127)
    sizes, how = (1, BLOCK), (torch.int8, low, high)
    # Above its zero a group starts at 0, so that torchao's own zeros, which are codes, are 0 too.
    above_XI = groups_XI - zero_X1
    scale_X, none_X = ao.choose_qparams_affine(above_XI, ao.MappingType[kind], sizes, *how)
    # With scales before rounding to float16: then a group's ends have the outermost codes, from
    # which kernels recover the codes.
    codes_XI = ao.quantize_affine(above_XI, sizes, scale_X, none_X, *how)
    outputs = len(weight_OI)
    coded = QuantizedWeight(
        scale_X.half().view(outputs, -1),
        zero_X1.half().view(outputs, -1),
        codes_XI.view(outputs, -1, BLOCK),
        bits,
    )
    return coded.weight().to(weight_OI.dtype)


def by_torchao(layers: nn.Module, quantize: str) -> None:
    """Replace all linear weights by torchao's tensors. InputError: no kernels for this device."""
    ao = _torchao()
    # Settings of inductor, which it would change, are the whole process's.
    if quantize == "int8":
        config = ao.Int8WeightOnlyConfig(set_inductor_config=False)
    else:
        config = ao.Int4WeightOnlyConfig(
            group_size=BLOCK, int4_packing_format="tile_packed_to_4d", set_inductor_config=False
        )
    try:
        ao.quantize_(layers, config)
    except (ValueError, RuntimeError, AssertionError) as error:  # it refuses by all of these
        raise InputError(f"torchao cannot quantize={quantize!r} here: {error}") from error


def _widened(linear: nn.Linear) -> Tensor:
    """A layer's dequantised weight: the products of unit vectors."""
    like = linear.weight
    units_II = torch.eye(linear.in_features, dtype=like.dtype, device=like.device)
    return F.linear(units_II, like).T.contiguous()


def _replace(linear: nn.Linear, weight_OI: Tensor) -> None:
    linear.weight = nn.Parameter(weight_OI, requires_grad=False)


def _torchao() -> Any:
    """Torchao's module of functions; InputError where it is not installed."""
    require("--quantize", "moaspec[quantize]")
    return importlib.import_module("torchao.quantization")
