"""Loading drafters by name."""

import logging
from pathlib import Path

from moaspec.backends.fast_baselines import baseline_drafting
from moaspec.backends.load import load_target
from moaspec.drafting.other_proposers.model_proposer import ModelProposer, check_drafting_model
from moaspec.hub import cached_if_offline
from moaspec.model.baselines import Baseline
from moaspec.model.checkpoint.baseline_checkpoint import is_baseline, load_baseline
from moaspec.model.checkpoint.moa_checkpoint import load_checkpoint
from moaspec.model.checkpoint.moa_config import SECTION, recorded_config
from moaspec.model.moa import MoADrafter
from moaspec.target.registry import TOKENIZER_JSON, read_skeleton
from moaspec.target.spec import TargetSpec
from moaspec.target.target import Target, plain_torch
from moaspec.target.weights.gguf import is_gguf_name
from moaspec_core.bundled import bundled_drafters
from moaspec_core.checkpoint.directory import (
    BASELINE_SECTION,
    CONFIG_FILE,
    DEVICE_SECTION,
    is_directory,
    read_config,
)
from moaspec_core.checkpoint.drafter_config import TargetIdentity
from moaspec_core.drafting.protocols import Proposer
from moaspec_core.errors import InputError, UnknownModelError
from moaspec_core.support.causes import first_line
from moaspec_core.tokens.names import ALIASES

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
    """`load_drafter` for drafters of any kind: trained baselines and language models, too.

    Args:
        name: as for `load_drafter`, or a language model (see `names_model`).

    Returns:
        The argument `drafter` of `generate`. All but a `MoADrafter` hold rows of one engine only.

    Raises:
        UnknownModelError, CheckpointError: see `load_drafter`.
        InputError, MismatchError: see `check_drafting_model`.
    """
    if names_model(name, target):
        dtype = str(target.dtype).removeprefix("torch.")
        return ModelProposer(load_target(name, dtype=dtype, device=str(target.device)), target)
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
    """The drafter's directory; raises the errors of `load_drafter` without the target's weights.

    Raises:
        InputError: it is a language model, which has no such checkpoint.
    """
    checked = check_any_drafter(name, model, tokenizer=tokenizer)
    if isinstance(checked, str):
        raise InputError(
            f"{name} is a language model, and this command takes drafters that were trained for "
            "their target. Models draft in generate, chat, serve, check and eval."
        )
    return checked


def check_any_drafter(
    name: str | Path, model: str | Path, *, tokenizer: str | Path | None = None
) -> Path | str:
    """The drafter's directory, or the name of a language model; raises as `load_any_drafter`.

    No weights of a target are read.
    """
    if str(name) == str(model):
        if str(name) in bundled_drafters():
            return find_drafter(name)
        if names_model(name, None):
            raise InputError(
                f"{name} is the target itself: its drafts would cost as much as its own tokens. "
                "Name a smaller model, or a drafter."
            )
    target = read_skeleton(model, dtype="float32", tokenizer=tokenizer)
    if names_model(name, target):
        check_drafting_model(read_skeleton(name, dtype="float32"), target)
        return str(name)
    directory = find_drafter(name)
    if is_baseline(directory):
        load_baseline(directory, target.identity)
    else:
        load_checkpoint(directory, target.identity, target.config)
    return directory


def names_model(name: str | Path, target: TargetSpec | None) -> bool:
    """Whether a drafter's name is that of a language model.

    Names are looked up as `find_drafter` does. An alias with a bundled drafter names that drafter
    where this is its target, and for others the model. Otherwise a model is an alias, a GGUF file,
    or a directory with one, or with a tokenizer and no drafter.
    """
    bundled, path = bundled_drafters().get(str(name)), Path(name)
    if bundled is not None:
        own = recorded_config(read_config(bundled)).target
        fits = target is None or own is None or _size(own) == _size(target.identity)
        return str(name) in ALIASES and not fits
    if str(name) in ALIASES or is_gguf_name(path):
        return True
    if not is_directory(path):
        return False
    if not (path / CONFIG_FILE).is_file():
        return any(map(is_gguf_name, path.iterdir()))
    sections = {SECTION, BASELINE_SECTION, DEVICE_SECTION}
    return (path / TOKENIZER_JSON).is_file() and not sections & read_config(path).keys()


def _size(identity: TargetIdentity) -> tuple[int, int]:
    return identity.num_layers, identity.kv_size


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
