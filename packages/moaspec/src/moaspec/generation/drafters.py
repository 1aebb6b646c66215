"""Loading drafters by name."""

import logging
from pathlib import Path

from moaspec.backends.fast_baselines import baseline_drafting
from moaspec.hub import cached_if_offline
from moaspec.model.baselines import Baseline
from moaspec.model.checkpoint.baseline_checkpoint import is_baseline, load_baseline
from moaspec.model.checkpoint.moa_checkpoint import load_checkpoint
from moaspec.model.moa import MoADrafter
from moaspec.target.registry import read_skeleton
from moaspec.target.spec import TargetSpec
from moaspec.target.target import Target, plain_torch
from moaspec_core.bundled import bundled_drafters
from moaspec_core.checkpoint.directory import CONFIG_FILE, DEVICE_SECTION, is_directory, read_config
from moaspec_core.drafting.protocols import Proposer
from moaspec_core.errors import InputError, UnknownModelError
from moaspec_core.support.causes import first_line

log = logging.getLogger(__name__)
_OTHER_ADAPTER = (
    "The drafter %s was trained for %s with another adapter or without one: the text is the same, "
    "fewer drafts may be accepted. `moaspec train` with initial= adapts it."
)


@plain_torch()
def load_drafter(name: str | Path, *, target: TargetSpec) -> MoADrafter:
    """Load a drafter in the target's dtype, on its device.

    Args:
        name: a bundled alias (`moaspec models` lists them), a directory, or a hub id.

    Raises:
        UnknownModelError: nothing of that name.
        CheckpointError: unreadable, damaged, or made for another target.
    """
    return _read_moa(name, find_drafter(name), target).to(device=target.device, dtype=target.dtype)


@plain_torch()
def load_any_drafter(name: str | Path, *, target: Target) -> MoADrafter | Proposer:
    """`load_drafter` for Mixture-of-Attentions drafters and for trained baselines alike.

    Returns:
        The argument `drafter` of `generate`. A baseline holds rows of one engine only.
    """
    module = read_drafter(name, target=target).to(device=target.device, dtype=target.dtype)
    if isinstance(module, MoADrafter):
        return module
    return baseline_drafting(module, target)


@plain_torch()
def read_drafter(name: str | Path, *, target: TargetSpec) -> MoADrafter | Baseline:
    """A drafter of any kind in its stored dtype, on the CPU; raises the errors of `load_drafter`.

    Args:
        target: may be without weights.
    """
    directory = find_drafter(name)
    if is_baseline(directory):
        return load_baseline(directory, target.identity)
    return _read_moa(name, directory, target)


def check_drafter(
    name: str | Path, model: str | Path, *, tokenizer: str | Path | None = None
) -> Path:
    """The drafter's directory; raises the errors of `load_drafter` without the target's weights."""
    directory = find_drafter(name)
    if str(name) == str(model):  # the bundled one
        return directory
    target = read_skeleton(model, dtype="float32", tokenizer=tokenizer)
    if is_baseline(directory):
        load_baseline(directory, target.identity)
    else:
        load_checkpoint(directory, target.identity, target.config)
    return directory


def _read_moa(name: str | Path, directory: Path, target: TargetSpec) -> MoADrafter:
    drafter = load_checkpoint(directory, target.identity, target.config)
    trained = drafter.config.target
    if (None if trained is None else trained.adapter) != target.adapter:
        log.warning(_OTHER_ADAPTER, name, target.name)
    return drafter


def find_drafter(name: str | Path) -> Path:
    """Directory of a bundled alias, a directory or a hub id.

    Raises:
        UnknownModelError: it is none of these.
        InputError: a device bundle.
        CorruptCheckpointError: its config cannot be read.
    """
    directory = bundled_drafters().get(str(name), Path(name))
    if not is_directory(directory):
        return _from_hub(str(name))
    if (directory / CONFIG_FILE).is_file() and DEVICE_SECTION in read_config(directory):
        raise InputError(
            f"{name} is a device bundle, for `moaspec remote` and `moaspec edge`; name the drafter "
            "that it was made of."
        )
    return directory


def _from_hub(name: str) -> Path:
    # Imported here: only hub users pay for it.
    from huggingface_hub import snapshot_download

    try:
        if (cached := cached_if_offline(name)) is not None:
            return cached
        return Path(snapshot_download(name, allow_patterns=["config.json", "model*.safetensors*"]))
    # The hub's client raises exceptions of its HTTP library, which differ between versions.
    except Exception as error:
        bundled = ", ".join(bundled_drafters()) or "none"
        raise UnknownModelError(
            f"No drafter {name!r}: not bundled ({bundled}), no directory, and the hub cannot be "
            f"asked or does not have it. Cause: {first_line(error)}"
        ) from error
