"""The draft settings of a target and a drafter on this machine."""

from moaspec.calibration.choose_exit import chosen_exit
from moaspec.calibration.first_use import measure_once
from moaspec.drafting.draft_tree import Tree
from moaspec.drafting.policy.assumed_costs import sure_costs
from moaspec.drafting.policy.policies import DraftSettings, FreeBranches
from moaspec.drafting.proposer_checks import drafts_behind
from moaspec.drafting.protocols import Proposer
from moaspec.model.moa import MoADrafter
from moaspec.target.target import Target, plain_torch


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

    "auto" decides by the costs that this machine has stored or measures now (`measure_once`). If it
    cannot be measured, costs are estimated from the models' sizes, and "auto" drafts if a chain is
    expected to be faster by `SURE` (`sure_costs`), else nothing. For a drafter other than
    `MoADrafter` there are no costs, and "auto" is `DEFAULT_TREE`.

    The engine must have the N of the returned settings.

    Args:
        drafter: of the rows; costs are known for `MoADrafter` only.

    Raises:
        InputError: a shape or setting that does not exist.
    """
    if tree != "auto" or not isinstance(drafter, MoADrafter):
        return DraftSettings(tree, free_branches, num_target_layers=num_target_layers)
    exits, _ = measure_once(target, drafter, num_target_layers=num_target_layers)
    chosen = chosen_exit(exits)
    layers = chosen.num_target_layers
    costs = chosen.costs or sure_costs(target, drafter, layers, chosen.prior)
    if costs is None:
        return DraftSettings(None, free_branches, None, chosen.prior, num_target_layers=layers)
    lags = drafts_behind(drafter, layers)
    return DraftSettings(tree, free_branches, costs, chosen.prior, lags, layers)
