"""The draft settings of a target and a drafter on this machine."""

from collections.abc import Callable
from dataclasses import replace

from moaspec.backends.fast_target import same_bits
from moaspec.calibration.assumed_costs import assumed_costs, sure_costs
from moaspec.calibration.choose_layers import LayersOption, best_option, layers_options
from moaspec.calibration.first_use import measure_again, measure_once
from moaspec.drafting.proposer_checks import drafts_behind
from moaspec.model.moa import MoADrafter
from moaspec.target.target import Target, plain_torch
from moaspec_core.drafting.draft_tree import Tree
from moaspec_core.drafting.protocols import CachingProposer, Proposer
from moaspec_core.policy.observed_times import ObservedTimes
from moaspec_core.policy.policies import DraftSettings, FreeBranches


@plain_torch()
def shaping_for(
    target: Target,
    drafter: MoADrafter | Proposer | None,
    *,
    tree: Tree | str = "auto",
    free_branches: FreeBranches = "auto",
    num_target_layers: int | None = None,
) -> DraftSettings:
    """The draft settings for this target and drafter.

    "auto" decides by the costs that this machine has stored, or else by shipped ones
    (`assumed_costs`). Where drafts cannot change a text (`same_bits`), observed times correct both.
    Elsewhere a machine without stored costs is measured now (`measure_once`), and if it cannot be,
    "auto" drafts where a chain is expected to be faster by `SURE` (`sure_costs`), else nothing. For
    a drafter other than `MoADrafter` there are no costs, and "auto" is its `usual_shape`, or
    `DEFAULT_TREE`.

    The engine must have the N of the returned settings.

    Args:
        drafter: of the rows; costs are known for `MoADrafter` only.

    Raises:
        InputError: a shape or setting that does not exist.
    """
    if tree == "auto" and isinstance(drafter, CachingProposer):
        tree = drafter.usual_shape
    if tree != "auto" or not isinstance(drafter, MoADrafter):
        return DraftSettings(tree, free_branches, num_target_layers=num_target_layers)
    by_clock = same_bits(target)
    if by_clock:
        options = layers_options(target, drafter, num_target_layers=num_target_layers)
    else:
        options, _ = measure_once(target, drafter, num_target_layers=num_target_layers)
    chosen = best_option(options)
    layers = chosen.num_target_layers
    if by_clock:  # later calls go by what earlier ones have computed and seen
        of_drafter = target.draft_settings.setdefault(drafter, {})
        key = chosen, free_branches
        if key not in of_drafter:
            of_drafter[key] = _settings_by_clock(target, drafter, chosen, free_branches)
        return of_drafter[key]
    costs = chosen.costs
    if costs is None:
        costs = sure_costs(target, drafter, layers, chosen.prior)
    if costs is None:
        return DraftSettings(None, free_branches, None, chosen.prior, num_target_layers=layers)
    lags = drafts_behind(drafter, layers)
    return DraftSettings(tree, free_branches, costs, chosen.prior, lags, layers)


def _settings_by_clock(
    target: Target, drafter: MoADrafter, chosen: LayersOption, free_branches: FreeBranches
) -> DraftSettings:
    """Settings whose costs are corrected by observed times."""
    layers = chosen.num_target_layers
    costs = chosen.costs or assumed_costs(target, drafter, layers)
    lags = drafts_behind(drafter, layers)
    times = ObservedTimes()
    return DraftSettings("auto", free_branches, costs, chosen.prior, lags, layers, times=times)


def renewed_shaping(
    target: Target,
    drafter: MoADrafter | Proposer | None,
    shaping: DraftSettings,
    stopped: Callable[[], bool],
    *,
    num_target_layers: int | None = None,
) -> DraftSettings | None:
    """The settings with costs that are measured now, if there is a reason to.

    For an idle process: reasons are that none were measured here, that the CPU was busy then, or
    that observed times differ.

    Args:
        shaping: the settings in use.
        num_target_layers: N that stays; None measures every N and chooses anew.
        stopped: called before each part is timed; True ends the measurement without a result.

    Returns:
        None if there is no reason, or if nothing could be measured.
    """
    fixed = shaping.costs is None and shaping.tree is not None
    if fixed or not isinstance(drafter, MoADrafter):
        return None
    used, layers = shaping.num_target_layers, num_target_layers
    fits = shaping.times is None or shaping.times.fits
    if not measure_again(target, drafter, used, layers, fits=fits, stopped=stopped):
        return None
    settings = shaping_for(
        target, drafter, free_branches=shaping.free_branches, num_target_layers=layers
    )
    if (settings.costs, settings.num_target_layers) == (shaping.costs, used):
        return None
    return replace(settings, beside=shaping.beside)
