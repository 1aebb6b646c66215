"""Measuring a machine, and finding the measurement again."""

from __future__ import annotations

import json
import os
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import moaspec
import tiny
from caches import new_cache
from moaspec.calibration import measure_costs, round_parts
from moaspec.calibration.choose_layers import layers_options
from moaspec.calibration.measure_costs import calibrate, fingerprint, stored_costs
from moaspec.calibration.round_parts import TimedPart
from moaspec.generation.shaping import shaping_for
from moaspec.model.moa import MoADrafter
from moaspec.target.target import Target
from moaspec_core.policy.cost_model import CostTable
from moaspec_core.policy.policies import AdaptivePolicy


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOASPEC_CACHE", str(new_cache(tmp_path)))
    return tmp_path / "calibration"


def drafter(**sizes: Any) -> MoADrafter:
    ids = torch.arange(0, tiny.VOCAB, 2)
    return tiny.random_drafter(tiny.target(), draft_token_ids=ids, **sizes)


@pytest.mark.slow
@pytest.mark.parametrize("layers", [0, 1])
def test_what_was_measured_is_found_again_and_used(cache: Path, layers: int) -> None:
    module = drafter()
    parts: list[str] = []
    assert stored_costs(tiny.target(), module, num_target_layers=layers) is None
    costs = calibrate(tiny.target(), module, num_target_layers=layers, advance=parts.append)
    assert stored_costs(tiny.target(), module, num_target_layers=layers) == costs
    assert stored_costs(tiny.target(), module, num_target_layers=2) is None
    assert len(list(cache.iterdir())) == 1
    assert costs.plain_s(64) > 0 < costs.root_s
    lines = (*costs.pass_s, costs.step_s, costs.logits_s)
    assert all(list(line) == sorted(line) for line in lines)
    assert len(costs.logits_s) == len(costs.head_s)
    assert len(parts) > 5
    shaping = shaping_for(tiny.target(), module, num_target_layers=layers)
    assert isinstance(shaping.policy(), AdaptivePolicy)
    assert shaping.lags is (layers == 0)
    result = moaspec.generate(
        tiny.target(),
        tiny.PROMPTS[0],
        drafter=module,
        max_new_tokens=tiny.NEW_TOKENS,
        num_target_layers=layers,
    )
    assert tuple(result.token_ids) == tiny.own_texts("llama")[0]


@pytest.mark.slow
def test_every_exit_is_measured_beside_the_others(cache: Path) -> None:
    module = drafter(exits=(2, 0))
    costs = calibrate(tiny.target(), module)
    assert len(list(cache.iterdir())) == 2
    first, other = (one.costs for one in layers_options(tiny.target(), module))
    assert first == costs == stored_costs(tiny.target(), module)
    assert other is not None
    assert other == stored_costs(tiny.target(), module, num_target_layers=0)
    # What the target does is one measurement, and what drafts do another for each exit.
    for name in ("contexts", "pass_s", "head_s", "plain_rest_s"):
        assert getattr(other, name) == getattr(costs, name)
    assert costs.widths == other.widths != ()
    for name in ("root_s", "encode_s"):
        assert getattr(other, name) != getattr(costs, name)


@pytest.mark.slow
def test_one_exit_is_measured_where_it_is_named(cache: Path) -> None:
    module = drafter(exits=(2, 0))
    costs = calibrate(tiny.target(), module, num_target_layers=0)
    assert len(list(cache.iterdir())) == 1
    assert stored_costs(tiny.target(), module, num_target_layers=0) == costs
    assert [one.costs for one in layers_options(tiny.target(), module)] == [None, costs]


