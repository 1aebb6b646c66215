"""Prompts to measure on: named suites, the package's own, files, or data sets of the hub."""

from __future__ import annotations

import importlib.resources
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from moaspec.errors import DataError
from moaspec.hub import HUB, hub_rows

BUNDLED = "bundled"
SUITES_VARIABLE = "MOASPEC_SUITES"
MAX_SUITE = 1 << 28
"""Characters of a suite."""
HUB_ROWS = 10_000
"""At most so many rows of a data set of the hub are read; larger ones are training data."""

QUESTIONS = ("turns", "prompt", "question", "instruction")
ANSWERS = ("reference", "answer", "canonical_solution", "output")
NUMBER = "(number of the line)"
IDS = ("question_id", "task_id", "id", NUMBER)
"""Names of columns, those first that win."""


@dataclass(frozen=True)
class Prompt:
    """One conversation: turns of a user, asked one after another.

    Attributes:
        suite: which set it belongs to.
        question_id: unique in the set.
        turns: what the user says.
        category: the set's own grouping; "" where it has none.
        references: right answers, where the set has them.
    """

    suite: str
    question_id: str
    turns: tuple[str, ...]
    category: str = ""
    references: tuple[str, ...] = ()


@dataclass(frozen=True)
class NamedSuite:
    """A published set of prompts.

    Attributes:
        path: file or directory below `$MOASPEC_SUITES`.
        files: names of the sets, where it is a directory.
        source: where it can be had.
    """

    path: str
    files: tuple[str, ...]
    source: str


NAMED = {
    "paper": NamedSuite(
        "paper_eval",
        ("mt_bench", "humaneval", "gsm8k", "alpaca", "sum", "qa"),
        "the data folder of the paper's repository (github.com/huawei-noah/HEBO, MOASpec)",
    ),
    "spec-bench": NamedSuite(
        "spec_bench.jsonl", (), "data/spec_bench/question.jsonl of github.com/hemingkx/Spec-Bench"
    ),
}


def read_prompts(
    suite: str, *, limit: int | None = None, max_turns: int | None = None
) -> list[Prompt]:
    """Read prompts.

    Args:
        suite: "bundled", "paper" or "spec-bench" (looked for below `$MOASPEC_SUITES`), a JSONL
            file, a directory whose `*.jsonl` files are suites, or `hub:owner/name`, see
            `moaspec.hub.HUB`, by default its split "test". Each line or row is an object with
            `turns`, a list of texts, or with `prompt` (or `question`, or `instruction` and
            `input`), one text; `question_id`, `category` and `reference` (or `answer`) may stand
            beside them.
        limit: at most so many of each file, spread over its categories.
        max_turns: at most so many turns of each conversation.

    Raises:
        DataError: nothing there, an empty suite, a malformed line, or a hub out of reach.
    """
    if suite.startswith(HUB):
        prompts = _spread(_from_hub(suite), limit)
    else:
        prompts = [prompt for file in _files(suite) for prompt in _read_file(*file, limit)]
    return [_shortened(prompt, max_turns) for prompt in prompts]


def _files(suite: str) -> list[tuple[Path, str]]:
    """Paths, and the suite that each is."""
    if not suite:
        raise DataError("The suite has no name; give a file, a directory, or a suite's name.")
    if suite == BUNDLED:
        root = Path(str(importlib.resources.files("moaspec")))
        return [(root / "bundled" / "prompts.jsonl", BUNDLED)]
    path = _named(suite) if suite in NAMED else Path(suite)
    if not path.is_dir():
        return [(path, suite if suite in NAMED else path.stem)]
    files = sorted(path.glob("*.jsonl"))
    if not files:
        raise DataError(f"The directory {path} holds no *.jsonl file.")
    wanted = NAMED[suite].files if suite in NAMED else ()
    missing = sorted(set(wanted) - {file.stem for file in files})
    if missing:
        raise DataError(f"The suite {suite!r} at {path} lacks {', '.join(missing)}.")
    return [(file, file.stem) for file in files if not wanted or file.stem in wanted]


