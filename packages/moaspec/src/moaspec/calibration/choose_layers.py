"""The choice of N, the number of reused target layers, for callers that name none.

With a larger N drafts are accepted more often and cost more; the best N depends on the machine.
`calibrate` stores the costs, and the checkpoint stores the acceptance rates, so the same drafter
takes the same N every time.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from moaspec.calibration.measure_costs import stored_costs
from moaspec.model.moa import MoADrafter
from moaspec.target.target import Target
from moaspec_core.policy.cost_model import PRIOR, CostTable, best_chain


@dataclass(frozen=True)
class LayersOption:
    """Costs and acceptance rates of drafts with one N."""

    num_target_layers: int
    costs: CostTable | None  # of this machine; None where it was not measured with this N
    prior: Sequence[Sequence[float]]  # acceptance rates to start from
    recorded: bool  # whether these are those of this N, out of the checkpoint

    @property
    def best_chain(self) -> tuple[int, float] | None:
        return None if self.costs is None else best_chain(self.costs, self.prior)

    @property
    def speedup(self) -> float | None:
        """Expected speed-up of the best chain; None without costs or rates of this N."""
        found = self.best_chain
        return found[1] if found is not None and self.recorded else None


def layers_options(
    target: Target, drafter: MoADrafter, *, num_target_layers: int | None = None
) -> list[LayersOption]:
    """Those to choose from, the default first, or that of `num_target_layers` alone."""
    config = drafter.config
    numbers = config.num_target_layers if num_target_layers is None else (num_target_layers,)
    return [
        LayersOption(
            n,
            stored_costs(target, drafter, num_target_layers=n),
            config.acceptance_of(n) or config.acceptance or PRIOR,
            recorded=bool(config.acceptance_of(n)),
        )
        for n in numbers
    ]


def best_option(options: Sequence[LayersOption]) -> LayersOption:
    """The one with the largest expected speed-up; the first if its speed-up is unknown.

    An N without costs or rates of its own is not taken.
    """
    speedups = [option.speedup for option in options]
    if speedups[0] is None:
        return options[0]
    return options[max(range(len(options)), key=lambda i: speedups[i] or 0.0)]
