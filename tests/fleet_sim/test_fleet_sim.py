"""The simulator of fleets: against closed forms, and against the real services and sessions."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import moaspec
import tiny
from costs import table
from fleet_sim import real_runs, traces
from fleet_sim.simulation import Fleet, Mode, pass_s, simulate
from fleet_sim.traces import Trace
from moaspec_core.drafting.draft_tree import DraftTree
from moaspec_core.drafting.protocols import VerifyRequest
from moaspec_edge.emulation import LinkProfile
from moaspec_edge.protocol.wire import chain

COSTS = table(encode_s=(0.0001, 0.0008, 0.0016, 0.0064), plain_rest_s=0.001)
DRAWN = random.Random(0)
TRACES = [
    Trace(9 + i, tuple(min(8, int(DRAWN.expovariate(0.7))) for _ in range(40))) for i in range(8)
]
LINK = LinkProfile(name="test", delay_s=0.004)
FLEET = Fleet(
    mode="sync",
    devices=1,
    servers=1,
    costs=COSTS,
    traces=TRACES,
    link=LINK,
    step_s=0.003,
    token_bytes=0,
    row_s=0.0005,
    seconds=4.0,
    warm_s=2.0,
    sticky=True,
)


def test_the_traces_are_those_of_real_texts(tmp_path: Path) -> None:
    target = tiny.target()
    drafter = tiny.agreeing_drafter("llama")
    recorded = traces.record(target, drafter, tiny.PROMPTS, 12)
    traces.save(recorded, tmp_path / "traces.json")
    assert traces.load(tmp_path / "traces.json") == recorded
    assert [one.prompt for one in recorded] == [*map(len, tiny.PROMPTS)]
    for prompt, trace in zip(tiny.PROMPTS, recorded, strict=True):
        settings: Any = {"max_new_tokens": 12, "tree": moaspec.Chain(4), "free_branches": False}
        result = moaspec.generate(target, prompt, drafter=drafter, **settings)
        place, lengths = 0, []
        while place < len(trace.right) - 1:
            lengths.append(min(4, trace.right[place], len(trace.right) - place - 2) + 1)
            place += lengths[-1]
        assert result.accept_lengths == lengths


def test_a_device_alone_takes_what_its_parts_take() -> None:
    none_right = [Trace(9, (0,) * 40)]
    fleet = replace(FLEET, traces=none_right, fixed=2)
    found = simulate(fleet)
    one = VerifyRequest(0, 20, (1,), chain([1, 1]))
    round_s = 2 * 0.003 + 2 * 0.004 + pass_s(COSTS, [one]) + 0.0005
    # Contexts differ a little, and the last drafts of a text are fewer.
    assert found.token_s(2.0, 6.0)[0] == pytest.approx(round_s, rel=0.02)
    plain = simulate(replace(fleet, mode="plain"))
    row = VerifyRequest(0, 20, (1,), DraftTree())
    assert plain.token_s(2.0, 6.0)[0] == pytest.approx(pass_s(COSTS, [row]) + 0.0005, rel=0.02)


def test_drafting_ahead_hides_drafts() -> None:
    all_right = [Trace(9, (8,) * 40)]
    fleet = replace(FLEET, traces=all_right, fixed=3, step_s=0.001)
    sync, ahead = (simulate(replace(fleet, mode=mode)).token_s(2.0, 6.0)[0] for mode in MODES)
    assert ahead < sync - 0.0005


MODES: tuple[Mode, ...] = ("sync", "ahead")


@pytest.mark.parametrize("mode", ["plain", "ahead"])
def test_texts_go_on_where_servers_fail(mode: Mode) -> None:
    fleet = replace(FLEET, mode=mode, devices=12, servers=3, lost=1, sticky=False, seconds=8.0)
    found = simulate(fleet)
    lost = [seconds for at, seconds, _, was_lost in found.pieces if was_lost and at > 6.0]
    # A third of the devices, give or take chance, after the silence that tells them.
    assert 0 < len(lost) < 12
    assert min(lost) > 0.9
    assert found.tokens_per_s(8.5, 10.0) > 0.5 * found.tokens_per_s(2.0, 6.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "devices", "servers"),
    [("sync", 1, 1), ("sync", 6, 1), ("sync", 9, 3), ("sync", 24, 1), ("plain", 24, 1)],
)
def test_it_predicts_real_services_and_sessions(mode: Mode, devices: int, servers: int) -> None:
    """Within 15%, by a clock that skips waiting: the speed of this machine is no part of it."""
    fleet = replace(FLEET, mode=mode, devices=devices, servers=servers, seconds=8.0)
    real, predicted = real_runs.run_skipping(fleet), simulate(fleet)
    time = (2.0, 10.0)
    assert predicted.tokens_per_s(*time) == pytest.approx(real.tokens_per_s(*time), rel=0.15)
    assert predicted.token_s(*time) == pytest.approx(real.token_s(*time), rel=0.15)
    assert predicted.rows(*time) == pytest.approx(real.rows(*time), rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["plain", "sync"])
def test_real_servers_and_devices_write_the_targets_text(mode: Mode) -> None:
    real = real_runs.run(
        TRACES, COSTS, mode=mode, devices=2, servers=2, step_s=0.0, seconds=0.5, rate=0.5
    )
    assert real.found.pieces
    assert real.found.passes
    assert all(0 < rows <= 2 for _, rows in real.found.passes)
    assert min(real.row_s, real.turn_s) > 0.0
