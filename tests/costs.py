"""A made-up machine, for tests of decisions by cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest

import tiny
from moaspec.model.moa import MoADrafter
from moaspec.target.decoder_layers import DecoderLayers
from moaspec.target.target import Target
from moaspec_core.checkpoint.drafter_config import Rates
from moaspec_core.policy.cost_model import CostTable, KnownCosts
from moaspec_core.policy.policies import AdaptivePolicy


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


def by_cost(costs: CostTable, rate: float, *, lags: bool = False) -> AdaptivePolicy:
    """The policy of a drafter whose favourite is right so often."""
    return AdaptivePolicy(KnownCosts(costs, [[rate]]), lags=lags)


def know(monkeypatch: pytest.MonkeyPatch, tables: Mapping[int, CostTable]) -> None:
    """Let the machine be measured with drafts through these N."""

    def stored(_: Target, __: MoADrafter, *, num_target_layers: int) -> CostTable | None:
        return tables.get(num_target_layers)

    monkeypatch.setattr("moaspec.calibration.choose_layers.stored_costs", stored)


def rated(of: Target, *rates: float, exits: tuple[int, ...] = (0, 2)) -> MoADrafter:
    """A drafter that disagrees, with these rates recorded for its first exits."""
    module = tiny.random_drafter(of, exits=exits)
    by_layers: tuple[Rates, ...] = tuple(((rate,),) for rate in rates)
    first = by_layers[0] if by_layers else ()
    module.config = dataclasses.replace(
        module.config, acceptance=first, further_acceptance=by_layers[1:]
    )
    return module


def watch_reused(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Through how many of a target's last layers drafts go from now on, where any."""
    seen: set[int] = set()
    run = DecoderLayers.run

    def watched(layers: DecoderLayers, *arguments: Any, num: int, **options: Any) -> Any:
        if num < len(layers.types):  # the target itself runs through all
            seen.add(num)
        return run(layers, *arguments, num=num, **options)

    monkeypatch.setattr(DecoderLayers, "run", watched)
    return seen
