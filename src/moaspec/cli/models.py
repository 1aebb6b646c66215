"""`moaspec models`: lists targets and drafters."""

import json
from typing import Any

from moaspec_core.bundled import bundled_drafters
from moaspec_core.cli.options import Json
from moaspec_core.cli.terminal import console
from moaspec_core.cli.terminal.table import Table, show_table
from moaspec_core.tokens.names import ALIASES, SUPPORTED_FAMILIES, Alias, local_gguf


def models(as_json: Json = False) -> None:
    """List target aliases and bundled drafters.

    Example: moaspec models
    """
    rows: list[dict[str, Any]] = [
        {
            "alias": name,
            "source": _source(alias),
            "hub_id": alias.hub_id,
            "drafters": [d for d in bundled_drafters() if f"{d}-".startswith(f"{name}-")],
        }
        for name, alias in ALIASES.items()
    ]
    if as_json:
        console.out.print(json.dumps({"models": rows, "families": SUPPORTED_FAMILIES}))
        return
    show_table(_table(rows))
    console.out.print()
    console.print_wrapped(
        f"Also: any directory or hub id of these families: {', '.join(SUPPORTED_FAMILIES)}. Most "
        "other causal models of transformers run too, without the fastest paths: docs/models.md."
    )


def _source(alias: Alias) -> str:
    """Where loading takes the weights from."""
    if local_gguf(alias) is None:
        return "hub"
    return f"package {alias.package}" if alias.package else "fetched file"


def _table(rows: list[dict[str, Any]]) -> Table:
    headings = ("alias", "weights from", "hub id", "drafters")
    cells = [
        (row["alias"], row["source"], row["hub_id"], ", ".join(row["drafters"]) or "none")
        for row in rows
    ]
    return Table(headings, cells)
