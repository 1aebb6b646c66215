"""Prompts to measure on: the package's own, a directory of suites, or one JSONL file."""

from __future__ import annotations

import importlib.resources
import json
from dataclasses import dataclass
from pathlib import Path

from moaspec.errors import DataError

BUNDLED = "bundled"


@dataclass(frozen=True)
class Prompt:
    """One question. Only the first turn of a conversation is asked."""

    suite: str
    question_id: str
    text: str


def read_prompts(suite: str, *, limit: int | None = None) -> list[Prompt]:
    """Read prompts.

    Args:
        suite: "bundled", a JSONL file, or a directory whose `*.jsonl` files are suites. Each line
            is an object with `turns`, a list of texts.
        limit: at most so many of each file.

    Raises:
        DataError: nothing there, an empty suite, or a malformed line.
    """
    if suite == BUNDLED:
        path = Path(str(importlib.resources.files("moaspec"))) / "bundled" / "prompts.jsonl"
        return _read_file(path, BUNDLED, limit)
    path = Path(suite)
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not files:
        raise DataError(f"The directory {path} holds no *.jsonl file.")
    return [prompt for file in files for prompt in _read_file(file, file.stem, limit)]


def _read_file(path: Path, suite: str, limit: int | None) -> list[Prompt]:
    prompts: list[Prompt] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"Cannot read the suite {path}: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip() or (limit is not None and len(prompts) >= limit):
            continue
        try:
            row = json.loads(line)
            turns: list[object] = row["turns"]
            text = turns[0] if isinstance(turns, list) else None
            identifier = str(row.get("question_id", number))
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise DataError(f"{path}:{number}: expected an object with a list 'turns'.") from error
        if not isinstance(text, str) or not text.strip():
            raise DataError(f"{path}:{number}: the first turn must be a text.")
        prompts.append(Prompt(suite, identifier, text))
    if not prompts:
        raise DataError(f"The suite {path} has no prompts.")
    return prompts
