"""What is drafted on a machine that was not measured."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

import moaspec
import tiny
from moaspec.calibration import first_use
from moaspec.calibration.assumed_costs import SURE, assumed_costs, num_weights, sure_costs
from moaspec.calibration.first_use import measure_once
from moaspec.calibration.measure_costs import calibrate, stored_costs
from moaspec.calibration.round_parts import TimedPart
from moaspec.generation.shaping import shaping_for
from moaspec.target.target import Target
from moaspec.target.thread_limiter import ThreadLimiter
from moaspec_core.policy.cost_model import CostTable, best_chain


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Target:
    """A target whose machine may be measured."""
    monkeypatch.setenv("MOASPEC_CACHE", str(tmp_path))
    monkeypatch.delenv(first_use.SWITCH)
    monkeypatch.setattr(first_use, "MIN_WEIGHTS", 0)
    for limit in ("MAX_EXPECTED_S", "TIME_LIMIT_S"):  # however slow this machine is
        monkeypatch.setattr(first_use, limit, 1e6)
    target = tiny.fresh_target()
    target.threads = ThreadLimiter()
    monkeypatch.setattr(type(target.threads), "limit", 1024)
    return target


@pytest.mark.slow
def test_the_first_use_measures_and_later_ones_do_not(asked: Target) -> None:
    module, parts = tiny.agreeing_drafter("llama"), list[str]()
    assert measure_once(asked, module, advance=parts.append)[1] is None
    assert len(parts) > 1
    assert stored_costs(asked, module) is not None
    assert measure_once(asked, module, advance=lambda _: pytest.fail("measured again"))[1] is None


@pytest.mark.slow
def test_a_measurement_on_a_busy_machine_is_made_again_when_it_is_free(
    asked: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It decides until then, and replaces none that was made on a free machine."""
    module, threads = tiny.agreeing_drafter("llama"), type(asked.threads)
    monkeypatch.setattr(threads, "crowded", True)
    assert calibrate(asked, module, quick=True).busy
    options, why_not = measure_once(asked, module)
    assert options[0].costs is not None
    assert options[0].costs.busy
    assert "other processes" in str(why_not)
    monkeypatch.setattr(threads, "crowded", False)
    options, why_not = measure_once(asked, module)
    free = options[0].costs
    assert free is not None
    assert not free.busy
    assert why_not is None
    monkeypatch.setattr(threads, "crowded", True)
    assert calibrate(asked, module, quick=True).busy
    assert stored_costs(asked, module) == free


