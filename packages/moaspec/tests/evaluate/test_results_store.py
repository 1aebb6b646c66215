"""Killed and resumed: finished prompts are not measured again."""

from __future__ import annotations

import errno
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import tiny
from moaspec.evaluate.correctness.equality import Equality
from moaspec.evaluate.method_names import MethodResources, parse_methods
from moaspec.evaluate.methods import Method, MethodRun
from moaspec.evaluate.prompt_suites import Prompt
from moaspec.evaluate.report.report import Report
from moaspec.evaluate.results_store import RUNS, PromptTurn, ResultsStore, Sample
from moaspec.evaluate.results_store import SETTINGS as SETTINGS_FILE
from moaspec.evaluate.runner import EvalSettings, measure
from moaspec_core.errors import InputError

PROMPTS = [Prompt("suite", str(i), (str(i), "7 8")) for i in range(3)]
SETTINGS = EvalSettings(max_new_tokens=5, repeats=2)


def encode(turns: Sequence[str], answers: Sequence[Sequence[int]]) -> list[int]:
    words = [int(word) for turn in turns for word in turn.split()]
    return [*words, *(token for answer in answers for token in answer)]


def measured(directory: Path | None, prompts: Sequence[Prompt] = PROMPTS) -> Report:
    parts = MethodResources(
        target=tiny.target(), checkpoints={"moa": tiny.agreeing_drafter("llama")}
    )
    return measure(
        parse_methods(["plain", "hf", "moa@chain:2"], parts),
        prompts,
        encode,
        SETTINGS,
        tau_only=parse_methods(["lookup"], parts),
        store=ResultsStore(directory, {"threads": 1}),
    )


@pytest.fixture
def decodings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of methods in the order in which they decode more than a warm-up."""
    right, names = Method.run_many, []

    def counted(
        self: Method, prompts: list[list[int]], max_new_tokens: int, *rest: Any
    ) -> list[MethodRun]:
        if max_new_tokens == SETTINGS.max_new_tokens:
            names.extend([self.name] * len(prompts))
        return right(self, prompts, max_new_tokens, *rest)

    monkeypatch.setattr(Method, "run_many", counted)
    return names


@pytest.mark.slow
def test_what_is_done_is_not_done_again(tmp_path: Path, decodings: list[str]) -> None:
    first = measured(tmp_path).as_json()
    assert len(decodings) == 6 * (3 * SETTINGS.repeats + 1)
    decodings.clear()
    assert measured(tmp_path).as_json() == first
    assert decodings == []


@pytest.mark.slow
def test_a_killed_run_goes_on(tmp_path: Path, decodings: list[str]) -> None:
    whole = measured(None)
    measured(tmp_path, PROMPTS[:1])
    path = tmp_path / RUNS
    path.write_text(path.read_text() + '{"key": ["pla')
    decodings.clear()
    resumed = measured(tmp_path)
    assert decodings.count("plain") == decodings.count("hf") == 4 * SETTINGS.repeats
    assert [o.tau for o in resumed.outcomes] == [o.tau for o in whole.outcomes]
    assert all(json.loads(line) for line in path.read_text().splitlines())


@pytest.mark.slow
def test_a_changed_prompt_is_measured_anew(tmp_path: Path, decodings: list[str]) -> None:
    measured(tmp_path)
    decodings.clear()
    measured(tmp_path, [Prompt("suite", "0", ("9",)), *PROMPTS[1:]])
    assert decodings.count("plain") == SETTINGS.repeats


@pytest.mark.slow
def test_a_method_may_join_later(tmp_path: Path, decodings: list[str]) -> None:
    measured(tmp_path)
    decodings.clear()
    methods = parse_methods(["plain", "lookup@chain:3"], MethodResources(target=tiny.target()))
    store = ResultsStore(tmp_path, {"threads": 1})
    report = measure(methods, PROMPTS, encode, SETTINGS, store=store)
    assert set(decodings) == {"lookup@chain:3"}
    assert report.lossless


def test_another_drafter_is_measured_anew(tmp_path: Path, decodings: list[str]) -> None:
    for seed in (1, 1, 2):
        parts = MethodResources(
            target=tiny.target(),
            checkpoints={"moa": tiny.random_drafter(tiny.target(), seed=seed)},
        )
        measure(
            parse_methods(["plain", "moa"], parts),
            PROMPTS[:1],
            encode,
            EvalSettings(max_new_tokens=SETTINGS.max_new_tokens),
            store=ResultsStore(tmp_path, {}),
        )
    assert decodings.count("moa") == 2 * 2
    assert decodings.count("plain") == 2


def test_two_at_once_are_refused(tmp_path: Path) -> None:
    first = ResultsStore(tmp_path)
    with pytest.raises(InputError, match="Another process"):
        ResultsStore(tmp_path)
    del first
    ResultsStore(tmp_path)


@pytest.mark.parametrize(
    "change",
    [{"runs": 3}, {"runs": []}, {"key": 3}, {"runs": [{}]}, {"equality": {"sort": "identical"}}],
)
def test_lines_that_are_no_samples_are_named(change: dict[str, object], tmp_path: Path) -> None:
    measured(tmp_path, PROMPTS[:1])
    path = tmp_path / RUNS
    lines = path.read_text().splitlines()
    lines[1] = json.dumps({**json.loads(lines[1]), **change})
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(InputError, match="line 2 is no sample"):
        ResultsStore(tmp_path, {"threads": 1})


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(InputError, match=r"runs\.jsonl: No space left"):
        measured(tmp_path, PROMPTS[:1])


def test_other_settings_are_refused(tmp_path: Path) -> None:
    ResultsStore(tmp_path, {"threads": 1, "dtype": "float32"})
    with pytest.raises(InputError, match="threads was 1 and is 2"):
        ResultsStore(tmp_path, {"threads": 2, "dtype": "float32"})


@pytest.mark.parametrize("name", [RUNS, SETTINGS_FILE])
@pytest.mark.parametrize(
    "content",
    [b"{}x\n", b"[]\n", b"\xff\n", b"{\n", b"1\n", b"[" * 99_999 + b"\n"],
    ids=lambda one: repr(one[:5]),
)
def test_a_damaged_file_is_refused(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=f"{name} is damaged"):
        ResultsStore(tmp_path, {})
    assert (tmp_path / name).read_bytes() == content


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="--out"):
        ResultsStore(tmp_path / "file" / "below", {})


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    item = PromptTurn(PROMPTS[0], 1, (1, 2, 3))
    run = parse_methods(["lookup@chain:3"], MethodResources(target=tiny.target()))[0].run(
        item.prompt_ids, 6
    )
    sample = Sample(item, (run, run), Equality("near_tie", 3, 0.25), 4)
    ResultsStore(tmp_path, {}).put("lookup@chain:3", sample)
    again = ResultsStore(tmp_path, {})
    assert again.get("lookup@chain:3", item, 4) == sample
    assert again.get("lookup@chain:3", item, 1) is None
    assert again.get("lookup@chain:3", PromptTurn(PROMPTS[0], 1, (1, 2, 4)), 4) is None
