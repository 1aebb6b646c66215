"""`moaspec eval --endpoints`: two servers by their own counts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import endpoints
import serving
from commands import Cli
from endpoints import Fields
from moaspec.evaluate.served.server_speculation import Speculation, read_counters, read_speculation

pytestmark = pytest.mark.slow


@pytest.fixture
def urls() -> Iterator[list[str]]:
    """One that drafts, and one that does not."""
    with ExitStack() as opened:
        yield [
            opened.enter_context(serving.serving(serving.source(drafter=drafter))).url
            for drafter in (True, False)
        ]


def test_two_servers(cli: Cli, urls: list[str], tmp_path: Path) -> None:
    options = ("--limit", "4", "--max-new-tokens", "12", "--json", "--out", str(tmp_path / "out"))
    output = cli("eval", "--endpoints", *urls, *options)
    assert output.code == 0, output.err
    found = json.loads(output.out)
    assert found["complete"]
    assert json.loads((tmp_path / "out" / "endpoints.json").read_text()) == found
    *categories, every = found["categories"]
    assert every["category"] == "all"
    assert every["prompts"] == every["same_texts"] == sum(one["prompts"] for one in categories) == 4
    assert every["tau"][0] >= every["tau"][1] == 1.0
    assert every["acceptance"][0] is not None
    assert every["acceptance"][1] is None
    assert every["ratio"] > 0
    assert "--endpoints goes with" in cli("eval", "--endpoints", *urls, "--temperature", "1").err


def test_answers_before_a_server_breaks_off_are_kept(
    cli: Cli, urls: list[str], tmp_path: Path
) -> None:
    asked = count(1)
    whole = {
        "choices": [{"text": "a", "message": {"content": "a"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1},
    }

    def answer(_: Fields) -> tuple[int, Any]:
        return (200, whole) if next(asked) < 3 else (500, {})

    with endpoints.fake(answer) as broken:
        out = ("--limit", "4", "--max-new-tokens", "4", "--out", str(tmp_path / "out"))
        output = cli("eval", "--endpoints", urls[0], broken, *out)
    assert output.code == 1
    found = json.loads((tmp_path / "out" / "endpoints.json").read_text())
    assert not found["complete"]
    assert 0 < len(found["answers"]) < 8
    (tmp_path / "file").touch()
    refused = cli("eval", "--endpoints", *urls, "--limit", "1", "--out", str(tmp_path / "file"))
    assert refused.code == 2


def test_counts_agree(urls: list[str]) -> None:
    """VLLM's names in an answer and in the metrics say what `usage.speculation` says."""
    with serving.Served(urls[0], None).http() as client:  # type: ignore[arg-type]
        before = read_counters(client.get("/metrics").text)
        fields: dict[str, Any] = {"model": serving.MODEL, "prompt": "one two one two one"}
        fields |= {"max_tokens": 24, "temperature": 0, "n": 2}
        answer = client.post("/v1/completions", json=fields).json()
        text = client.get("/metrics").text
    after, own = read_counters(text), answer["metrics"]["speculative_decoding"]
    by_metrics = read_speculation({"metrics": answer["metrics"]})
    assert after - before == by_metrics
    usage = answer["usage"]["speculation"]
    assert own["num_accepted_draft_tokens"] == usage["accepted"] + usage["copied"]
    assert own["num_draft_tokens"] >= usage["drafted"]
    histogram = own["acceptance_histogram"]
    assert sum(histogram) == own["num_spec_steps"] <= usage["rounds"]
    accepted = sum(number * rounds for number, rounds in enumerate(histogram))
    assert accepted == own["num_accepted_draft_tokens"]
    assert own["mean_acceptance_length"] == by_metrics.tau
    assert 'vllm:generation_tokens_total{model_name="tiny"} 48.0' in text
    assert "vllm:num_requests_running" in text


def test_other_servers_counts() -> None:
    assert read_speculation({"timings": {"draft_n": 6, "draft_n_accepted": 2}}) == Speculation(
        drafted=6, accepted=2
    )
    assert read_speculation({"choices": []}) == Speculation()
    page = '# HELP x\nvllm:spec_decode_num_drafts_total{engine="0"} 3.0\n'
    page += 'vllm:spec_decode_num_drafts_total{engine="1"} 1e0\n'
    page += 'le{le="+Inf"} +Inf\nvllm:spec_decode_num_draft_tokens_total NaN\nprose + 1e\n'
    page += "vllm:spec_decode_num_accepted_tokens_total 6\n"
    assert read_counters(page) == Speculation(rounds=4, emitted=10, accepted=6)
