"""How many rows a client may bring to a step."""

from __future__ import annotations

import random

import pytest

from moaspec.engine.row_cost import MAX_ROWS, MEMORY_STEPS, MIN_ROWS, RowCost


def learned(fixed: float, per_row: float, *, noise: float = 0.0) -> RowCost:
    cost, numbers = RowCost(), random.Random(0)
    for _ in range(4 * MEMORY_STEPS):
        rows = numbers.randrange(1, 33)
        cost.add(rows, (fixed + per_row * rows) * (1 + noise * numbers.random()))
    return cost


@pytest.mark.parametrize(
    ("fixed", "per_row", "rows"),
    [(1.0, 0.1, 6), (1.0, 0.01, 51), (1.0, 0.5, MIN_ROWS), (0.0, 1.0, MIN_ROWS)],
)
def test_rows_lengthen_a_step_by_at_most_half(fixed: float, per_row: float, rows: int) -> None:
    assert learned(fixed, per_row).rows == pytest.approx(rows, abs=1)
    assert learned(fixed, per_row, noise=0.5).rows == pytest.approx(rows, rel=0.4)


@pytest.mark.parametrize("per_row", [0.0, 1e-6, -0.001])
def test_rows_that_cost_nothing_are_not_limited(per_row: float) -> None:
    assert learned(1.0, per_row).rows == MAX_ROWS


def test_few_rows_where_nothing_is_known() -> None:
    cost = RowCost()
    assert cost.rows == MIN_ROWS
    for _ in range(100):
        cost.add(8, 1.0)
    assert cost.rows == MIN_ROWS


def test_old_steps_are_forgotten() -> None:
    cost = learned(1.0, 0.5)
    for step in range(8 * MEMORY_STEPS):
        cost.add(1 + step % 32, 1.0 + 0.01 * (step % 32))
    assert cost.rows == pytest.approx(51, abs=2)
