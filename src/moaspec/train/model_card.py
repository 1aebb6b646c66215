"""The model card of an exported drafter."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import torch
import transformers

from moaspec.target.target import Target
from moaspec.train.run_config import TrainConfig

CARD_FILE = "README.md"
CURVE_ROWS = 20

_TEMPLATE = """\
---
library_name: moaspec
tags: [speculative-decoding, mixture-of-attentions]
---
# Drafter for {{ target.name }}

Proposes tokens that the target checks, so the text stays the target's own
([moaspec](https://arxiv.org/abs/2410.03804)). It works with no other model.

```python
target = moaspec.load_target({{ config.target | tojson }})
drafter = moaspec.load_drafter("DIRECTORY", target=target)
```

| | |
|---|---|
| target | {{ identity.model_type }}, {{ identity.num_layers }} layers, hidden size \
{{ identity.hidden_size }}, vocabulary {{ identity.vocab_size }} |
| reused target layers N | {{ config.num_target_layers | join(", ") }} |
| steps | {{ facts.steps }} of {{ config.steps }} |
| tokens with loss | {{ facts.loss_tokens }} |
| training conversations | {{ facts.examples }} |
| versions | {{ versions }} |

## Results on held-out conversations
{% if measured %}
{{ config.held_out }} conversations that were not trained on. Accuracy: share of drafts that are the
target's first choice, given that all before are the target's. Simulated tau: tokens per round of a
greedy chain of {{ measured.held_out_accuracy | length }} drafts.

| draft step | {{ range(1, measured.held_out_accuracy | length + 1) | join(" | ") }} |
|---|{{ "---|" * (measured.held_out_accuracy | length) }}
| accuracy | {{ measured.held_out_accuracy | join(" | ") }} |

| N | simulated tau |
|---|---|
{% for n, tau in measured.held_out_tau.items() -%}
| {{ n }} | {{ "not measured" if tau is none else tau }} |
{% endfor %}
{%- else %}
Not measured.
{% endif %}
## Data

{% for source in config.data -%}
- `{{ source }}`
{% endfor %}
Responses in it should be the target's own; loss is on response tokens only.

## Curve

| step | loss | feature | divergence | accuracy |
|---|---|---|---|---|
{% for row in curve -%}
| {{ row.step }} | {{ row.loss }} | {{ row.feature }} | {{ row.kl }} | {{ row.accuracy }} |
{% endfor %}
## Settings

```json
{{ settings }}
```
"""


def write_card(
    directory: Path,
    target: Target,
    config: TrainConfig,
    facts: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
) -> None:
    """Write `README.md` beside a checkpoint: data, settings, versions, loss curve, results."""
    measured = [row for row in rows if row.get("held_out_accuracy")]
    # Autoescaping is for HTML; this is Markdown from the run's own numbers.
    template = jinja2.Environment(autoescape=False).from_string(_TEMPLATE)  # noqa: S701
    text = template.render(
        target=target,
        identity=target.identity,
        config=config,
        facts=facts,
        versions=_versions(),
        measured=measured[-1] if measured else None,
        curve=rows[:: max(1, len(rows) // CURVE_ROWS)],
        settings=json.dumps(facts["config"], indent=2),
    )
    (directory / CARD_FILE).write_text(text, encoding="utf-8")


def _versions() -> str:
    own = importlib.metadata.version("moaspec")
    return f"moaspec {own}, torch {torch.__version__}, transformers {transformers.__version__}"
