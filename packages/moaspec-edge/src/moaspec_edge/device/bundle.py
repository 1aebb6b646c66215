"""Device bundles: the directory that a device loads.

A bundle holds the target's embedding, the rows of its head that can be drafted, its last layers if
the drafter reuses them, the drafter's decoder, the tokenizer, and the identities of the models. The
device never opens the target's own files.
"""

import asyncio
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, GenerationConfig

from moaspec.backends.fast_baselines import accelerated
from moaspec.backends.fast_target import accelerate
from moaspec.backends.load import load_target
from moaspec.drafting.other_proposers.baseline_proposers import IndependentProposer
from moaspec.drafting.proposer_checks import check_trained
from moaspec.generation.destinations import device_problem
from moaspec.generation.drafters import find_drafter, read_drafter
from moaspec.model.baselines import IndependentDrafter, StackConfig
from moaspec.model.checkpoint.eight_bits import quantised_tensors
from moaspec.model.checkpoint.moa_checkpoint import device_part, device_part_bytes, fingerprint
from moaspec.model.checkpoint.moa_config import config_from_json
from moaspec.model.checkpoint.tensor_names import DRAFT_TOKENS
from moaspec.model.checkpoint.tensor_names import to_module_name as module_name
from moaspec.model.checkpoint.weight_files import (
    read_tensors,
    require_enough,
    write_config,
    write_weights,
)
from moaspec.model.moa import MoADrafter
from moaspec.target.families import is_family
from moaspec.target.generic.device_target import GenericPartialTarget, device_tensors
from moaspec.target.partial import PartialTarget, fill_module, grouped
from moaspec.target.registry import DTYPES, load_tokenizer, read_skeleton, require_dtype
from moaspec.target.target import Target
from moaspec.target.thread_limiter import ThreadLimiter
from moaspec_core.checkpoint.directory import CONFIG_FILE, read_config
from moaspec_core.checkpoint.directory import DEVICE_SECTION as SECTION
from moaspec_core.checkpoint.drafter_config import MAX_LAYERS, LayerConfig, TargetIdentity
from moaspec_core.checkpoint.user_files import why_not_files
from moaspec_core.drafting.protocols import Proposer
from moaspec_core.errors import CheckpointError, CorruptCheckpointError, InputError, RefusedError
from moaspec_core.support.paths import why_not_trusted
from moaspec_core.tokens.names import FAMILIES
from moaspec_edge.device.bundle_place import is_bundle, replacing, require_free
from moaspec_edge.device.device_parts import Device
from moaspec_edge.device.local_parts import DeviceMoAProposer
from moaspec_edge.device.version_updates import newer_version
from moaspec_edge.device_onnx.manifest import is_onnx_bundle
from moaspec_edge.protocol.transport import ServerTransport

FORMAT_VERSION = 1
TARGET, DRAFTER = "target", "drafter"
MAX_HEADER_BYTES = 1 << 16
"""Largest header of a file of weights that a server sends."""
TARGET_CONFIG = "target"  # directory inside the bundle for the target's config and tokenizer

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class BundleInfo:
    """Metadata of a bundle."""

    kind: str  # "moa" or "independent"
    target: TargetIdentity
    fingerprint: str | None  # of the drafter whose encoder the server must have, or None
    weights: str  # "bfloat16" or "int8"
    num_target_layers: int  # number of the target's last layers in the bundle
    stop_token_ids: tuple[int, ...]  # ids that end a turn
    drafter: dict[str, Any]


