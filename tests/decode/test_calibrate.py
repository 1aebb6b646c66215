"""Measuring a machine, and finding the measurement again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import moaspec
import tiny
from moaspec.decode import CostShape, calibrate, shaping_for, stored_costs
from moaspec.decode.calibrate import fingerprint
from moaspec.model import MoADrafter


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOASPEC_CACHE", str(tmp_path))
    return tmp_path / "calibration"


def drafter(**sizes: int) -> MoADrafter:
    ids = torch.arange(0, tiny.VOCAB, 2)
    return tiny.random_drafter(tiny.target(), draft_token_ids=ids, **sizes)


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
    assert all(list(line) == sorted(line) for line in (*costs.pass_s, costs.step_s))
    assert len(parts) > 5
    shaping = shaping_for(tiny.target(), module, num_target_layers=layers)
    assert isinstance(shaping.policy(), CostShape)
    assert shaping.lags is (layers == 0)
    result = moaspec.generate(
        tiny.target(),
        tiny.PROMPTS[0],
        drafter=module,
        max_new_tokens=tiny.NEW_TOKENS,
        num_target_layers=layers,
    )
    assert tuple(result.token_ids) == tiny.own_texts("llama")[0]


def test_the_target_alone(cache: Path) -> None:
    costs = calibrate(tiny.target())
    assert costs.widths == ()
    assert costs.draft_s(3, 2, 1) == 0.0
    assert stored_costs(tiny.target()) == costs
    assert cache.exists()


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
        fingerprint(tiny.target(), tiny.random_drafter(tiny.target())),
        fingerprint(tiny.target(), drafter(), 1),
    ]
    texts = {json.dumps(facts, sort_keys=True) for facts in settings}
    assert len(texts) == len(settings)
    assert fingerprint(tiny.target(), drafter(), 0) == fingerprint(tiny.target(), drafter())
