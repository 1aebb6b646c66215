"""Checkpoints with quantised weights, loaded as ordinary weights of the same values.

Passes compute with these weights in the target's dtype. Activations are not rounded, though some
engines round them for these checkpoints.
"""

import inspect
from importlib.util import find_spec
from typing import Any

from torch import nn
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from moaspec_core.errors import InputError, UnsupportedTargetError

PACKAGES = {
    "fp8": "accelerate",
    "mxfp4": "accelerate",
    "compressed-tensors": "compressed-tensors",
    "torchao": "torchao",
}
"""Methods whose weights can be widened here, and the package that reads them."""


def prepare_config(config: Any, name: str) -> None:
    """Have transformers widen a checkpoint's weights while it loads them, in place.

    Args:
        config: of the model, before it is loaded.

    Raises:
        UnsupportedTargetError: a method whose weights cannot be widened.
        InputError: the package that reads them is not installed.
    """
    found = getattr(config, "quantization_config", None)
    if found is None:
        return
    method = str(found.get("quant_method", "unknown"))
    if method not in PACKAGES:
        raise UnsupportedTargetError(
            f"{name} is quantised by {method}, whose layers are not ordinary linear layers and "
            f"cannot be made so at load ({', '.join(PACKAGES)} can). Take the model that it was "
            "rounded from, with --quantize int8 or int4, or a GGUF file."
        )
    package = PACKAGES[method]
    if find_spec(package.replace("-", "_")) is None:
        raise InputError(f"{name} is quantised by {method}: pip install {package}.")
    takes = inspect.signature(AUTO_QUANTIZATION_CONFIG_MAPPING[method].__init__).parameters
    if "dequantize" in takes:
        found["dequantize"] = True


def widen(model: Any) -> None:
    """Replace a loaded model's quantised weights by ordinary ones, in place."""
    if getattr(model.config, "quantization_config", None) is None:
        return
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, nn.Parameter) and type(weight) is not nn.Parameter:
            wide = weight.dequantize().to(model.dtype)
            module.weight = nn.Parameter(wide, requires_grad=False)
    del model.config.quantization_config
    model.hf_quantizer, model.is_quantized = None, False
