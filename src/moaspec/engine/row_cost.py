"""How much longer a step takes with each further row, learned from the steps."""

from __future__ import annotations

MIN_ROWS = 4
"""Rows that `RowCost.rows` allows at least, and where nothing is known yet."""

MAX_ROWS = 1024
MAX_STEP = 1.5
"""See `RowCost.rows`."""

MEMORY_STEPS = 256
"""The weight of a step has fallen to 1/e after so many further ones."""


class RowCost:
    """Fits seconds = fixed + per_row * rows to the steps (least squares, recent ones count more).

    A server that gives each client a share of a step asks it how many rows one client may bring.
    On a GPU these are many, because the weights are read once for all rows; on a CPU they are few.
    """

    def __init__(self) -> None:
        self._weight = self._rows = self._seconds = 0.0
        self._rows_rows = self._rows_seconds = 0.0

    def add(self, rows: int, seconds: float) -> None:
        """Record a step of `rows` rows; steps that process prompts are not comparable."""
        keep = 1 - 1 / MEMORY_STEPS
        self._weight = keep * self._weight + 1
        self._rows = keep * self._rows + rows
        self._seconds = keep * self._seconds + seconds
        self._rows_rows = keep * self._rows_rows + rows * rows
        self._rows_seconds = keep * self._rows_seconds + rows * seconds

    @property
    def rows(self) -> int:
        """Most rows of a step that takes at most `MAX_STEP` times as long as a step of one row."""
        spread = self._weight * self._rows_rows - self._rows**2
        if spread <= self._weight:  # nearly all steps had the same number of rows
            return MIN_ROWS
        covariance = self._weight * self._rows_seconds - self._rows * self._seconds
        per_row = covariance / spread
        fixed = (self._seconds - per_row * self._rows) / self._weight
        if fixed >= MAX_ROWS * per_row:
            return MAX_ROWS
        return max(MIN_ROWS, int((MAX_STEP - 1) * fixed / per_row + MAX_STEP))
