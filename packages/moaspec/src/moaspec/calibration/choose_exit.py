"""The choice of a drafter's exit for callers that name none.

With a larger N drafts are accepted more often and cost more; the best N depends on the machine.
`calibrate` stores the costs, and the checkpoint stores the acceptance rates, so the same drafter
takes the same exit every time.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from moaspec.calibration.measure_costs import stored_costs
from moaspec.model.moa import MoADrafter
from moaspec.target.target import Target
from moaspec_core.policy.cost_model import PRIOR, CostTable, best_chain


@dataclass(frozen=True)
class Exit:
    """Costs and acceptance rates of drafts through one exit."""

    num_target_layers: int
    costs: CostTable | None  # of this machine; None where it was not measured with this exit
    prior: Sequence[Sequence[float]]  # acceptance rates to start from
    recorded: bool  # whether these are the exit's own, out of the checkpoint

    @property
    def best_chain(self) -> tuple[int, float] | None:
        return None if self.costs is None else best_chain(self.costs, self.prior)

    @property
    def speedup(self) -> float | None:
        """Expected speed-up of the best chain; None without costs or rates of this exit."""
        found = self.best_chain
        return found[1] if found is not None and self.recorded else None


def known_exits(
    target: Target, drafter: MoADrafter, *, num_target_layers: int | None = None
) -> list[Exit]:
    """The exits to choose from, the default first, or that of `num_target_layers` alone."""
    config = drafter.config
    numbers = config.num_target_layers if num_target_layers is None else (num_target_layers,)
    return [
        Exit(
            n,
            stored_costs(target, drafter, num_target_layers=n),
            config.acceptance_of(n) or config.acceptance or PRIOR,
            recorded=bool(config.acceptance_of(n)),
        )
        for n in numbers
    ]


def chosen_exit(exits: Sequence[Exit]) -> Exit:
    """The exit with the largest expected speed-up; the first if its speed-up is unknown.

    An exit without costs or rates of its own is not taken.
    """
    speedups = [one.speedup for one in exits]
    if speedups[0] is None:
        return exits[0]
    return exits[max(range(len(exits)), key=lambda i: speedups[i] or 0.0)]
