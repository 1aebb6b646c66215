"""The command `moaspec eval page`."""

from pathlib import Path
from typing import Annotated

import typer

from moaspec_core.cli.terminal import console
from moaspec_core.cli.terminal.status import status
from moaspec_core.errors import InputError


def page(
    directory: Annotated[Path, typer.Argument(help="Directory that --out of moaspec eval named.")],
    markdown: Annotated[
        list[Path] | None,
        typer.Option(
            help="Also write tables and plots into this Markdown file: between its lines "
            "`<!-- results -->` and `<!-- /results -->` where it has them, else as a whole. May be "
            "given several times."
        ),
    ] = None,
) -> None:
    """Write report.html anew, in a checkout.

    Example: moaspec eval page results --markdown results.md
    """
    from eval_report.pages import write_markdown, write_page

    try:
        with status("Drawing the report"):
            written = [write_page(directory)]
            for path in markdown or ():
                write_markdown(directory, path)
                written.append(path)
    except OSError as error:
        raise InputError(f"The page cannot be written: {error}.") from error
    console.out.print(f"Written: {', '.join(map(str, written))}")
