"""Results on disk, one line per prompt and method; a killed run resumes with them."""

from __future__ import annotations

import hashlib
import json
import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from moaspec.engine.result import GenerationResult, Timing
from moaspec.errors import InputError
from moaspec.evaluate.correctness.equality import Equality
from moaspec.evaluate.methods import MethodRun
from moaspec.evaluate.prompt_suites import Prompt
from moaspec.model.checkpoint.weight_files import replace_file
from moaspec.support.locks import claimed

RUNS, SETTINGS = "runs.jsonl", "settings.json"


@dataclass(frozen=True)
class PromptTurn:
    """One turn of a conversation, as token ids."""

    prompt: Prompt
    turn: int
    prompt_ids: tuple[int, ...]

    @property
    def key(self) -> tuple[str, ...]:
        digest = hashlib.sha256(",".join(map(str, self.prompt_ids)).encode()).hexdigest()
        return (self.prompt.suite, self.prompt.question_id, str(self.turn), digest[:16])


@dataclass(frozen=True)
class Sample:
    """Results of one method on one item.

    Attributes:
        runs: one per repeat.
        equality: the worst of the repeats.
        batch: number of items decoded together.
    """

    item: PromptTurn
    runs: tuple[MethodRun, ...]
    equality: Equality
    batch: int = 1


class ResultsStore:
    """Samples by method and item, in memory and, with a directory, on disk.

    Args:
        directory: of the results, created if missing; None keeps them in memory only.
        settings: of all samples in the directory.

    Raises:
        InputError: the directory cannot be written, holds results of other settings, or another
            process is writing to it.
    """

    def __init__(
        self, directory: Path | None = None, settings: Mapping[str, Any] | None = None
    ) -> None:
        self._lines: dict[tuple[str, ...], dict[str, Any]] = {}
        self._path = None if directory is None else directory / RUNS
        if directory is not None and self._path is not None:
            make_results_directory(directory)
            refusal = f"Another process measures into {directory}; wait, or use another --out."
            weakref.finalize(self, os.close, claimed(self._path, refusal))
            _check_settings(directory / SETTINGS, dict(settings or {}))
            for line in _whole_lines(self._path):
                self._lines[tuple(line["key"])] = line

    def get(self, method: str, item: PromptTurn, batch: int) -> Sample | None:
        line = self._lines.get((method, str(batch), *item.key))
        if line is None:
            return None
        runs = tuple(_run(run) for run in line["runs"])
        return Sample(item, runs, Equality(**line["equality"]), batch)

    def put(self, method: str, sample: Sample) -> None:
        key = (method, str(sample.batch), *sample.item.key)
        line = {
            "key": key,
            "prompt_tokens": len(sample.item.prompt_ids),
            "equality": asdict(sample.equality),
            "runs": [asdict(run) for run in sample.runs],
        }
        self._lines[key] = line
        if self._path is not None:
            try:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line, allow_nan=False) + "\n")
                    file.flush()
                    os.fsync(file.fileno())
            except OSError as error:
                raise InputError(
                    f"Cannot write {self._path}: {error.strerror}. What was measured before is in "
                    "it; make room and run the same command again."
                ) from error


def make_results_directory(directory: Path) -> None:
    """Create a directory for results.

    Raises:
        InputError: the directory cannot be created or written.
    """
    probe = directory / f".{os.getpid()}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise InputError(
            f"Cannot write results to {directory}: {error.strerror}. Choose another --out."
        ) from error


def _check_settings(path: Path, settings: dict[str, Any]) -> None:
    """Write the settings, or check that a resumed run has the same."""
    settings = json.loads(json.dumps(settings))
    if not path.exists():
        write_whole(path, json.dumps(settings, indent=1) + "\n")
        return
    try:
        old = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise _damaged(path, str(error)) from error
    if not isinstance(old, dict):
        raise _damaged(path, "no JSON object")
    changed = [
        f"{name} was {old.get(name)!r} and is {settings.get(name)!r}"
        for name in sorted(old.keys() | settings.keys())
        if old.get(name) != settings.get(name)
    ]
    if changed:
        raise InputError(
            f"{path.parent} holds results of other settings: {'; '.join(changed)}. Use the same "
            "ones to resume, or another --out."
        )


def _whole_lines(path: Path) -> Sequence[dict[str, Any]]:
    """Read the lines of a file; remove a last line that a kill cut off."""
    if not path.exists():
        return []
    try:
        text = path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]
        lines = [json.loads(line) for line in whole.splitlines()]
    except (ValueError, RecursionError) as error:
        raise _damaged(path, str(error)) from error
    for number, line in enumerate(lines, start=1):
        try:
            tuple(map(str.strip, line["key"])), Equality(**line["equality"])
            if not [_run(run) for run in line["runs"]]:
                raise ValueError("no run")
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise _damaged(path, f"line {number} is no sample: {error!r}") from error
    if whole != text:
        # In place, not replaced: the file is locked.
        with path.open("r+b") as file:
            file.truncate(len(whole.encode()))
    return lines


def _damaged(path: Path, why: str) -> InputError:
    return InputError(f"{path} is damaged ({why}); use another --out.")


def write_whole(path: Path, text: str) -> None:
    """Replace a text file atomically."""
    replace_file(path, lambda scratch: scratch.write_text(text, encoding="utf-8"))


def _run(line: dict[str, Any]) -> MethodRun:
    """Build a run from its `asdict`, ignoring unknown fields."""
    result = dict(line["result"])
    result["timing"] = Timing(**_known(Timing, result["timing"]))
    # Earlier versions had no n-gram branches.
    result.setdefault("copied_lengths", [0] * len(result["accept_lengths"]))
    made = GenerationResult(**_known(GenerationResult, result))
    return MethodRun(**_known(MethodRun, {**line, "result": made}))


def _known(kind: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    names = {field.name for field in fields(kind)}
    return {name: value for name, value in values.items() if name in names}
