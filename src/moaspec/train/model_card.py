"""The model card of an exported drafter."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import torch
import transformers

import moaspec
from moaspec.target.target import Target
from moaspec.train.run_config import TrainConfig

CARD_FILE = "README.md"
CURVE_ROWS = 20

_TEMPLATE = Path(__file__).with_suffix(".md.jinja")


def write_card(
    directory: Path,
    target: Target,
    config: TrainConfig,
    facts: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
) -> None:
    """Write `README.md` beside a checkpoint: data, settings, versions, loss curve, results."""
    measured = [row for row in rows if row.get("held_out_accuracy")]
    source = _TEMPLATE.read_text(encoding="utf-8")
    # Autoescaping is for HTML; this is Markdown from the run's own numbers.
    template = jinja2.Environment(autoescape=False).from_string(source)  # noqa: S701
    text = template.render(
        target=target,
        identity=target.identity,
        config=config,
        facts=facts,
        versions=f"moaspec {moaspec.__version__}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}",
        measured=measured[-1] if measured else None,
        curve=rows[:: max(1, len(rows) // CURVE_ROWS)],
        settings=json.dumps(facts["config"], indent=2),
    )
    (directory / CARD_FILE).write_text(text, encoding="utf-8")
