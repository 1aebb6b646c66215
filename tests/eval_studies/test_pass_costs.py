"""Costs: what is measured, not how long it takes."""

from __future__ import annotations

import json
from typing import Any

import pytest

import tiny
from eval_studies.pass_costs import (
    MemoryBound,
    PassCosts,
    RoundCost,
    fixed_shape,
    measure_costs,
    num_measurements,
)
from moaspec.backends.fast_target import accelerate
from moaspec.evaluate.method_names import MethodResources, parse_methods
from moaspec.evaluate.methods import Method
from moaspec.target.target import Target

LENGTHS: dict[str, Any] = {"contexts": (32, 64, 250), "batches": (1, 3), "widths": (1, 2, 4)}


def methods(of: Target) -> list[Method]:
    parts = MethodResources(target=of, checkpoints={"moa": tiny.random_drafter(of)})
    return parse_methods(["plain", "lookup@chain:3", "moa:n1@tree:2x2x4"], parts)


@pytest.fixture(scope="module")
def costs() -> PassCosts:
    return measure_costs(methods(tiny.target()), **LENGTHS)


@pytest.mark.slow
def test_every_place_is_measured(costs: PassCosts) -> None:
    """At 250 tokens of context there is no room for five more and the next."""
    assert [one.tokens for one in costs.widths] == [1, 2, 4]
    places = [(one.method, one.context, one.batch) for one in costs.rounds]
    names = ("lookup@chain:3", "moa:n1@tree:2x2x4")
    assert places == [(n, *p) for p in ((32, 1), (64, 1), (250, 1), (32, 3)) for n in names]
    assert all(one.plain_s > 0 and one.draft_s > 0 and one.verify_s > 0 for one in costs.rounds)
    assert [one.encode_s > 0 for one in costs.rounds[:2]] == [False, True]
    json.dumps(costs.as_json())


@pytest.mark.slow
def test_the_longest_possible_context_stands_for_longer_ones() -> None:
    costs = measure_costs(
        methods(tiny.target()), contexts=(32, 252, 512), batches=(1,), widths=(1,)
    )
    longest = (
        tiny.target().max_positions
        - 1
        - max(
            fixed_shape(method).total_tokens for method in methods(tiny.target()) if method.drafter
        )
    )
    assert {one.context for one in costs.rounds} == {32, longest}


@pytest.mark.parametrize("packed", [False, True])
def test_weights_that_a_pass_reads(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted by hand: q and o 48 x 48, k and v 48 x 16, three of the MLP 48 x 56, the head."""
    target = tiny.fresh_target()
    monkeypatch.setattr("moaspec.backends.linear_backends._mkl_copies_weights", lambda: True)
    if packed and not accelerate(target):
        pytest.skip("oneDNN cannot pack weights on this machine")
    found = measure_costs(methods(target), contexts=(32,), batches=(1,), widths=(1, 2)).bound
    layer = 2 * 48 * 48 + 2 * 48 * 16 + 3 * 48 * 56
    assert found.weight_bytes == 4 * (3 * layer + 48 * tiny.VOCAB)
    assert found.floor_s == pytest.approx(found.weight_bytes / found.bytes_per_s)
    assert found.free_tokens in {1, 2}
    assert found.ceiling[1] == 1


def test_break_even() -> None:
    one = RoundCost("moa", 256, 1, plain_s=2.0, draft_s=0.5, verify_s=3.0, encode_s=0.5)
    assert one.break_even == 2.0


@pytest.mark.slow
def test_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in LENGTHS.items():
        monkeypatch.setattr(f"eval_studies.pass_costs.{name.upper()}", value)
    calls: list[None] = []
    chosen = methods(tiny.target())
    found = measure_costs(chosen, advance=lambda: calls.append(None))
    assert len(calls) == num_measurements(chosen)
    assert isinstance(found.bound, MemoryBound)
