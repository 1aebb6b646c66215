"""Results on disk, one line per prompt and method; a killed run resumes with them."""

import hashlib
import json
import os
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from moaspec.evaluate.correctness.equality import Equality
from moaspec.evaluate.methods import MethodRun
from moaspec.evaluate.prompt_suites import Prompt
from moaspec.model.checkpoint.weight_files import replace_file
from moaspec_core.errors import InputError
from moaspec_core.support.locks import claimed

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
    """Results of one method on one item."""

    item: PromptTurn
    runs: tuple[MethodRun, ...]  # one per repeat
    equality: Equality  # the worst of the repeats
    batch: int = 1  # number of items decoded together


@dataclass(frozen=True)
class _Line:
    """One line of the file; `key` is the method, the batch size and the item."""

    key: tuple[str, ...]
    prompt_tokens: int
    equality: Equality
    runs: Annotated[tuple[MethodRun, ...], Field(min_length=1)]


LINE, OBJECT = TypeAdapter(_Line), TypeAdapter(dict[str, Any])


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
        self._lines: dict[tuple[str, ...], _Line] = {}
        self._path = None if directory is None else directory / RUNS
        if directory is not None and self._path is not None:
            make_results_directory(directory)
            refusal = f"Another process measures into {directory}; wait, or use another --out."
            weakref.finalize(self, os.close, claimed(self._path, refusal))
            _check_settings(directory / SETTINGS, dict(settings or {}))
            self._lines = {line.key: line for line in _whole_lines(self._path)}

    def get(self, method: str, item: PromptTurn, batch: int) -> Sample | None:
        line = self._lines.get((method, str(batch), *item.key))
        return None if line is None else Sample(item, line.runs, line.equality, batch)

    def put(self, method: str, sample: Sample) -> None:
        item, key = sample.item, (method, str(sample.batch), *sample.item.key)
        self._lines[key] = _Line(key, len(item.prompt_ids), sample.equality, sample.runs)
        if self._path is not None:
            try:
                with self._path.open("ab") as file:
                    file.write(LINE.dump_json(self._lines[key]) + b"\n")
                    file.flush()
                    os.fsync(file.fileno())
            except OSError as error:
                raise InputError(
                    f"Cannot write {self._path}: {error.strerror}. What was measured before is in "
                    "it; make room and run the same command again."
                ) from error


def make_results_directory(directory: Path) -> None:
    """Create a directory for results; InputError where it cannot be written."""
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
        old = OBJECT.validate_json(path.read_bytes())
    except ValidationError as error:
        raise _damaged(path, error) from error
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


def _whole_lines(path: Path) -> list[_Line]:
    """Read the lines of a file; remove a last line that a kill cut off."""
    data = path.read_bytes() if path.exists() else b""
    whole, lines = data[: data.rfind(b"\n") + 1], []
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            lines.append(LINE.validate_json(line))
        except ValidationError as error:
            raise _damaged(path, error, f"line {number} is no sample: ") from error
    if whole != data:
        # In place, not replaced: the file is locked.
        with path.open("r+b") as file:
            file.truncate(len(whole))
    return lines


def _damaged(path: Path, error: ValidationError, where: str = "") -> InputError:
    why = where + error.errors()[0]["msg"]
    return InputError(f"{path} is damaged ({why}); use another --out.")


def write_whole(path: Path, text: str) -> None:
    """Replace a text file atomically."""
    replace_file(path, lambda scratch: scratch.write_text(text, encoding="utf-8"))
