"""The command `moaspec vllm-check`, as far as it needs no vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from commands import Cli
from moaspec.generation.drafters import find_drafter
from moaspec.model.checkpoint.moa_config import recorded_config
from moaspec_core.checkpoint.directory import read_config
from moaspec_vllm.cli.vllm_check import _Failure, _holds, _recorded_tau, _report


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--requests", "1,two"), "numbers from 1 on"),
        (("--requests", "0"), "numbers from 1 on"),
        (("--engine", "{"), "no JSON"),
        (("--engine", "[]"), "takes an object"),
        (("--engine", '{"dtype": "float32"}'), "cannot set dtype"),
        (("--engine", '{"speculative_config": {}}'), "cannot set speculative_config"),
        (("--engine", '{"max_num_seqs": 8}'), "asks for 64 in a step"),
        (("--model", ""), "--model is empty"),
        (("no-such-drafter",), "no-such-drafter"),
    ],
)
def test_bad_options_are_refused_before_anything_loads(
    cli: Cli, options: tuple[str, ...], reason: str
) -> None:
    done = cli("vllm-check", *options)
    assert done.code == 2
    assert reason in done.err


def answer(
    texts: list[list[int]], step_ms: float, tokens: float | None, **engine: Any
) -> dict[str, Any]:
    steps = [
        {"requests": 8, "step_ms": step_ms, "tokens_per_step": tokens, "steps": 64},
        {"requests": 64, "step_ms": None, "tokens_per_step": None, "steps": 0},
    ]
    facts = {"dtype": "bfloat16", "failures": 0, "drafts at the end": True}
    return {"texts": texts, "steps": steps, "engine": facts | engine}


PLAIN = answer([[1, 2, 3], [4, 5, 6]], 10.0, 1.0)
DRAFTED = answer([[1, 2, 3], [4, 7, 6]], 16.0, 2.4)


def test_the_report_says_where_texts_part_and_what_drafts_gain() -> None:
    report = _report({"plain": PLAIN, "drafted": DRAFTED})
    assert report["texts"] == {"compared": 2, "equal": 1, "parted_at": [1]}
    assert report["steps"] == [
        {"requests": 8, "plain_ms": 10.0, "drafted_ms": 16.0, "tau": 2.4, "speed_up": 1.5},
        # The cache has no room for so many.
        {"requests": 64, "plain_ms": None, "drafted_ms": None, "tau": None, "speed_up": None},
    ]


def test_an_engine_that_ends_loses_no_findings(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("starting\n" * 1000 + "illegal access")
    report = _report({"plain": PLAIN, "drafted": _Failure("drafted", -11, log)})
    assert report["plain_engine"]["dtype"] == "bfloat16"
    assert report["steps"][0] == {"requests": 8, "plain_ms": 10.0}
    assert report["failed"]["engine"] == "drafted"
    assert report["failed"]["code"] == -11
    assert report["failed"]["last_lines"].endswith("illegal access")
    assert "engine" not in report


@pytest.mark.parametrize(
    ("texts", "engine", "holds"),
    [
        (PLAIN["texts"], {"dtype": "float32"}, True),
        (DRAFTED["texts"], {}, True),  # a near tie
        (DRAFTED["texts"], {"dtype": "float32"}, False),
        (PLAIN["texts"], {"failures": 1}, False),
        (PLAIN["texts"], {"drafts at the end": False}, False),
    ],
)
def test_a_drafter_that_failed_does_not_pass(
    texts: list[list[int]], engine: dict[str, Any], holds: bool
) -> None:
    drafted = answer(texts, 16.0, 2.4, **engine)
    assert _holds(_report({"plain": PLAIN, "drafted": drafted})) is holds


def test_the_recorded_tau_is_that_of_a_chain() -> None:
    config = read_config(find_drafter("smollm2-135m"))
    ((rate, *_),) = recorded_config(config).acceptance
    assert _recorded_tau(config, 2) == pytest.approx(1 + rate + rate**2, abs=0.01)
    assert _recorded_tau({}, 2) is None
