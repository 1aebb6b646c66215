"""lm-eval's scored tasks against `moaspec serve`, beside its own backend of transformers.

Skipped without the package lm-eval.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import serving

lm_eval = pytest.importorskip("lm_eval", reason="the package lm-eval is not installed")

pytestmark = pytest.mark.slow

ROWS: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "choices": (
        "output_type: multiple_choice\ndoc_to_text: '{{q}}'\ndoc_to_choice: '{{c}}'\n"
        "doc_to_target: '{{a}}'\n",
        [
            {"q": "The capital of France is", "c": ["Paris", "London", "Rome"], "a": 0},
            {"q": "Two plus two is", "c": ["five", "four", "nine"], "a": 1},
            {"q": "A dog is an", "c": ["engine", "animal", "ocean"], "a": 1},
        ],
    ),
    "last_word": (
        "output_type: loglikelihood\ndoc_to_text: '{{q}}'\ndoc_to_target: ' {{a}}'\n",
        [{"q": "Once upon a", "a": "time"}, {"q": "Bread and", "a": "butter"}],
    ),
    "rolling": (
        "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{a}}'\n",
        [{"a": "A small model drafts the text of a large one."}],
    ),
}


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three small tasks of data on the disk."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    folder = tmp_path / "tasks"
    folder.mkdir()
    for name, (text, rows) in ROWS.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        head = f"task: {name}\ndataset_path: json\ntest_split: test\n"
        head += f"dataset_kwargs:\n  data_files: {{test: {data}}}\n"
        (folder / f"{name}.yaml").write_text(head + text)
    return folder


def numbers(model: str, arguments: str, tasks: Path) -> list[float]:
    """Every log-likelihood, and whether a text is the greedy one, in the tasks' order."""
    manager = importlib.import_module("lm_eval.tasks").TaskManager
    found = lm_eval.simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=list(ROWS),
        task_manager=manager(include_path=str(tasks), include_defaults=False),
        device="cpu",
        bootstrap_iters=0,
        log_samples=True,
    )
    answers = [sample["resps"] for name in ROWS for sample in found["samples"][name]]
    return [float(value) for value in flat(answers)]


def flat(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from flat(value)
        else:
            yield value


@pytest.mark.filterwarnings("ignore")  # lm-eval's own
def test_equal_to_transformers(tasks: Path, tmp_path: Path) -> None:
    target, path = serving.target(), tmp_path / "model"
    assert target.tokenizer is not None
    target.model.save_pretrained(path)
    target.tokenizer.save_pretrained(path)
    expected = numbers("hf", f"pretrained={path},dtype=float32,max_length=1023", tasks)
    with serving.serving(serving.source()) as served:
        arguments = f"base_url={served.api}/completions,model={serving.MODEL},tokenizer={path}"
        arguments += ",tokenizer_backend=huggingface,num_concurrent=2,max_length=1024"
        found = numbers("local-completions", arguments, tasks)
    assert all(map(math.isfinite, expected))
    # Sums of up to 50 float32 log-probabilities, of passes in another order.
    assert found == pytest.approx(expected, abs=1e-3)
