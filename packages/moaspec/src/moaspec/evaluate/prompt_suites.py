"""Evaluation prompts: bundled, published suites, files, or data sets of the hub."""

import importlib.resources
import os
import re
from collections import Counter
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from moaspec.data.conversations import parse
from moaspec.data.rows import Row, data_files, read_rows, stem
from moaspec.hub import HUB
from moaspec_core.chat.messages import Message
from moaspec_core.errors import DataError

BUNDLED = {"bundled": "prompts.jsonl", "bundled-code": "code-prompts.jsonl"}
"""Files of prompts inside the package, by the suite's name."""
SUITES_VARIABLE = "MOASPEC_SUITES"
HUB_ROWS = 10_000  # largest number of rows read from a data set of the hub

ANSWERS = ("reference", "answer", "canonical_solution", "output")
_WITHOUT_ANSWERS = dict.fromkeys(("answer", "output"))
"""Columns of right answers, which are not messages of a conversation."""
NUMBER = "(number of the line)"
_LAST_NUMBER = re.compile(r"\d+$")  # of a row's place
IDS = ("question_id", "task_id", "id", NUMBER)  # names of id columns, by priority


@dataclass(frozen=True)
class Prompt:
    """One conversation of a suite."""

    suite: str
    question_id: str  # unique in the set
    turns: tuple[str, ...]  # user messages, asked in order
    category: str = ""  # the set's own grouping, or ""
    references: tuple[str, ...] = ()  # right answers, if the set has them


@dataclass(frozen=True)
class NamedSuite:
    """A published set of prompts."""

    path: str  # file or directory below `$MOASPEC_SUITES`
    files: tuple[str, ...]  # names of the sets, if it is a directory
    source: str  # where to download it


NAMED = {
    "paper": NamedSuite(
        "paper_eval",
        ("mt_bench", "humaneval", "gsm8k", "alpaca", "sum", "qa"),
        "the data folder of the paper's repository (github.com/huawei-noah/HEBO, MOASpec)",
    ),
    "spec-bench": NamedSuite(
        "spec_bench.jsonl", (), "data/spec_bench/question.jsonl of github.com/hemingkx/Spec-Bench"
    ),
    "speed-bench": NamedSuite(
        "speed_bench.jsonl",
        (),
        "the configuration `qualitative` of the data set nvidia/SPEED-Bench, after its prepare "
        "script, as JSON lines with question_id, category and turns (under NVIDIA's evaluation "
        "licence: it is not redistributed)",
    ),
}


def read_prompts(
    suite: str, *, limit: int | None = None, max_turns: int | None = None
) -> list[Prompt]:
    """Read prompts.

    Args:
        suite: "bundled", "bundled-code", "paper", "spec-bench" or "speed-bench" (the last three
            below `$MOASPEC_SUITES`), a file in a format of `moaspec.data`, a directory of such
            files, or `hub:owner/name` (see `moaspec.hub.HUB`; split "test" by default). Each row
            has `turns`, a list of texts, or another format of docs/data.md, whose user messages are
            the turns;
            `question_id`, `category` and `reference` (or `answer`) are optional.
        limit: largest number of prompts of each file, spread over its categories.
        max_turns: largest number of turns of a conversation.

    Raises:
        DataError: no such suite, an empty suite, a malformed line, or no connection to the hub.
    """
    if suite.startswith(HUB):
        prompts = _spread(_from_hub(suite), limit)
    else:
        prompts = [prompt for file in _files(suite) for prompt in _read_file(*file, limit)]
    return [replace(prompt, turns=prompt.turns[:max_turns]) for prompt in prompts]


def _files(suite: str) -> list[tuple[Path, str]]:
    if not suite:
        raise DataError("The suite has no name; give a file, a directory, or a suite's name.")
    if suite in BUNDLED:
        root = Path(str(importlib.resources.files("moaspec")))
        return [(root / "evaluate/prompts" / BUNDLED[suite], suite)]
    path = _named(suite) if suite in NAMED else Path(suite)
    if not path.is_dir():
        return [(path, suite if suite in NAMED else stem(path))]
    # Not those in folders below: an output directory may be one.
    files = [file for file in data_files(path) if file.parent == path]
    wanted = NAMED[suite].files if suite in NAMED else ()
    missing = sorted(set(wanted) - set(map(stem, files)))
    if missing:
        raise DataError(f"The suite {suite!r} at {path} lacks {', '.join(missing)}.")
    return [(file, stem(file)) for file in files if not wanted or stem(file) in wanted]


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
    """Prompts of a data set; its name without owner, configuration and split is the suite."""
    suite = source.removeprefix(HUB).partition("@")[0].partition(":")[0].rpartition("/")[2]
    rows = read_rows(source if "@" in source else f"{source}@test")
    prompts = [_prompt(row, suite) for row in islice(rows, HUB_ROWS)]
    if not prompts:
        raise DataError(f"The data set {source} has no rows.")
    return prompts


def _read_file(path: Path, suite: str, limit: int | None) -> list[Prompt]:
    prompts: dict[str, Prompt] = {}
    for row in read_rows(path):
        prompt = _prompt(row, suite)
        if prompt.question_id in prompts:
            raise DataError(f"{row.where}: question_id {prompt.question_id} occurs twice.")
        prompts[prompt.question_id] = prompt
    if not prompts:
        raise DataError(f"The suite {path} has no prompts.")
    return _spread(list(prompts.values()), limit)


def _spread(prompts: list[Prompt], limit: int | None) -> list[Prompt]:
    """Take `limit` prompts evenly from the categories, in the file's order."""
    if limit is None or limit >= len(prompts):
        return prompts
    counts = Counter[str]()
    rank: list[tuple[int, int]] = []
    for place, prompt in enumerate(prompts):
        counts[prompt.category] += 1
        rank.append((counts[prompt.category], place))
    return [prompts[place] for place in sorted(place for _, place in sorted(rank)[:limit])]


def _prompt(row: Row, suite: str) -> Prompt:
    value, number = row.value, _LAST_NUMBER.findall(row.where)[0]
    messages = _messages(row)
    turns = tuple(message["content"] for message in messages if message["role"] == "user")
    references = _first(value, ANSWERS)
    if references is None:
        references = [message["content"] for message in messages if message["role"] == "assistant"]
    return Prompt(
        suite,
        str(_first({**value, NUMBER: number}, IDS)),
        turns,
        str(value.get("category") or ""),
        tuple(map(str, references if isinstance(references, list) else [references])),
    )


def _messages(row: Row) -> tuple[Message, ...]:
    turns = row.value.get("prompt")
    if isinstance(turns, list) and all(isinstance(turn, str) for turn in turns):
        row = Row(row.where, {"turns": turns})
    try:
        conversation = parse(Row(row.where, {**row.value, **_WITHOUT_ANSWERS}))
    except DataError as error:
        cause = str(error).removeprefix(f"{row.where}: ")
        raise DataError(
            f"{row.where}: expected 'turns', a list of texts that are not empty, or 'prompt', a "
            f"text: {cause}"
        ) from error
    roles = [message["role"] for message in conversation.messages]
    other = sorted(set(roles) - {"user", "assistant"})
    if other or conversation.tools or "user" not in roles:
        what = ", ".join([*other, *(["tools"] if conversation.tools else [])]) or "no user"
        raise DataError(
            f"{row.where}: expected turns of a user, got {what}. Suites have nothing else."
        )
    return conversation.messages


def _first(row: dict[str, Any], names: tuple[str, ...]) -> Any:
    return next((row[name] for name in names if name in row), None)
