"""The model card of an exported drafter."""

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import torch
import transformers

import moaspec
from moaspec.generation.destinations import destinations
from moaspec.model.moa import MoADrafter
from moaspec_core.tokens.names import hub_id
from moaspec_train.run_config import TrainConfig
from moaspec_train.students.students import Student

CARD_FILE = "README.md"
CURVE_ROWS = 20

_TEMPLATE = Path(__file__).with_suffix(".md.jinja")


def write_card(
    directory: Path,
    student: Student,
    config: TrainConfig,
    info: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
) -> None:
    """Write `README.md` beside a checkpoint: data, settings, versions, loss curve, results."""
    measured = [row for row in rows if row.get("held_out_accuracy")]
    target = student.target
    source = _TEMPLATE.read_text(encoding="utf-8")
    # Autoescaping is for HTML; this is Markdown from the run's own numbers.
    template = jinja2.Environment(autoescape=False).from_string(source)  # noqa: S701
    text = template.render(
        target=target,
        identity=target.identity,
        base_model=hub_id(config.target),
        **_commands(student, config),
        config=config,
        info=info,
        parameters=f"{sum(p.numel() for p in student.module.parameters()) / 1e6:.1f}M",
        vocabulary=student.vocab_size,
        versions=f"moaspec {moaspec.__version__}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}",
        measured=measured[-1] if measured else None,
        curve=rows[:: max(1, len(rows) // CURVE_ROWS)],
        settings=json.dumps(info["config"], indent=2),
    )
    (directory / CARD_FILE).write_text(text, encoding="utf-8")


def _commands(student: Student, config: TrainConfig) -> dict[str, Any]:
    """What the card's commands are made of; those that refuse this drafter are left out."""
    places = {} if config.adapter else destinations(student.module, student.target)
    model = shlex.quote(config.target)
    adapter = f" --adapter {shlex.quote(config.adapter)}" if config.adapter else ""
    return {
        "model": model,
        "options": f"--model {model}{adapter}",
        "on_vllm": "vllm" in places and places["vllm"] is None,
        "in_python": isinstance(student.module, MoADrafter),
    }
