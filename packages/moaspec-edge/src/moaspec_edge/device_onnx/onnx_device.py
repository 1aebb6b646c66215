"""A device that drafts from an ONNX bundle; needs no PyTorch."""

import asyncio
from functools import cached_property
from pathlib import Path
from typing import Any

from moaspec_core.checkpoint.drafter_config import TargetIdentity
from moaspec_core.checkpoint.user_files import read_json
from moaspec_core.drafting.protocols import Proposer
from moaspec_core.errors import CorruptCheckpointError, InputError
from moaspec_core.sampling.generation_defaults import NO_DEFAULTS, GenerationDefaults
from moaspec_edge.device.device_parts import Device
from moaspec_edge.device.version_updates import newer_version
from moaspec_edge.device_onnx.device_tokenizer import DeviceTokenizer
from moaspec_edge.device_onnx.manifest import Manifest
from moaspec_edge.device_onnx.onnx_drafter import OnnxDrafter
from moaspec_edge.device_onnx.onnx_proposer import OnnxProposer
from moaspec_edge.protocol.identity import PROTOCOL, SAMPLING_VERSION
from moaspec_edge.protocol.transport import ServerTransport

GENERATION_CONFIG = "generation_config.json"


class BundledTarget:
    """The target as a bundle describes it; see `DeviceTarget`.

    Args:
        manifest: of the bundle.
        directory: the bundle's.

    Raises:
        CorruptCheckpointError: the bundle records no target, or its tokenizer cannot be read.
    """

    rope_switches: tuple[int, ...] = ()

    def __init__(self, manifest: Manifest, directory: Path) -> None:
        self.name = f"the target of {directory}"
        self.max_positions, self.rope_growth = manifest.max_positions, manifest.rope_growth
        self.stop_token_ids = frozenset(manifest.stop_token_ids)
        self._directory = directory
        try:
            self.identity = TargetIdentity(**manifest.target)
            self.vocab_size = int(self.identity.vocab_size)
            self.tokenizer = DeviceTokenizer(directory)
        except (TypeError, LookupError, AttributeError, ValueError, OSError) as error:
            raise CorruptCheckpointError(
                f"The bundle at {directory} is damaged: {error}. Export it again."
            ) from error

    @cached_property
    def generation_defaults(self) -> GenerationDefaults:
        """The defaults of its `generation_config.json`."""
        try:
            values = read_json(self._directory / GENERATION_CONFIG)
        except FileNotFoundError:
            return NO_DEFAULTS
        config: Any = _GenerationConfig(values)
        return GenerationDefaults.of(config, self.vocab_size)


class _GenerationConfig:
    """The attributes of transformers' `GenerationConfig`: None where the file has no value."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def __getattr__(self, name: str) -> Any:
        return self._values.get(name)


class OnnxDevice(Device):
    """A device that drafts from an ONNX bundle.

    Args:
        directory: written by `export_onnx`.
        threads: of onnxruntime, for each draft.

    Raises:
        CheckpointError: no ONNX bundle, or another version of the format.
        CorruptCheckpointError: a file is missing or has other contents than the manifest says.
        InputError: a bundle of another version of the protocol.
    """

    target: BundledTarget

    def __init__(self, directory: str | Path, *, threads: int = 1) -> None:
        self._drafter = OnnxDrafter(directory, threads=threads)
        manifest = self._drafter.manifest
        versions = manifest.protocol, manifest.sampling_version
        if versions != (PROTOCOL, SAMPLING_VERSION):
            raise InputError(
                f"The bundle at {directory} is for protocol {versions}; this is "
                f"{(PROTOCOL, SAMPLING_VERSION)}. Export it again with this version of moaspec."
            )
        self.target = BundledTarget(manifest, Path(directory))
        # The first version names the encoder to the server; a later one may draft.
        self.fingerprint = self.version = manifest.fingerprint

    async def update(self, transport: ServerTransport) -> bool:
        versions = self._drafter.manifest.versions
        if versions is None:
            return False
        found = await newer_version(
            transport, self.version, versions.num_bytes, packing=versions.packing
        )
        if found is None:
            return False
        version, data = found
        self._drafter = await asyncio.to_thread(self._drafter.of_version, data)
        self.version = version
        return True

    def renew(self, drafting: Proposer) -> None:
        if isinstance(drafting, OnnxProposer):
            drafting.adopt(self._drafter)

    def drafting(self, num_target_layers: int | None = None) -> OnnxProposer:
        """Make a drafter for one session; see `Device`.

        Raises:
            InputError: another N than the bundle's.
        """
        own = self._drafter.manifest.num_target_layers
        if num_target_layers not in (None, own):
            raise InputError(
                f"num_target_layers={num_target_layers}: this ONNX bundle is for {own}. Leave the "
                "option out, or export a bundle for it."
            )
        return OnnxProposer(self._drafter.for_another_text())
