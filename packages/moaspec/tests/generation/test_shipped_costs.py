"""Costs that ship, and when measured ones take their place."""

from __future__ import annotations

import dataclasses
import json
from importlib.resources import files
from itertools import pairwise
from typing import Any

import pytest

import tiny
from costs import know, rated, table
from moaspec.calibration import assumed_costs, first_use, measure_costs
from moaspec.calibration.assumed_costs import MachineCosts
from moaspec.generation import shaping
from moaspec.generation.shaping import renewed_shaping, shaping_for
from moaspec_core.policy.cost_model import CostTable
from moaspec_core.policy.observed_times import ObservedTimes


@pytest.fixture
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if kernels computed the tiny target."""
    monkeypatch.setattr(shaping, "same_bits", lambda _: True)


def test_every_set_of_kernels_has_costs_that_rise() -> None:
    text = files("moaspec.calibration").joinpath(assumed_costs.FILE).read_text()
    shipped = json.loads(text)
    assert {"amx", "avx512", "avx2", "off", "cuda"} == {name.partition(" ")[0] for name in shipped}
    for costs in (part for data in shipped.values() for part in _parts(MachineCosts(**data))):
        assert costs.tokens[0] == 1
        assert costs.extra_s[0] == 0
        assert len(costs.extra_s) == len(costs.tokens)
        seconds = costs.pass_s(10**9, 10**9)
        assert all(low < high for low, high in pairwise(seconds))
        # A larger model takes longer, in proportion.
        assert costs.pass_s(2 * 10**9, 2 * 10**9) == pytest.approx([2 * one for one in seconds])


def _parts(costs: MachineCosts) -> tuple[MachineCosts, MachineCosts]:
    return costs, costs.of_encoder()


def test_a_known_class_of_cpus_has_costs_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """There the encoding of a prompt costs more beside a pass than elsewhere."""
    monkeypatch.setattr(assumed_costs, "same_bits", lambda _: True)
    monkeypatch.setattr(assumed_costs, "instructions", lambda: "avx2")
    target, module = tiny.target(), tiny.agreeing_drafter("llama")
    found = {}
    for vendor in ("AuthenticAMD", "GenuineIntel", "another", ""):
        monkeypatch.setattr(assumed_costs, "_vendor", lambda vendor=vendor: vendor)
        found[vendor] = assumed_costs.assumed_costs(target, module, 0)
    assert found["GenuineIntel"] == found["another"] == found[""] != found["AuthenticAMD"]
    known, other = found["AuthenticAMD"], found[""]
    assert known.accept_s(32) / known.plain_s(1) > other.accept_s(32) / other.plain_s(1)


@pytest.mark.usefixtures("by_kernels")
def test_nobody_waits_where_the_clock_may_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine too: there few or no drafts were made for a server's whole life."""
    monkeypatch.setattr(shaping, "measure_once", lambda *_, **__: pytest.fail("it measures"))
    target, module = tiny.target(), tiny.agreeing_drafter("llama")
    found = shaping_for(target, module)
    assert found.costs == assumed_costs.assumed_costs(target, module, 0)
    assert found.times is not None
    assert shaping_for(target, module).times is found.times  # later calls know what was seen
    know(monkeypatch, {0: table()})
    other = shaping_for(target, module)
    assert other.costs == table()
    assert other.times is not found.times


def test_elsewhere_the_clock_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    know(monkeypatch, {0: table()})
    assert shaping_for(tiny.target(), tiny.agreeing_drafter("llama")).times is None


def _renewed(
    monkeypatch: pytest.MonkeyPatch, stored: CostTable | None, *, fits: bool = True, **options: Any
) -> tuple[bool, bool]:
    """Whether an idle process measures, and whether its settings change."""
    target, module = tiny.target(), tiny.agreeing_drafter("llama")
    know(monkeypatch, {} if stored is None else {0: stored})
    known = {"costs": stored}
    measured = list[object]()

    def calibrate(*_: Any, stopped: Any, **__: Any) -> None:
        measured.append(None)
        stopped()
        known["costs"] = table(root_s=0.5)
        know(monkeypatch, {0: table(root_s=0.5)})

    monkeypatch.setattr(measure_costs, "calibrate", calibrate)
    monkeypatch.setattr(measure_costs, "stored_costs", lambda *_, **__: known["costs"])
    monkeypatch.setattr(first_use, "_why_not", lambda *_: options.get("why_not"))
    monkeypatch.setattr(ObservedTimes, "fits", fits)
    before = shaping_for(target, module)
    found = renewed_shaping(target, module, before, lambda: bool(options.get("stopped")))
    return bool(measured), found is not None and found.costs == table(root_s=0.5)


@pytest.mark.usefixtures("by_kernels")
def test_an_idle_process_measures_where_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = dataclasses.replace(table(), busy=True)
    assert _renewed(monkeypatch, None) == (True, True)
    assert _renewed(monkeypatch, busy) == (True, True)
    assert _renewed(monkeypatch, table(), fits=False) == (True, True)
    assert _renewed(monkeypatch, table()) == (False, False)
    assert _renewed(monkeypatch, None, why_not="other processes use the CPU") == (False, False)


def test_an_idle_process_chooses_the_exit_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Among all that it has measured then, unless N is given."""
    target = tiny.target()
    module = rated(target, 0.1, 0.9)
    know(monkeypatch, {0: table()})
    before = shaping_for(target, module)
    assert before.num_target_layers == 0
    asked = list[int | None]()

    def calibrate(*_: Any, num_target_layers: int | None, **__: Any) -> None:
        asked.append(num_target_layers)
        know(monkeypatch, {0: table(root_s=0.5), 2: table()})

    monkeypatch.setattr(measure_costs, "calibrate", calibrate)
    monkeypatch.setattr(measure_costs, "stored_costs", lambda *_, **__: None)
    monkeypatch.setattr(first_use, "_why_not", lambda *_: None)
    found = renewed_shaping(target, module, before, lambda: False)
    assert found is not None
    assert (found.num_target_layers, found.costs) == (2, table())
    fixed = renewed_shaping(target, module, before, lambda: False, num_target_layers=0)
    assert fixed is not None
    assert (fixed.num_target_layers, fixed.costs) == (0, table(root_s=0.5))
    assert asked == [None, 0]


@pytest.mark.usefixtures("by_kernels")
def test_a_request_ends_a_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _renewed(monkeypatch, None, stopped=True) == (True, False)


def test_a_fixed_shape_is_never_measured_for() -> None:
    target, module = tiny.target(), tiny.agreeing_drafter("llama")
    fixed = shaping_for(target, module, tree="chain:3")
    assert renewed_shaping(target, module, fixed, lambda: False) is None
