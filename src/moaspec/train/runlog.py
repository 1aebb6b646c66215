"""The log of a run: one JSON object per step, which a resumed run continues."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class RunLog:
    """`log.jsonl`.

    Args:
        path: the file.
        step: the step that the run continues from; later rows, of steps that a killed run lost, are
            dropped.
    """

    def __init__(self, path: Path, step: int) -> None:
        self._path = path
        rows = [row for row in self.rows() if row["step"] <= step]
        if path.exists():
            scratch = path.with_suffix(".partial")
            scratch.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            scratch.replace(path)

    def rows(self) -> list[dict[str, Any]]:
        """All whole rows."""
        if not self._path.exists():
            return []
        rows = []
        for line in self._path.read_text(encoding="utf-8").splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:  # the last line of a run that was killed while writing
                continue
        return rows

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
