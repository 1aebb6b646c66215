"""The command `moaspec vllm-check`, as far as it needs no vLLM."""

from __future__ import annotations

from typing import Any

import pytest

from commands import Cli
from moaspec_vllm.cli.vllm_check import _report


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--requests", "1,two"), "numbers from 1 on"),
        (("--requests", "0"), "numbers from 1 on"),
        (("--engine", "{"), "no JSON"),
        (("--engine", "[]"), "takes an object"),
    ],
)
def test_bad_options_are_refused_before_anything_loads(
    cli: Cli, options: tuple[str, ...], reason: str
) -> None:
    done = cli("vllm-check", *options)
    assert done.code == 2
    assert reason in done.err


def answer(texts: list[list[int]], step_ms: float, tokens: float) -> dict[str, Any]:
    steps = [{"requests": 8, "step_ms": step_ms, "tokens_per_step": tokens, "steps": 64}]
    return {"texts": texts, "steps": steps, "engine": {"dtype": "bfloat16"}}


def test_the_report_says_where_texts_part_and_what_drafts_gain() -> None:
    plain = answer([[1, 2, 3], [4, 5, 6]], 10.0, 1.0)
    drafted = answer([[1, 2, 3], [4, 7, 6]], 16.0, 2.4)
    report = _report("d", "t", "0.32.0", {"plain": plain, "drafted": drafted})
    assert report["texts"] == {"compared": 2, "equal": 1, "parted_at": [1]}
    (steps,) = report["steps"]
    assert steps == {
        "requests": 8,
        "plain_ms": 10.0,
        "drafted_ms": 16.0,
        "tau": 2.4,
        "speed_up": 1.5,
    }
    assert report["versions"]["vllm"] == "0.32.0"