@dataclass(eq=False)
class DeviceBundle(Device):
    """A bundle, loaded for drafting."""

    info: BundleInfo  # metadata
    target: PartialTarget  # embedding, head, last layers and tokenizer; it cannot verify
    module: MoADrafter | IndependentDrafter  # the part of the drafter that runs on the device

    def __post_init__(self) -> None:
        # The first version names the encoder to the server; a later one may draft.
        self.fingerprint = self.version = self.info.fingerprint

    async def update(self, transport: ServerTransport) -> bool:
        if not isinstance(self.module, MoADrafter):
            return False
        most = device_part_bytes(self.module.config) + MAX_HEADER_BYTES
        found = await newer_version(transport, self.version, most)
        if found is None:
            return False
        version, data = found
        self.module = await asyncio.to_thread(self._received, data)
        self.version = version
        return True

    def renew(self, drafting: Proposer) -> None:
        if isinstance(drafting, DeviceMoAProposer) and isinstance(self.module, MoADrafter):
            module, _ = drafting.modules(self.module, drafting.target)
            if module is not drafting.module:
                drafting.adopt(self.module)

    def _received(self, data: bytes) -> MoADrafter | IndependentDrafter:
        """The device's part of a version, from a file of safetensors."""
        try:
            state = safetensors.torch.load(data)
            if not all(bool(one.isfinite().all()) for one in state.values()):
                raise ValueError("a weight is not finite")
            return _module(self.info, state, self.module.draft_token_ids, self.target.dtype)
        except (SafetensorError, CheckpointError, ValueError, RuntimeError) as error:
            raise RefusedError(f"The server's weights do not fit this bundle: {error}") from error

    def drafting(self, num_target_layers: int | None = None) -> Proposer:
        """Make a drafter with its own caches; InputError for an N that it or the bundle lacks."""
        if isinstance(self.module, MoADrafter):
            check_trained(num_target_layers, self.module.config)
        if (num_target_layers or 0) > self.info.num_target_layers:
            raise InputError(
                f"num_target_layers={num_target_layers}: this bundle holds "
                f"{self.info.num_target_layers} of the target's layers. Export it with more."
            )
        if isinstance(self.module, IndependentDrafter):
            return accelerated(IndependentProposer(self.module, self.target))
        return DeviceMoAProposer(self.module, self.target, num_target_layers=num_target_layers)


def export_bundle(
    target: str | Path,
    drafter: str | Path,
    directory: str | Path,
    *,
    int8: bool = False,
    num_target_layers: int | None = None,
    tokenizer: str | Path | None = None,
) -> None:
    """Write a device bundle atomically, see `replacing`.

    Args:
        target: alias, directory, GGUF file or hub id.
        drafter: a Mixture-of-Attentions drafter or an independent one: alias, directory or hub id.
        directory: created if missing; a bundle in it is replaced.
        int8: store matrices in eight bits, half the size of bf16.
        num_target_layers: number of the target's last layers to add; None takes the largest N that
            the drafter was trained for.
        tokenizer: see `load_target`.

    Raises:
        InputError: the drafter needs activations that a server does not send, the target has no
            tokenizer, or the directory holds other files.
        UnknownModelError: a name is unknown.
        CheckpointError: the drafter is damaged or belongs to another target.
    """
    require_free(Path(directory))
    skeleton, module = read_models(target, drafter, dtype="bfloat16", tokenizer=tokenizer)
    num_layers = _num_layers(module, num_target_layers, skeleton.num_reusable_layers)
    whole = load_target(target, dtype="bfloat16", packed=False, tokenizer=tokenizer)
    info = BundleInfo(
        kind="moa" if isinstance(module, MoADrafter) else module.kind,
        target=whole.identity,
        fingerprint=fingerprint(module) if isinstance(module, MoADrafter) else None,
        weights="int8" if int8 else "bfloat16",
        num_target_layers=num_layers,
        stop_token_ids=tuple(sorted(whole.stop_token_ids)),
        drafter=dataclasses.asdict(module.config),
    )
    assert whole.tokenizer is not None, "device_problem() has asked"
    tensors = _tensors(whole, module, num_layers, int8=int8)
    with replacing(directory) as made:
        made.mkdir()
        write_weights(made, tensors)
        for part in (whole.config, whole.model.generation_config, whole.tokenizer):
            part.save_pretrained(made / TARGET_CONFIG)
        section = {"format_version": FORMAT_VERSION, **dataclasses.asdict(info)}
        write_config(made, {SECTION: section})


