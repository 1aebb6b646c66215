"""What a report comes to: the sentence, its intervals, and the command."""

from __future__ import annotations

import shlex
from typing import Any

import numpy as np
import pytest
import typer

from eval_report.verdict import (
    eval_command,
    median_interval,
    prompt_speedups,
    speedup,
    tau_interval,
    verdict,
)
from moaspec.cli.evaluate import app

SETTINGS = {"model": "tiny", "suite": "bundled", "limit": None, "max_new_tokens": 16}


def method(seconds: list[float], **changes: Any) -> dict[str, Any]:
    """A method of a report: ten tokens a prompt, five of them in a round's drafts."""
    prompts = [
        {
            "suite": "a",
            "question_id": str(i),
            "turn": 0,
            "prompt_tokens": 3,
            "tokens": 10,
            "seconds": [one],
            "rounds": 5,
            "emitted": 10,
            "tau": 2.0,
            "equality": {"kind": "identical"},
        }
        for i, one in enumerate(seconds)
    ]
    known = {"lossless": True, "timed": True, "tau": 2.0, "prompts": prompts}
    return {**known, "median_speedup": float(np.median(1 / np.array(seconds))), **changes}


def report(**methods: dict[str, Any]) -> dict[str, Any]:
    """A report over a baseline that takes a second for each prompt."""
    number = len(next(iter(methods.values()))["prompts"]) if methods else 12
    plain = method([1.0] * number)
    return {
        "baseline": "plain",
        "settings": SETTINGS,
        "methods": {"plain": plain, **methods},
    }


@pytest.mark.parametrize(
    ("seconds", "kind", "begin"),
    [
        (
            [0.5] * 12,
            "faster",
            "Yes: moa is 2.00 times as fast as plain (median of 12 prompts, 95%",
        ),
        ([2.0] * 12, "slower", "No: moa is 0.50 times as fast"),
        ([0.5, 2.0] * 6, "unsure", "Not clearly: moa is 1.25 times as fast"),
        (
            [0.5] * 3,
            "faster",
            "Yes: moa is 2.00 times as fast as plain (median of 3 prompts, too few",
        ),
    ],
)
def test_one_sentence(seconds: list[float], kind: str, begin: str) -> None:
    found = verdict(report(moa=method(seconds)))
    assert found.kind == kind
    assert found.text.startswith(begin)
    assert found.text.endswith("every text is the target's own.")


def test_the_fastest_of_ours_is_named() -> None:
    data = report(hf=method([0.1] * 12), a=method([0.5] * 12), b=method([0.4] * 12))
    assert verdict(data).text.startswith("Yes: b is 2.50 times")


def test_lossy_and_lonely_reports() -> None:
    lossy = method([0.5] * 12, lossless=False, median_speedup=None)
    assert verdict(report(moa=lossy)).kind == "lossy"
    assert "moa" in verdict(report(moa=lossy)).text
    untimed = method([0.5] * 12, timed=False, median_speedup=None)
    assert verdict(report(moa=untimed)).kind == "none"
    assert verdict(report()).kind == "none"


def test_an_interval_of_a_median_is_that_of_resampled_conversations() -> None:
    rng = np.random.default_rng(3)
    values = rng.normal(1.3, 0.2, size=40).tolist()
    found = median_interval(values, range(40))
    draws = rng.choice(values, size=(10_000, 40))
    low, high = np.quantile(np.median(draws, axis=1), [0.025, 0.975])
    assert found.value == pytest.approx(float(np.median(values)))
    assert found.low is not None
    assert found.high is not None
    # Two bootstraps of 10,000 draws agree to about a hundredth here.
    assert found.low == pytest.approx(low, abs=0.02)
    assert found.high == pytest.approx(high, abs=0.02)


def test_turns_of_a_conversation_are_resampled_together() -> None:
    values = [1.0, 2.0] * 10
    alone = median_interval(values, range(20))
    paired = median_interval(values, [i // 2 for i in range(20)])
    assert (paired.low, paired.high) == (1.5, 1.5)
    assert (alone.low, alone.high) != (1.5, 1.5)
    assert median_interval(values[:8], range(8)).low is None


def test_intervals_and_speedups() -> None:
    data = report(moa=method([0.5] * 12))
    found = speedup(data, "moa")
    assert found is not None
    assert (found.value, found.low, found.high) == (2.0, 2.0, 2.0)
    rounds = tau_interval(data["methods"]["moa"])
    assert rounds is not None
    assert rounds.value == 2.0
    assert prompt_speedups(data, "moa") == [2.0] * 12


def test_the_command_is_one_that_the_command_line_takes() -> None:
    data = report(moa=method([0.5] * 12), lookup=method([1.0] * 12, timed=False))
    data["settings"] = {**SETTINGS, "adapter": "the pirate's", "checkpoints": {"eagle": "a b"}}
    text = eval_command(data)
    assert text.startswith("moaspec eval \\\n    --methods plain,moa \\\n")
    words = shlex.split(text.replace("\\\n", ""))
    taken = typer.main.get_command(app).make_context("eval", words[2:]).params
    assert taken["methods"] == "plain,moa"
    assert taken["tau_only"] == "lookup"
    assert taken["adapter"] == "the pirate's"
    assert list(taken["checkpoint"]) == ["eagle=a b"]
    assert taken["max_new_tokens"] == 16
    data["settings"]["generation_config"] = None
    assert "--generation-config none" in eval_command(data)
