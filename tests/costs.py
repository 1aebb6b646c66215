"""A made-up machine, for tests of decisions by cost."""

from __future__ import annotations

from typing import Any

from moaspec.decode import CostShape, CostTable
from moaspec.decode.cost import KnownCosts


def table(**changes: Any) -> CostTable:
    """A machine whose passes cost 10 ms plus 1 ms per token beyond 8, its drafter a tenth."""
    tokens = (1, 8, 16, 64)
    settings: dict[str, Any] = {
        "contexts": (64, 1024),
        "tokens": tokens,
        "pass_s": ((0.010, 0.010, 0.018, 0.066), (0.020, 0.020, 0.028, 0.076)),
        "head_s": (0.0,) * 4,
        "root_s": 0.001,
        "widths": (1, 8),
        "step_s": (0.001, 0.001),
        "encode_s": (0.0,) * 4,
    }
    return CostTable(**settings | changes)


def by_cost(costs: CostTable, rate: float, *, lags: bool = False) -> CostShape:
    """The policy of a drafter whose favourite is right so often."""
    return CostShape(KnownCosts(costs, [[rate]]), lags=lags)