def read_models(
    target: str | Path,
    drafter: str | Path,
    *,
    dtype: str,
    tokenizer: str | Path | None = None,
) -> tuple[Target, MoADrafter | IndependentDrafter]:
    """The target without its weights, so that refusals do not wait for them, and the drafter.

    Raises the errors of `export_bundle`.
    """
    source = find_drafter(drafter)
    skeleton = read_skeleton(target, dtype=dtype, tokenizer=tokenizer)
    module = read_drafter(source, target=skeleton).to(dtype=skeleton.dtype)
    problem = device_problem(module, skeleton)
    if problem is not None:
        raise InputError(f"{drafter} for {target}: {problem}")
    assert isinstance(module, MoADrafter | IndependentDrafter), "device_problem() has asked"
    return skeleton, module


def _num_layers(
    module: MoADrafter | IndependentDrafter, wanted: int | None, num_layers: int
) -> int:
    """The number of the target's last layers in a bundle."""
    if isinstance(module, IndependentDrafter):
        return 0
    check_trained(wanted, module.config)
    found = max(module.config.num_target_layers) if wanted is None else wanted
    if not 0 <= found <= num_layers:
        raise InputError(f"num_target_layers must be within 0..{num_layers}, got {found}.")
    return found


def _tensors(
    target: Target, module: MoADrafter | IndependentDrafter, num_layers: int, *, int8: bool
) -> dict[str, Tensor]:
    """All tensors of a bundle."""
    ids = module.draft_token_ids
    if isinstance(module, IndependentDrafter):
        own = {name: p.detach().contiguous().cpu() for name, p in module.named_parameters()}
    else:
        own = device_part(module)
    parts = {
        TARGET: device_tensors(target, num_layers=num_layers, head_token_ids=ids),
        DRAFTER: own,
    }
    found = {
        f"{part}.{name}": tensor
        for part, tensors in parts.items()
        for name, tensor in (quantised_tensors(tensors) if int8 else tensors).items()
    }
    return found if ids is None else found | {DRAFT_TOKENS: ids.cpu()}


def read_bundle_info(directory: str | Path) -> BundleInfo:
    """Read the metadata of a bundle, without its weights.

    Raises:
        CheckpointError: no bundle, or another version of the format.
        CorruptCheckpointError: the config is damaged.
    """
    if is_onnx_bundle(directory):
        raise CheckpointError(
            f"{directory} is an ONNX bundle: load it by moaspec_edge.device_onnx.onnx_device."
            "OnnxDevice, or export it again without --format."
        )
    if not is_bundle(directory):
        raise CheckpointError(
            f"{directory} is no device bundle. Make one with `moaspec checkpoint export-device "
            "TARGET DRAFTER DIR`."
        )
    try:
        values = dict(read_config(directory)[SECTION])
        version = values.pop("format_version")
        if version != FORMAT_VERSION:
            raise CheckpointError(
                f"The bundle's format {version} is not {FORMAT_VERSION}; export it again with this "
                "version of moaspec, or upgrade."
            )
        values["target"] = TargetIdentity(**values["target"])
        values["stop_token_ids"] = tuple(values["stop_token_ids"])
        info = BundleInfo(**values)
        reused, layers = info.num_target_layers, info.target.num_layers
        if not 0 <= int(reused) <= int(layers) <= MAX_LAYERS:
            raise ValueError(f"{reused!r} of {layers!r} layers cannot be reused")
        if info.kind not in ("moa", IndependentDrafter.kind):
            raise ValueError(f"there is no kind {info.kind!r}")
        if not all(isinstance(one, int) for one in info.stop_token_ids):
            raise ValueError("stop_token_ids are no token ids")
        return info
    except (LookupError, TypeError, ValueError) as error:
        raise CorruptCheckpointError(
            f"The {SECTION} section of {Path(directory) / CONFIG_FILE} is damaged: {error}. Export "
            "the bundle again."
        ) from error