def _named(suite: str) -> Path:
    root, known = os.environ.get(SUITES_VARIABLE), NAMED[suite]
    path = Path(root or ".") / known.path
    if root is None or not path.exists():
        raise DataError(
            f"The suite {suite!r} is not here: expected {known.path} in the directory that "
            f"${SUITES_VARIABLE} names ({root or 'not set'}). It is {known.source}; or give "
            "--suite a path."
        )
    return path


def _from_hub(source: str) -> list[Prompt]:
    """Prompts of a data set; the suite has its name, without owner, configuration and split."""
    suite = source.removeprefix(HUB).partition("@")[0].partition(":")[0].rpartition("/")[2]
    rows = islice(hub_rows(source, split="test"), HUB_ROWS)
    prompts = [
        _prompt(row, f"{source}:{number}", suite, number) for number, row in enumerate(rows, 1)
    ]
    if not prompts:
        raise DataError(f"The data set {source} has no rows.")
    return prompts


def _read_file(path: Path, suite: str, limit: int | None) -> list[Prompt]:
    try:
        with path.open(encoding="utf-8-sig") as file:
            text = file.read(MAX_SUITE + 1)
        if len(text) > MAX_SUITE:
            raise ValueError(f"more than {MAX_SUITE:,} characters")
    except (OSError, ValueError) as error:
        raise DataError(f"Cannot read the suite {path}: {error}") from error
    prompts = list(_parsed(text, path, suite))
    if not prompts:
        raise DataError(f"The suite {path} has no prompts.")
    return _spread(prompts, limit)


def _spread(prompts: list[Prompt], limit: int | None) -> list[Prompt]:
    """`limit` prompts, in turn from each category, in the file's order."""
    if limit is None or limit >= len(prompts):
        return prompts
    counts: dict[str, int] = {}
    rank: list[tuple[int, int]] = []
    for place, prompt in enumerate(prompts):
        counts[prompt.category] = counts.get(prompt.category, 0) + 1
        rank.append((counts[prompt.category], place))
    return [prompts[place] for place in sorted(place for _, place in sorted(rank)[:limit])]


def _parsed(text: str, path: Path, suite: str) -> Iterator[Prompt]:
    seen: set[str] = set()
    # Not splitlines(): JSON texts may hold other separators of lines.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        prompt = _prompt(_row(line, where), where, suite, number)
        if prompt.question_id in seen:
            raise DataError(f"{where}: question_id {prompt.question_id} occurs twice.")
        seen.add(prompt.question_id)
        yield prompt


def _row(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
        json.dumps(row, ensure_ascii=False).encode()  # a lone surrogate is no character
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON ({error}).") from error
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected an object with 'turns', got {type(row).__name__}.")
    return row


def _prompt(row: dict[str, Any], where: str, suite: str, number: int) -> Prompt:
    turns = _first(row, QUESTIONS)
    turns = turns if isinstance(turns, list) else [turns]
    if "turns" in row and not isinstance(row["turns"], list):
        turns = []
    if not turns or not all(map(_is_text, turns)):
        raise DataError(
            f"{where}: expected 'turns', a list of texts that are not empty, or 'prompt', a text."
        )
    if "instruction" in row and row.get("input"):
        turns = [f"{turns[0]}\n\n{row['input']}"]
    references = _first(row, ANSWERS)
    if references is None:
        references = []
    return Prompt(
        suite,
        str(_first({**row, NUMBER: number}, IDS)),
        tuple(turns),
        str(row.get("category") or ""),
        tuple(map(str, references if isinstance(references, list) else [references])),
    )


def _first(row: dict[str, Any], names: tuple[str, ...]) -> Any:
    """The first of these columns that a row has."""
    return next((row[name] for name in names if name in row), None)


def _is_text(turn: object) -> bool:
    return isinstance(turn, str) and bool(turn.strip())


def _shortened(prompt: Prompt, max_turns: int | None) -> Prompt:
    turns = prompt.turns[:max_turns]
    return Prompt(prompt.suite, prompt.question_id, turns, prompt.category, prompt.references)
