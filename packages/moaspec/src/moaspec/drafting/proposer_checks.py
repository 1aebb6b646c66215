"""What a drafter and a target must have in common, and what a drafter can do beside its target."""

from moaspec.model.moa import MoADrafter
from moaspec.target.target import Target
from moaspec_core.checkpoint.drafter_config import DrafterConfig
from moaspec_core.errors import InputError


def drafts_behind(drafter: MoADrafter, num_target_layers: int) -> bool:
    """Whether a drafter in the target's process can draft while the newest tokens lack features.

    With N > 0 it cannot: the reused layers' keys and values of these tokens would overwrite the
    target's. Nor can a CA that attends to drafts: it stores their keys in these tokens' slots.
    """
    return num_target_layers == 0 and not drafter.reads_drafts


def check_num_target_layers(layers: int, drafter: MoADrafter, target: Target) -> None:
    """Raise InputError for an N that the target or the drafter does not have."""
    most = target.num_reusable_layers
    if not 0 <= layers <= most:
        raise InputError(f"num_target_layers must be within 0..{most}, got {layers}.")
    known = drafter.config.num_target_layers
    if drafter.exits and layers not in known:
        raise InputError(
            f"num_target_layers={layers}: this drafter was trained for N = "
            f"{', '.join(map(str, known))}."
        )


def check_trained(layers: int | None, config: DrafterConfig, what: str = "") -> None:
    """Raise InputError for an N that is not recorded; published checkpoints record none.

    Args:
        layers: N; None is the drafter's own.
        what: where N stands; default: the option.
    """
    known = config.num_target_layers
    if layers is not None and config.target is not None and layers not in known:
        what = what or f"--num-target-layers {layers}"
        raise InputError(f"{what}: the drafter was trained for N = {', '.join(map(str, known))}.")


def check_place(drafter: MoADrafter, target: Target) -> None:
    """Raise InputError for a drafter in another dtype or on another device than the target."""
    expected = target.dtype, target.device  # `device` of a module searches its parameters
    for parameter in drafter.parameters():
        got = parameter.dtype, parameter.device
        if got != expected:
            raise InputError(
                f"The drafter is in {got[0]} on {got[1]}, and the target in {expected[0]} on "
                f"{expected[1]}. Call drafter.to({str(expected[1])!r}, {expected[0]}) first."
            )
