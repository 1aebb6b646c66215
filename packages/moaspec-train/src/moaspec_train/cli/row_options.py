"""Options of commands that read rows of data, and their messages about rows left out."""

from typing import Annotated

import typer

from moaspec.data.conversations import ReadReport
from moaspec_core.cli.terminal import console
from moaspec_core.errors import DataError

SHOWN_ERRORS = 3
Sources = Annotated[
    list[str],
    typer.Argument(
        help="Files (JSON lines, JSON, Parquet; compressed too), directories of them, or "
        "hub:OWNER/NAME, also with :CONFIGURATION and @SPLIT."
    ),
]
Skip = Annotated[
    bool, typer.Option("--skip-malformed", help="Skip malformed rows, and count them.")
]


class MalformedRows:
    """Refuses the first malformed row, or counts them and shows the first few."""

    def __init__(self, *, skip: bool) -> None:
        self._skip, self._count = skip, 0

    def __call__(self, error: DataError) -> None:
        if not self._skip:
            raise error
        self._count += 1
        if self._count <= SHOWN_ERRORS:
            console.warn(f"Skipped: {error}")

    def tell(self) -> None:
        """Print how many rows were skipped."""
        if self._count:
            console.warn(f"{self._count} malformed rows skipped.")


def tell_unused(report: ReadReport) -> None:
    """Print which columns, files and examples were not used."""
    for line in report.lines():
        console.warn(line)
