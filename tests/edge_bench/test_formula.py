"""The arithmetic of a round, against the example of its source."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edge_bench.formula import Round, pays, prediction

# Five drafts at acceptance 0.85, a device that drafts a token in 1.5 ms, a server's pass of 20 ms.
ALPHA, DRAFTED = 0.85, 5
TOKENS = (1 - ALPHA ** (DRAFTED + 1)) / (1 - ALPHA)
ROUND = Round(tokens=TOKENS, drafted=DRAFTED, step_s=0.0015, pass_s=0.020, rtt_s=0.009)


def test_each_mode() -> None:
    assert prediction("plain", ROUND) == 0.020
    assert prediction("server", ROUND) == pytest.approx((0.0075 + 0.020) / TOKENS)
    assert prediction("sync", ROUND) == pytest.approx((0.0075 + 0.009 + 0.020) / TOKENS)


def test_drafting_ahead_hides_drafts_behind_the_wait() -> None:
    always, never = replace(ROUND, hits=1.0), replace(ROUND, hits=0.0)
    assert prediction("ahead", always) == pytest.approx(0.029 / TOKENS)
    assert prediction("ahead", never) == pytest.approx(prediction("sync", ROUND))
    slow = replace(always, step_s=0.01)
    assert prediction("ahead", slow) == pytest.approx(0.05 / TOKENS)


def test_client_server_never_beats_the_server_that_drafts_as_fast() -> None:
    for rtt_s in (0.0, 0.001, 0.05):
        one = replace(ROUND, rtt_s=rtt_s)
        assert prediction("sync", one) >= prediction("server", one)
        assert prediction("ahead", one) * TOKENS >= one.pass_s + rtt_s


def test_when_client_server_pays() -> None:
    assert pays("sync", ROUND, 0.020)
    # R + s/B + gamma t_d = A t_T - t_v is where it ends.
    limit_s = TOKENS * 0.020 - 0.020 - DRAFTED * 0.0015
    assert pays("sync", replace(ROUND, rtt_s=limit_s - 1e-6), 0.020)
    assert not pays("sync", replace(ROUND, rtt_s=limit_s + 1e-6), 0.020)
    assert not pays("sync", replace(ROUND, rtt_s=0.01, transfer_s=limit_s), 0.020)
    assert not pays("plain", replace(ROUND, pass_s=0.020), 0.020)
