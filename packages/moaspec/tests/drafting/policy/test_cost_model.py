"""Costs, acceptance rates, and the shape that pays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from costs import table
from moaspec_core.drafting.draft_tree import DraftTree
from moaspec_core.errors import InputError
from moaspec_core.policy.cost_model import (
    GAIN,
    MAX_DEPTH,
    AcceptanceRates,
    CostTable,
    KnownCosts,
    RoundCosts,
    chain_speedups,
)

HALF = np.array([0.5])


def test_costs_are_interpolated_and_extended() -> None:
    costs = table()
    # Exact but for the rounding of float64.
    assert costs.verify_s(12, 64) == pytest.approx(0.014)
    assert costs.verify_s(128, 64) == pytest.approx(0.130)
    assert costs.verify_s(1, 544) == pytest.approx(0.015)
    assert costs.verify_s(1, 1984) == pytest.approx(0.030)
    assert costs.verify_s(1, 1) == pytest.approx(0.010)
    assert costs.plain_s(64, num_requests=8) == pytest.approx(0.010 / 8)
    assert costs.draft_s(3, 2, 1) == pytest.approx(0.003)
    assert table(contexts=(64,), pass_s=((0.01, 0.01, 0.01, 0.01),)).plain_s(9) == 0.01


@pytest.mark.parametrize(
    "changes",
    [{"pass_s": ((0.1,),)}, {"contexts": (1,)}, {"root_s": float("nan")}, {"widths": (1,)}],
)
def test_tables_that_do_not_fit(changes: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="moaspec calibrate"):
        table(**changes)


def test_acceptance_starts_from_the_prior_and_follows_the_counts() -> None:
    acceptance = AcceptanceRates([[0.4, 0.2]])
    assert acceptance.rates == pytest.approx([0.4] * MAX_DEPTH)
    # The drafter's second choice was right, and the favourite of those below it.
    tree = DraftTree((1, 2, 3, 4), (-1, -1, 1, 1))
    for _ in range(200):
        acceptance.count(tree, [1, 2])
    rates = acceptance.rates
    assert rates[0] < 0.1
    assert rates[1] > 0.9
    # Nothing was seen of deeper levels, where about what all showed is expected.
    assert rates[0] < rates[2] < rates[1]


def test_copied_nodes_are_not_the_drafters() -> None:
    plain, copied = AcceptanceRates(), AcceptanceRates()
    plain.count(DraftTree((1, 2), (-1, 0)), [0])
    copied.count(DraftTree((1, 2, 3), (-1, 0, 0), num_copied=1), [0, 2])
    assert np.array_equal(plain.rates, copied.rates)


def best(rate: float, costs: CostTable) -> tuple[int, float]:
    """Length and speed-up of the best chain."""
    speedups = chain_speedups(costs, np.full(MAX_DEPTH, rate), 64)
    return int(speedups.argmax()) + 1, float(speedups.max())


def test_better_drafters_draft_deeper() -> None:
    lengths = [best(rate, table())[0] for rate in (0.1, 0.5, 0.9)]
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[-1]
    assert best(0.05, table())[1] < 1.0
    assert best(0.9, table())[1] > 2.0


def test_the_speedup_of_a_chain_is_its_tokens_over_its_time() -> None:
    costs = table(root_s=0.002, encode_s=(0.0005,) * 4, draft_rest_s=0.001)
    seconds = 0.010 + 0.002 + 2 * 0.001 + 0.0005 + 0.001
    expected = (1 + 0.5 + 0.25 + 0.125) / seconds * 0.010
    assert chain_speedups(costs, np.full(MAX_DEPTH, 0.5), 64)[2] == pytest.approx(expected)


def test_dear_passes_make_chains_slower() -> None:
    dear = table(pass_s=((0.01, 0.08, 0.16, 0.64), (0.01, 0.08, 0.16, 0.64)))
    assert best(0.6, dear)[1] < 1.0 < best(0.6, table())[1]


def test_what_a_round_takes_around_its_parts_counts_once() -> None:
    alone, around = table(), table(plain_rest_s=0.002, draft_rest_s=0.003)
    assert around.plain_s(64, 2) - alone.plain_s(64, 2) == pytest.approx(0.001)
    assert around.draft_s(3, 2, 4) - alone.draft_s(3, 2, 4) == pytest.approx(0.003)
    assert float(around.verify_s(5, 64)) == float(alone.verify_s(5, 64))
    with pytest.raises(InputError, match="at least 0"):
        table(draft_rest_s=-1.0)


def test_prices_are_what_a_wider_pass_costs() -> None:
    found = RoundCosts(table(), HALF, 64, 1)
    prices = found.tree.prices
    assert prices[:7] == (0.0,) * 7  # a pass over eight takes as long as one over a single token
    assert prices[7] == pytest.approx(GAIN * 0.1)
    assert found.tree.depth == MAX_DEPTH
    assert prices[-1] < MAX_DEPTH  # more than that cannot be accepted
    # What a draft costs, and a level of drafting, over the chance that it is right.
    assert found.tree.least == pytest.approx(GAIN * (0.1 / MAX_DEPTH + 0.1) / 0.5)
    assert found.drafted_s(3, 2, 8) == pytest.approx(0.001 + 2 * 0.001 + 0.011)
    assert found.accept_s(10_000) == pytest.approx(float(table().accept_s(10_000)))


def test_prices_of_full_batches_are_higher() -> None:
    alone, together = (RoundCosts(table(), HALF, 64, rows).tree for rows in (1, 16))
    assert together.total_tokens < alone.total_tokens
    assert together.prices[0] > alone.prices[0]


def test_nothing_is_drafted_on_where_no_draft_pays() -> None:
    steep = ((0.01, 0.5, 1.0, 4.0), (0.01, 0.5, 1.0, 4.0))
    tree = RoundCosts(table(pass_s=steep), HALF, 64, 1).tree
    assert tree.least == 1.0
    assert tree.kept([-0.01]) == 0


def test_rows_of_like_length_share_their_costs() -> None:
    known = KnownCosts(table(), [[0.5]])
    assert known.at(300, 1) is known.at(700, 1)
    assert known.at(300, 1) is not known.at(300, 2)
    assert known.at(1000, 1).plain_s > known.at(300, 1).plain_s


def test_wide_levels_and_large_trees_cost_what_the_table_says() -> None:
    costs = table(widths=(1, 8), step_s=(0.001, 0.008))
    found = RoundCosts(costs, HALF, 64, 1)
    narrow, wide = (found.drafted_s(3, num_expanded, 4) for num_expanded in (2, 8))
    assert wide - narrow == pytest.approx(2 * (costs.step_s_of(4) - costs.step_s_of(1)))
    assert found.drafted_s(1, 0, 100) == pytest.approx(0.001 + float(costs.verify_s(101, 64)))
    tree = found.tree
    widest = min(8, int(1 / tree.least))
    assert found.risk_s(tree) >= found.drafted_s(
        tree.depth, widest * (tree.depth - 1), tree.total_tokens
    ) - costs.plain_s(64)
