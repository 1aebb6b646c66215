"""The log of a training run: one JSON object per step. A resumed run appends to it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moaspec.model.checkpoint.weight_files import replace_file


class RunLog:
    """Reads and appends the lines of `log.jsonl`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def cut(self, step: int) -> None:
        """Drop rows after the step at which the run resumes."""
        if self._path.exists():
            rows = [json.dumps(row) + "\n" for row in self.rows() if row["step"] <= step]
            replace_file(self._path, lambda path: path.write_text("".join(rows), encoding="utf-8"))

    def rows(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        rows = []
        for line in self._path.read_bytes().splitlines():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue  # the last line, if a run was killed while writing it
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                rows.append(row)
        return rows

    def write(self, row: Mapping[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