def test_a_moment_of_other_work_does_not_make_a_measurement_doubtful(
    asked: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    crowded = iter([True, *[False] * 100])
    monkeypatch.setattr(type(asked.threads), "crowded", property(lambda _: next(crowded)))
    assert not calibrate(asked, quick=True).busy


@pytest.mark.slow
def test_stored_costs_are_read_once(asked: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    module, reads = tiny.agreeing_drafter("llama"), list[object]()
    calibrate(asked, module, quick=True)

    def counted(*given: Any, **named: Any) -> CostTable | None:
        reads.append(given)
        return stored_costs(*given, **named)

    for place in ("choose_layers", "measure_costs"):
        monkeypatch.setattr(f"moaspec.calibration.{place}.stored_costs", counted)
    shaping_for(asked, module)
    assert len(reads) == 1


@pytest.mark.slow
def test_python_measures_as_commands_do(asked: Target) -> None:
    module = tiny.agreeing_drafter("llama")
    text = moaspec.generate(asked, tiny.PROMPTS[0], drafter=module, max_new_tokens=4)
    assert tuple(text.token_ids) == tiny.own_texts("llama")[0][:4]
    assert stored_costs(asked, module) is not None


@pytest.mark.slow
def test_a_disturbed_pass_does_not_keep_a_machine_from_being_measured(
    asked: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    time, counted = TimedPart.time, list[TimedPart]()

    def disturbed(part: TimedPart, *, counts: bool = True) -> None:
        time(part, counts=counts)
        if counts and not counted:
            part.seconds[-1] = 1e9
            counted.append(part)

    monkeypatch.setattr(TimedPart, "time", disturbed)
    assert measure_once(asked, tiny.agreeing_drafter("llama"))[1] is None


def test_why_a_machine_is_not_measured(asked: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tiny.agreeing_drafter("llama")
    reasons = []
    for change in (
        lambda: monkeypatch.setattr(first_use, "MAX_EXPECTED_S", 0.0),
        lambda: monkeypatch.setattr(type(asked.threads), "limit", 0),
        lambda: monkeypatch.setattr(first_use, "why_not_writable", lambda _: "it is read-only"),
        lambda: monkeypatch.setattr(first_use, "MIN_WEIGHTS", num_weights(asked) + 1),
        lambda: monkeypatch.setenv(first_use.SWITCH, "off"),
    ):
        change()
        reasons.append(measure_once(asked, module)[1])
        assert stored_costs(asked, module) is None
    words = ("takes about", "other processes", "read-only", "too small", "is off")
    assert all(word in str(reason) for word, reason in zip(words, reasons, strict=True))


@pytest.mark.slow
def test_a_full_disk_is_told(
    asked: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended the command without an answer."""

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    options, why_not = measure_once(asked, tiny.agreeing_drafter("llama"))
    assert options[0].costs is None
    assert why_not == "its costs cannot be stored (No space left on device)"
    assert not list((tmp_path / "calibration").iterdir())


def test_a_measurement_that_takes_too_long_is_given_up(
    asked: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tiny.agreeing_drafter("llama")
    monkeypatch.setattr(first_use, "TIME_LIMIT_S", 0.0)
    assert measure_once(asked, module)[1] == "other processes use the CPU"
    assert stored_costs(asked, module) is None


def test_whether_the_machine_is_busy_is_read_after_passes(
    asked: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last reading may be as old as the loading of the weights."""

    def timed(_: Target) -> float:
        monkeypatch.setattr(type(asked.threads), "limit", 0)
        return 1e-9

    monkeypatch.setattr(first_use, "_token_pass_s", timed)
    assert "other processes" in str(measure_once(asked, tiny.agreeing_drafter("llama")))


def test_a_target_that_takes_too_long_is_timed_once(
    asked: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, timed = tiny.agreeing_drafter("llama"), list[Target]()

    def slow(target: Target) -> float:
        timed.append(target)
        return 1.0

    monkeypatch.setattr(first_use, "MAX_EXPECTED_S", 15.0)
    monkeypatch.setattr(first_use, "_token_pass_s", slow)
    for _ in range(2):
        assert "takes about" in str(measure_once(asked, module)[1])
    assert timed == [asked]


def test_unmeasured_only_what_is_sure_to_pay_is_drafted() -> None:
    """A drafter as large as its target is not."""
    target, module = tiny.target(), tiny.agreeing_drafter("llama")
    assert sure_costs(target, module, 0, [[0.9]]) is None
    shaping = shaping_for(target, module)
    assert shaping.policy() is None
    assert shaping.branches() is None
    result = moaspec.generate(target, tiny.PROMPTS[0], drafter=module, max_new_tokens=8)
    assert tuple(result.token_ids) == tiny.own_texts("llama")[0][:8]
    assert result.tau == 1.0


def test_a_small_drafter_that_is_right_is_sure_to_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    target, module = tiny.target(), tiny.agreeing_drafter("llama")
    monkeypatch.setattr("moaspec.calibration.assumed_costs.num_weights", lambda _: 10**9)
    costs = sure_costs(target, module, 0, [[0.9]])
    assert costs == assumed_costs(target, module, 0)
    assert costs is not None
    assert best_chain(costs, [[0.9]])[1] >= SURE
    assert sure_costs(target, module, 0, [[0.05]]) is None