def test_a_planted_table_is_not_read(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    calibrate(tiny.target(), quick=True)
    (table,) = cache.iterdir()
    table.chmod(0o666)
    assert stored_costs(tiny.target()) is None


def _values(table: Path, **changes: Any) -> None:
    content = json.loads(table.read_text())
    content["costs"].update(changes)
    table.write_text(json.dumps(content))


def _foreign(table: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    os.chown(table, 12345, 12345)


def _another_directory(table: Path) -> None:
    """What was measured moves away, and what others may write takes its place."""
    away = table.parent.rename(table.parent.with_name("away"))
    table.parent.mkdir()
    table.parent.chmod(0o777)
    table.write_bytes((away / table.name).read_bytes())


def _linked(table: Path) -> None:
    other = table.with_name("other")
    table.rename(other)
    other.chmod(0o666)
    table.symlink_to(other)


def _directory(table: Path) -> None:
    table.unlink()
    table.mkdir()


HARM: dict[str, Callable[[Path], object]] = {
    "another's": _foreign,
    "of a group": lambda table: table.chmod(0o620),
    "a link": _linked,
    "another directory": _another_directory,
    "half": lambda table: os.truncate(table, table.stat().st_size // 2),
    "huge": lambda table: os.truncate(table, 1 << 40),
    "deep": lambda table: table.write_text("[" * 100_000),
    "a directory": _directory,
    "no object": lambda table: table.write_text("[1]"),
    "NaN": lambda table: _values(table, root_s=float("nan")),
    "endless": lambda table: _values(table, pass_s=[[float("inf")] * 10] * 2),
    "below 0": lambda table: _values(table, head_s=[-1.0] * 10),
    "no time": lambda table: _values(table, root_s="x" * 99),
    "huge number": lambda table: _values(table, root_s=10**400),
    "too short": lambda table: _values(table, head_s=[0.1]),
    "no numbers": lambda table: _values(table, tokens=[str(i) for i in range(10)]),
    "huge sizes": lambda table: _values(table, tokens=[10**30 + i for i in range(10)]),
    "unsorted": lambda table: _values(table, tokens=[*range(10, 0, -1)]),
    "contexts": lambda table: _values(table, contexts=[1024, 64]),
    "unknown": lambda table: _values(table, more=1),
}


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("name", HARM)
def test_a_table_that_cannot_be_right_is_not_used(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    path = measure_costs._path(fingerprint(tiny.target()))
    path.parent.mkdir(mode=0o700)
    tokens = measure_costs.TOKENS
    line = [0.1 * n for n in tokens]
    costs = CostTable(
        contexts=(64, 1024),
        tokens=tokens,
        pass_s=(tuple(line),) * 2,
        head_s=tuple(line),
        root_s=0.1,
        widths=(),
        step_s=(),
        encode_s=tuple(line),
    )
    measure_costs._store(costs, fingerprint(tiny.target()))
    assert stored_costs(tiny.target()) == costs
    HARM[name](path)
    assert stored_costs(tiny.target()) is None


@pytest.mark.slow
def test_the_target_alone(cache: Path) -> None:
    costs = calibrate(tiny.target())
    assert costs.widths == ()
    assert costs.draft_s(3, 2, 1) == 0.0
    assert stored_costs(tiny.target()) == costs
    assert cache.exists()


@pytest.mark.slow
@pytest.mark.parametrize("content", ["", "{}", '{"format_version": 1, "costs": {"tokens": [1]}}'])
def test_a_damaged_file_is_as_good_as_none(cache: Path, content: str) -> None:
    calibrate(tiny.target())
    (file,) = cache.iterdir()
    file.write_text(content)
    assert stored_costs(tiny.target()) is None


def test_the_fingerprint_tells_settings_apart() -> None:
    other = tiny.fresh_target("qwen2")
    half = tiny.fresh_target()
    half.model.bfloat16()
    settings = [
        fingerprint(tiny.target()),
        fingerprint(other),
        fingerprint(half),
        fingerprint(tiny.target(), drafter()),
        fingerprint(tiny.target(), drafter(sa_intermediate=24)),
        fingerprint(tiny.target(), drafter(sa_layers=2)),
        fingerprint(tiny.target(), tiny.random_drafter(tiny.target())),
        fingerprint(tiny.target(), drafter(), 1),
    ]
    texts = {json.dumps(data, sort_keys=True) for data in settings}
    assert len(texts) == len(settings)
    assert fingerprint(tiny.target(), drafter(), 0) == fingerprint(tiny.target(), drafter())


class SimulatedClock:
    """A clock that runs on where parts say so; other processes disturb it by chance."""

    def __init__(self) -> None:
        self.now_s, self._draws = 0.0, random.Random(0)

    def part(self, target: Target, seconds: float) -> TimedPart:
        def run() -> None:
            self.now_s += seconds * (4.0 if self._draws.random() < 0.15 else 1.0)

        return TimedPart(run, target.device)


def test_a_quick_measurement_agrees_with_a_thorough_one(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took drafts for free where a pass over one token was disturbed, and lost 15%."""
    clock, of = SimulatedClock(), tiny.target()
    monkeypatch.setattr("time.perf_counter", lambda: clock.now_s)

    def target_pass(_: object, tokens: int, context: int) -> TimedPart:
        return clock.part(of, 0.01 + 0.001 * tokens + 1e-6 * context)

    def head(_: object, tokens: int, *, logits: bool = False) -> TimedPart:
        return clock.part(of, 0.001 * (1 + logits) + 1e-5 * tokens)

    monkeypatch.setattr(round_parts.RoundParts, "target_pass", target_pass)
    monkeypatch.setattr(round_parts.RoundParts, "head", head)
    quick, thorough = (calibrate(of, quick=quick) for quick in (True, False))
    assert cache.exists()
    for name in ("pass_s", "head_s", "logits_s"):
        found, expected = (np.array(getattr(one, name)) for one in (quick, thorough))
        assert found == pytest.approx(expected, rel=0.1)
    one, eight = (quick.verify_s(tokens, 64) for tokens in (1, 8))
    assert eight / one == pytest.approx(0.01914 / 0.01207, rel=0.1)


def test_a_time_that_is_too_long_does_not_make_the_next_ones_free() -> None:
    found = measure_costs._rising([3.0, 1.0, 2.0, 4.0])
    assert found == (2.0, 2.0, 2.0, 4.0)
