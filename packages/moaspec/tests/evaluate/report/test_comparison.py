"""Two reports, and how sure one can be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moaspec.evaluate.report.comparison import (
    METHOD_KEYS,
    REPORT_KEYS,
    compare_reports,
    interval,
    read_report,
)
from moaspec_core.errors import DataError

PLACE = {
    "target": "t",
    "dtype": "float32",
    "device": "cpu",
    "threads": 1,
    "machine": {"cores": 2},
    "batch": 1,
    "settings": {"max_new_tokens": 64, "system": "default"},
}


def report(seconds: list[float], rounds: list[int], **changes: Any) -> dict[str, Any]:
    prompts = [
        {
            "suite": "s",
            "question_id": str(i),
            "turn": 0,
            "tokens": 11,
            "emitted": 10,
            "rounds": number,
            "seconds": [s, s, 100.0],
        }
        for i, (s, number) in enumerate(zip(seconds, rounds, strict=True))
    ]
    return PLACE | {"methods": {"moa": {"lossless": True, "prompts": prompts}}} | changes


def test_a_report_against_itself() -> None:
    same = report([1.0, 2.0, 3.0] * 4, [5, 6, 7] * 4)
    (change,) = compare_reports(same, same).changes
    assert change.tau is not None
    assert change.speed is not None
    assert (change.tau.low, change.tau.value, change.tau.high) == (0, 0, 0)
    assert (change.speed.low, change.speed.value, change.speed.high) == (1, 1, 1)
    assert change.tau_before == change.tau_after == 30 / 18


def test_twice_as_fast_with_half_the_rounds() -> None:
    """The slow repeat is not the median. Every prompt gains alike, so the speed is certain."""
    before = report([2.0, 4.0, 6.0] * 4, [10, 4, 10] * 4)
    after = report([1.0, 2.0, 3.0] * 4, [5, 2, 5] * 4)
    (change,) = compare_reports(before, after).changes
    assert change.speed is not None
    assert change.tau is not None
    assert change.speed.low == pytest.approx(2)
    assert change.speed.high == pytest.approx(2)
    assert change.tau.value == pytest.approx(30 / 12 - 30 / 24)
    assert change.tau.low is not None
    assert change.tau.high is not None
    assert change.tau.low < change.tau.value < change.tau.high


def test_few_conversations_have_no_interval() -> None:
    """Nine; or twenty turns of one, which depend on one another."""
    nine = report([1.0] * 9, [5] * 9)
    turns = report([1.0] * 20, [5] * 20)
    for number, prompt in enumerate(turns["methods"]["moa"]["prompts"]):
        prompt.update(question_id="0", turn=number)
    for one in (nine, turns):
        (change,) = compare_reports(one, one).changes
        for found in (change.tau, change.speed):
            assert found is not None
            assert found.low is found.high is None


def test_only_common_prompts_count() -> None:
    before, after = report([1.0, 1.0, 9.0], [5, 5, 9]), report([1.0, 1.0], [5, 5])
    (change,) = compare_reports(before, after).changes
    assert (change.prompts, change.tau_before) == (2, 2.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"threads": 2},
        {"machine": {"cores": 4}},
        {"settings": {"max_new_tokens": 8, "system": "default"}},
        {"settings": {"max_new_tokens": 64, "system": "none"}},
        {"methods": {"moa": {**report([1.0], [5])["methods"]["moa"], "lossless": False}}},
    ],
)
def test_speeds_that_cannot_be_compared_are_not(changes: dict[str, Any]) -> None:
    found = compare_reports(report([1.0], [5]), report([1.0], [5], **changes))
    assert found.changes[0].speed is None
    assert found.changes[0].tau is not None
    assert found.differs or found.lossy == ["moa"]


def test_methods_that_were_not_timed() -> None:
    before = report([1.0], [5])
    before["methods"]["moa"]["prompts"][0]["seconds"] = None
    assert compare_reports(before, report([1.0], [5])).changes[0].speed is None


def test_nothing_in_common() -> None:
    with pytest.raises(DataError, match="no method"):
        compare_reports(report([1.0], [5]), report([1.0], [5], methods={"plain": {}}))
    with pytest.raises(DataError, match="no prompt"):
        compare_reports(report([1.0], [5]), report([], []))


def test_the_interval_is_that_of_the_normal_law() -> None:
    """The mean of 400 standard normal values: 95% within 1.96 / 20.

    15%: quantiles of 10,000 resamples are good to a few percent, and so is the spread of one sample
    of 400.
    """
    values = np.random.default_rng(1).standard_normal(400)
    rows = np.stack((values, np.ones(400)), axis=1)
    found = interval(rows, range(400), lambda sums: sums[..., 0] / sums[..., 1])
    assert found.value == pytest.approx(values.mean())
    assert found.high is not None
    assert found.low is not None
    assert found.high - found.low == pytest.approx(2 * 1.96 / 20, rel=0.15)


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"methods": []}', '{"methods": {"plain": {}}}', '{"methods": {}}']
)
def test_files_that_are_no_report(text: str, tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(text)
    with pytest.raises(DataError, match=r"report\.json"):
        read_report(tmp_path)


def test_reading_a_file_or_its_directory(tmp_path: Path) -> None:
    whole = dict.fromkeys(REPORT_KEYS, 0) | {"methods": {"moa": dict.fromkeys(METHOD_KEYS, 0)}}
    (tmp_path / "report.json").write_text(json.dumps(whole))
    assert read_report(tmp_path) == read_report(tmp_path / "report.json")