def load_device(directory: str | Path, *, dtype: str = "bfloat16") -> DeviceBundle:
    """Load a device bundle.

    Args:
        directory: written by `export_bundle`.
        dtype: of computations. Bundles in eight bits are made for bfloat16.

    Raises:
        InputError: an unknown dtype.
        CheckpointError: no bundle, another version of the format, or other users may have written
            it.
        CorruptCheckpointError: files are missing, truncated or inconsistent.
    """
    require_dtype(dtype)
    directory = Path(directory)
    info = read_bundle_info(directory)
    reason = why_not_trusted(directory, directory)
    if reason is not None:
        raise CheckpointError(
            f"The bundle at {directory} is not loaded: {reason}. Texts are read by its tokenizer, "
            "so only this user may be able to write it; a copy of it (cp -r) will do."
        )
    tensors = read_tensors(directory)
    draft_token_ids = tensors.pop(DRAFT_TOKENS, None)
    parts = grouped(tensors)
    try:
        if (reason := why_not_files(directory / TARGET_CONFIG)) is not None:
            raise ValueError(reason)
        config = _target_config(directory / TARGET_CONFIG, info)
        kind: Any = PartialTarget if is_family(config) else GenericPartialTarget
        own: dict[str, Any] = {"num_layers": info.num_target_layers}
        if kind is GenericPartialTarget:
            own = {"identity": info.target}
        target = kind(
            config,
            parts[TARGET],
            load_tokenizer(str(directory / TARGET_CONFIG)),
            name=f"The bundle at {directory}",
            **own,
            head_token_ids=draft_token_ids if "head.weight" in parts[TARGET] else None,
            stop_token_ids=frozenset(info.stop_token_ids),
            dtype=DTYPES[dtype],
            generation_config=GenerationConfig.from_pretrained(directory / TARGET_CONFIG),
        )
        module = _module(info, parts[DRAFTER], draft_token_ids, DTYPES[dtype])
    except CheckpointError:
        raise
    except Exception as error:  # transformers raises of all kinds
        raise CorruptCheckpointError(
            f"The bundle at {directory} is incomplete or inconsistent: {error}. Export it again."
        ) from error
    if target.identity != info.target:
        raise CorruptCheckpointError(
            f"The bundle at {directory} records {info.target}, and its config and tokenizer make "
            f"{target.identity}. Export it again."
        )
    target.threads = ThreadLimiter()
    accelerate(target)
    return DeviceBundle(info, target, module)


def _target_config(directory: Path, info: BundleInfo) -> Any:
    """The target's config; CorruptCheckpointError for other numbers of layers than the bundle's."""
    # Before transformers reads it: some families make a list of all layers.
    raw = read_config(directory)
    num_layers, has_family = raw.get("num_hidden_layers"), raw.get("model_type") in FAMILIES
    # Layers of other types may share their keys and values.
    if has_family and not info.num_target_layers <= info.target.num_layers == num_layers:
        raise CorruptCheckpointError(
            f"The target of the bundle has {info.target.num_layers} layers, {directory} has "
            f"{num_layers!r}, and {info.num_target_layers} are reused. Export it again."
        )
    return AutoConfig.from_pretrained(directory, trust_remote_code=False)


def _module(
    info: BundleInfo, state: Mapping[str, Tensor], ids: Tensor | None, dtype: torch.dtype
) -> MoADrafter | IndependentDrafter:
    """The part of the drafter that runs on the device."""
    if info.kind == IndependentDrafter.kind:
        values = info.drafter
        layer, target = LayerConfig(**values["layer"]), TargetIdentity(**values["target"])
        stack = StackConfig(**values | {"layer": layer, "target": target})
        return _loaded(lambda: IndependentDrafter(stack, ids), state, dtype)
    config = config_from_json(info.drafter)

    def without_encoder() -> MoADrafter:
        drafter = MoADrafter(config, ids)
        del drafter.encoder  # it runs on the server
        return drafter

    return _loaded(without_encoder, {module_name(k): t for k, t in state.items()}, dtype)


def _loaded(make: Callable[[], M], state: Mapping[str, Tensor], dtype: torch.dtype) -> M:
    require_enough(state, make)
    module = make().to(dtype)
    fill_module(module, state, dtype)
    return module.eval().requires_grad_(requires_grad=False)
