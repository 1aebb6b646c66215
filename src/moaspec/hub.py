"""Rows of data sets of the hub."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

from moaspec.errors import DataError

HUB = "hub:"
"""`hub:owner/name`, `hub:owner/name@split`, `hub:owner/name:configuration@split`."""


def hub_rows(source: str, *, split: str = "train") -> Iterator[dict[str, Any]]:
    """Rows of a data set, fetched as they are asked for.

    Args:
        source: see `HUB`.
        split: where the source names none.

    Raises:
        DataError: the package `datasets` is missing, or the hub cannot be asked, or has no such
            data set, configuration or split.
    """
    name, _, named_split = source.removeprefix(HUB).partition("@")
    name, _, configuration = name.partition(":")
    if not name or source.endswith("@"):
        raise DataError(
            f"{source!r} names no data set; write {HUB}OWNER/NAME, {HUB}OWNER/NAME@SPLIT or "
            f"{HUB}OWNER/NAME:CONFIGURATION@SPLIT."
        )
    load = _load_dataset()
    try:
        rows = load(name, configuration or None, split=named_split or split, streaming=True)
        for row in rows:
            yield dict(row)
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(f"Cannot read the data set {source!r} of the hub: {error}") from error


def _load_dataset() -> Callable[..., Any]:
    # Imported here: only hub users need it.
    try:
        return importlib.import_module("datasets").load_dataset
    except ImportError as error:
        raise DataError(
            "Data sets of the hub need the package `datasets`: pip install 'moaspec[hub]'. "
            "Local JSONL files work without it."
        ) from error
