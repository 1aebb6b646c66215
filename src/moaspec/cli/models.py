"""`moaspec models`."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.table import Table

from moaspec.cli import console
from moaspec.decode import bundled_drafters
from moaspec.target import ALIASES, SUPPORTED_FAMILIES
from moaspec.target.registry import packaged_gguf


def models(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List target aliases and bundled drafters.

    Example: moaspec models
    """
    rows = [
        {
            "alias": name,
            "source": f"package {alias.package}" if packaged_gguf(alias) else "hub",
            "hub_id": alias.hub_id,
            "drafters": ", ".join(d for d in bundled_drafters() if f"{d}-".startswith(f"{name}-")),
        }
        for name, alias in ALIASES.items()
    ]
    if as_json:
        console.out.print(json.dumps({"models": rows, "families": SUPPORTED_FAMILIES}))
        return
    table = Table("alias", "weights from", "hub id", "drafters")
    for row in rows:
        table.add_row(*(str(value or "none") for value in row.values()))
    console.out.print(table)
    console.out.print(
        f"Also: any directory or hub id of these families: {', '.join(SUPPORTED_FAMILIES)}."
    )
