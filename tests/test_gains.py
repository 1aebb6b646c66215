"""docs/gains.md and README's table are made of the runs that are kept, and of nothing else."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import chat_tokenizers
import tiny
from moaspec.model.checkpoint.moa_checkpoint import save_drafter

ROOT = Path(__file__).parents[1]
GAINS: dict[str, Any] = runpy.run_path(str(ROOT / "tools/gains.py"))
PUBLISHED = {"docs/compare.md", "docs/start-server.md"}
"""Pages that quote other people's figures, with their source."""


def report(*, lossless: bool = True) -> dict[str, Any]:
    """What `moaspec eval --json` says, as far as a run keeps it."""
    plain = {
        "tokens_per_s": 100.0,
        "tokens_per_s_by_repeat": [100.0, 50.0],
        "lossless": True,
        "num_prompts": 6,
        "tokens": 60,
        "tau": 1.0,
        "ties": 0,
    }
    drafted = plain | {
        "tokens_per_s": 125.0,
        "tokens_per_s_by_repeat": [125.0, 60.0],
        "lossless": lossless,
        "tau": 1.5,
    }
    return {"methods": {"plain": plain, "moa": drafted}}


def run(*loads: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": "a-model",
        "drafter": "a-drafter",
        "suite": "bundled",
        "max_new_tokens": 10,
        "repeats": 2,
        "dtype": "bfloat16",
        "threads": 2,
        "machine": {"processor": "A CPU", "gpu": None},
        "kernels": "avx2",
        "load": 0.1,
        "versions": {"moaspec": "1", "torch": "2"},
        "commit": "abc",
        "changed": False,
        "date": "2026-01-01",
        "loads": list(loads),
    }


def test_a_load_becomes_a_row_whose_figures_agree() -> None:
    load = GAINS["load_of"](4, report())
    assert load["gain_by_repeat"] == [1.25, 1.2]
    *_, row = GAINS["table"]([run(load)]).splitlines()
    assert row == (
        "| `a-model` | A CPU, kernels avx2, bfloat16, 2 threads | 4 | 100 | 125 | 1.25x | 1.50 |"
    )


def test_a_busy_machine_is_told() -> None:
    load = GAINS["load_of"](1, report())
    assert "| A CPU (busy), kernels" in GAINS["table"]([run(load) | {"load": 3.0}])


def test_no_gain_is_claimed_where_a_text_differs() -> None:
    written = run(GAINS["load_of"](1, report(lossless=False)))
    assert "| lossy |" in GAINS["table"]([written])
    assert "1.25x" not in GAINS["whole_page"]([written])


def test_prompts_fill_every_batch() -> None:
    rows = [json.loads(row) for row in GAINS["_rows"]("bundled", 3, 4)]
    assert [row["question_id"] for row in rows] == [0, 1, 2, 3]
    assert rows[0]["turns"] == rows[3]["turns"] != rows[1]["turns"]
    assert len(list(GAINS["_rows"]("bundled", 3, 1))) == 3


def test_a_page_without_the_marks_is_refused(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("# Title\n")
    with pytest.raises(SystemExit, match="no marks"):
        GAINS["write_pages"]([], tmp_path / "gains.md", readme)


@pytest.mark.slow
def test_a_run_is_measured_and_kept(tmp_path: Path) -> None:
    """A model that needs no network: two loads, the table of both, and the same command again."""
    model, drafter = tmp_path / "model", tmp_path / "drafter"
    tiny.model().save_pretrained(model)
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = chat_tokenizers.CHATML
    tokenizer.save_pretrained(model)
    save_drafter(tiny.agreeing_drafter("llama"), drafter)
    suite = tmp_path / "words.jsonl"
    suite.write_text('{"turns": ["w5 w9"]}\n{"turns": ["w2"]}\n')
    command = [sys.executable, str(ROOT / "tools/gains.py"), "measure", "--name", "tiny"]
    command += ["--model", str(model), "--drafter", str(drafter), "--suite", str(suite)]
    command += ["--at-once", "1,3", "--max-new-tokens", "4", "--repeats", "1", "--threads", "1"]
    command += ["--dtype", "float32", "--no-calibrate"]
    command += ["--out", str(tmp_path / "out"), "--keep", str(tmp_path)]
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    kept = json.loads((tmp_path / "tiny.json").read_text("utf-8"))
    assert set(run()) == kept.keys()
    assert (kept["model"], kept["drafter"], kept["suite"]) == ("model", "drafter", "words")
    assert [(load["at_once"], load["prompts"]) for load in kept["loads"]] == [(1, 2), (3, 3)]
    assert str(tmp_path) not in GAINS["whole_page"]([kept])


def test_the_pages_are_current(tmp_path: Path) -> None:
    """Run `make gains` when this fails."""
    readme, page = tmp_path / "README.md", tmp_path / "gains.md"
    readme.write_text((ROOT / "README.md").read_text("utf-8"), "utf-8")
    runs = GAINS["read_runs"]()
    GAINS["write_pages"](runs, page, readme)
    assert page.read_text("utf-8") == (ROOT / "docs/gains.md").read_text("utf-8")
    assert readme.read_text("utf-8") == (ROOT / "README.md").read_text("utf-8")
    assert GAINS["table"](runs) in page.read_text("utf-8")
    assert GAINS["table"](runs) in readme.read_text("utf-8")


def test_a_run_says_how_it_was_made_and_names_no_path() -> None:
    kept = sorted((ROOT / "docs/results").glob("*.json"))
    assert kept
    for path in kept:
        data = json.loads(path.read_text("utf-8"))
        assert set(run()) <= data.keys()
        assert "/" not in data["model"] + data["drafter"]


def test_no_other_page_has_speeds_of_its_own() -> None:
    pages = [f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")]
    for name in sorted({*pages, "README.md"} - PUBLISHED - {"docs/gains.md", "docs/cli.md"}):
        text = GAINS["TABLE"].sub("", (ROOT / name).read_text("utf-8"))
        assert re.findall(r"\d\.\d\d+x\b|\d tokens/s", text) == [], name
